"""The log lines of requests that the engine can't serve, few enough when a client sends nothing else."""

import logging
from collections.abc import Callable

from engine_stub.wire.codec import Problem

LOG = logging.getLogger("engine_stub")
BURST = 10
INTERVAL_S = 5.0


class FailureLog:
    """Of one rank: at most `BURST` lines in `INTERVAL_S`; the next one says how many were left out."""

    def __init__(self, index: int, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self._began_at = clock()
        self._lines = 0
        self._suppressed = 0

    def note(self, request_id: str | None, problem: Problem) -> None:
        """A request failed, or (None) what arrived is none."""
        now = self._clock()
        if now - self._began_at >= INTERVAL_S:
            self._began_at, self._lines = now, 0
        if self._lines == BURST:
            self._suppressed += 1
            return
        self._lines += 1
        facts = {"engine_index": self._index, "id": request_id, "cause": problem.reason}
        if self._suppressed:
            facts["suppressed"], self._suppressed = self._suppressed, 0
        LOG.warning("request_failed", extra=facts)

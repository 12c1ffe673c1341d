"""Clients that broke a rule and lost their connection for it: counted by error code, logged now and then."""

import time
from collections.abc import Callable

import structlog

from gateway.h2.protocol.errors import ErrorCode

LOG_INTERVAL_S = 10.0
_log = structlog.get_logger("gateway.h2")


class Faults:
    """`counts` by the name of the HTTP/2 error code. One log line per code and interval at most."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[str, int] = {}
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}

    def note(self, code: ErrorCode, message: str, peer: str) -> None:
        """A connection ends with this error."""
        name = code.name
        count = self.counts[name] = self.counts.get(name, 0) + 1
        now = self._clock()
        logged_at, logged_count = self._logged.get(name, (None, 0))
        if logged_at is None or now - logged_at >= LOG_INTERVAL_S:
            self._logged[name] = (now, count)
            more = count - logged_count - 1
            _log.warning("http2_error", code=name, problem=message, peer=peer, more_before=more)

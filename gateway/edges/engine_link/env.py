"""What all ranks of one link share, and the order in which events leave it."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from gateway.core.events import Event
from gateway.edges.engine_link.counters import LimitedLog, LinkCounters
from gateway.edges.engine_link.endpoints import Endpoints
from gateway.edges.engine_link.monitored import Context
from gateway.edges.state_store import StateStore


class EventQueue:
    """Two ways out: `emit` from a socket callback, `defer` from inside `send` and `abort`.

    The driver is running effects while it calls `send`; an event fed to it then would re-enter the core.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, emit: Callable[[Event], None]) -> None:
        self._loop = loop
        self._emit = emit
        self._deferred: deque[Event] = deque()
        self._scheduled: asyncio.Handle | None = None
        self._closed = False

    def emit(self, event: Event) -> None:
        """Feed the core now, after what was deferred earlier."""
        if self._closed:
            return
        if self._deferred:
            self._flush()
        self._emit(event)

    def defer(self, event: Event) -> None:
        """Feed the core in the next turn of the loop."""
        if self._closed:
            return
        self._deferred.append(event)
        self._schedule()

    def close(self) -> None:
        """Nothing leaves any more."""
        self._closed = True
        self._deferred.clear()
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _schedule(self) -> None:
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        # Only what is there now: handling an event may defer another one, and the loop must turn.
        try:
            for _ in range(len(self._deferred)):
                self._emit(self._deferred.popleft())
        finally:
            if self._deferred:
                self._schedule()


@dataclass(frozen=True, slots=True)
class LinkEnv:
    """Shared by the link's parts; owned by `EngineLink`."""

    loop: asyncio.AbstractEventLoop
    context: Context
    events: EventQueue
    counters: LinkCounters
    endpoints: Endpoints
    store: StateStore | None
    max_context_tokens: int
    log: FilteringBoundLogger
    limited_log: LimitedLog

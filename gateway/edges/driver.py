"""The only caller of `Router.handle`: runs effects and flushes outboxes once per loop turn.

Everything here is synchronous and runs on one event loop, so nothing can come between the core's
check and its charge. Tokens that arrive in one loop turn leave in one message per sequence.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gateway.core.effects import (
    AbortOnRank,
    Dispatch,
    Effect,
    RankStateChanged,
    RequestAccepted,
    RequestEnded,
    RequestRefused,
)
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import Event, RequestArrived, RequestCancelled, Tick
from gateway.core.request import Request, Sequence
from gateway.core.router import Router
from gateway.types import EngineRequest

TICK_INTERVAL_S = 0.05


class Sink(Protocol):
    """Where a request's output goes: the northbound edge's object in `Request.sink`."""

    def flush(self, sequence: Sequence) -> None:
        """Take the sequence's outbox and pass it on. Called at most once per loop turn. Must not block."""
        ...

    def end(self, request: Request) -> None:
        """The request reached its one terminal outcome; its last `flush` has happened."""
        ...


class Link(Protocol):
    """Where attempts go: the southbound edge."""

    def send(self, rank: int, incarnation: int, request: EngineRequest) -> None:
        """Hand an ADD to the rank; failures come back as events."""
        ...

    def abort(self, rank: int, incarnation: int, wire_ids: list[str]) -> None:
        """Hand an ABORT to the rank, behind every earlier ADD of that rank."""
        ...


class Driver:
    """Owns the router. `emit` for events, `submit` for requests."""

    def __init__(
        self,
        router: Router,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_ended: Callable[[Request], None] = lambda _: None,
        on_rank_change: Callable[[RankStateChanged], None] = lambda _: None,
        on_defect: Callable[[str, Exception], None] = lambda *_: None,
    ) -> None:
        self.router = router
        self.clock = clock
        self.link: Link | None = None
        # Set when the process begins to stop, before the core refuses requests: what asks for its health shall go
        # elsewhere, what has not asked yet is still served.
        self.is_stopping = False
        self._on_ended = on_ended
        self._on_rank_change = on_rank_change
        self._on_defect = on_defect
        self._flush_scheduled = False
        self._ended: list[Request] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_running = False
        self._waiting: deque[Event] = deque()

    def emit(self, event: Event) -> None:
        """Feed one event to the core and run what it wants done.

        An event that is emitted while effects run waits until they are done: otherwise a failed send
        could end a request between two of its own dispatches.
        """
        if self._is_running:
            self._waiting.append(event)
            return
        self._run_all(self.router.handle(event, self.clock()))

    def submit(self, arrived: RequestArrived) -> Request:
        """Admit a request. Raises `GatewayError` when it is refused; nothing is held then."""
        if self._is_running:
            raise GatewayError(Reason.INTERNAL, "a request was submitted from within an effect")
        effects = self.router.handle(arrived, self.clock())
        first = effects[0]
        if isinstance(first, RequestRefused):
            raise first.error
        assert isinstance(first, RequestAccepted)
        self._run_all(effects[1:])
        return first.request

    def cancel(self, request: Request, reason: Reason) -> None:
        """End a live request early; a request that has ended is left alone."""
        if not request.is_ended:
            self.emit(RequestCancelled(request.handle, reason))

    async def run_ticks(self) -> None:
        """Give the core the time at a fixed interval until cancelled."""
        tick = Tick()
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            try:
                self.emit(tick)
            except Exception as error:  # noqa: BLE001 - without ticks no deadline would ever pass again
                self._on_defect("tick", error)

    def _run_all(self, effects: list[Effect]) -> None:
        self._is_running = True
        try:
            self._run_each(effects)
            while self._waiting:
                self._run_each(self.router.handle(self._waiting.popleft(), self.clock()))
        finally:
            self._is_running = False
        self._schedule_flush()

    def _run_each(self, effects: list[Effect]) -> None:
        """One effect's defect must not swallow the others: each may belong to another request."""
        for effect in effects:
            try:
                self._run(effect)
            except Exception as error:  # noqa: BLE001 - reported, and the request it belongs to has its deadline
                self._on_defect(type(effect).__name__, error)

    def _run(self, effect: Effect) -> None:
        match effect:
            case Dispatch(rank, incarnation, request):
                assert self.link is not None
                self.link.send(rank, incarnation, request)
            case AbortOnRank(rank, incarnation, wire_ids):
                assert self.link is not None
                self.link.abort(rank, incarnation, list(wire_ids))
            case RequestEnded(request):
                self._ended.append(request)
            case RankStateChanged():
                self._on_rank_change(effect)
            case RequestAccepted() | RequestRefused():
                raise AssertionError("admission effects belong to submit()")

    def _schedule_flush(self) -> None:
        if self._flush_scheduled or not (self.router.dirty or self._ended):
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._flush_scheduled = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        for sequence in self.router.take_dirty():
            try:
                sequence.request.sink.flush(sequence)
            except Exception as error:  # noqa: BLE001 - one broken sink must not silence the others
                self._on_defect("flush", error)
                self.cancel(sequence.request, Reason.INTERNAL)
        ended, self._ended = self._ended, []
        for request in ended:
            for tell in (self._on_ended, request.sink.end):
                try:
                    tell(request)
                except Exception as error:  # noqa: BLE001 - as above; the handler must still learn of the end
                    self._on_defect("end", error)

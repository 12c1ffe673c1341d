"""The only caller of `Router.handle`: runs effects and passes output on once per loop turn.

Everything here is synchronous and runs on one event loop, so nothing can come between the core's
check and its charge. Tokens that arrive in one loop turn leave in one message per sequence. Output and
ends leave in the order in which the core lists them, which is the preserved order where there is one; ends are
counted and logged when they have left.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from gateway.config.schema import Config
from gateway.core.effects import (
    AbortOnRank,
    AuditFound,
    Dispatch,
    Effect,
    ProbeRank,
    RankRemoved,
    RankStateChanged,
    RenewIncarnation,
    RequestAccepted,
    RequestEnded,
    RequestRefused,
    StartWave,
)
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import Event, RequestArrived, RequestCancelled, Tick
from gateway.core.request import Request, Sequence
from gateway.core.router import Router
from gateway.edges.flushing import FlushItems, flush_each
from gateway.edges.pacing import Pacing
from gateway.edges.ticks import INTERVAL_S, Ticks
from gateway.types import EngineRequest

_TICK = Tick()
# Event loops count in milliseconds: a shorter timer could fire before its time, again and again.
_MIN_TIMER_S = 0.001


class Sink(Protocol):
    """Where a request's output goes: the northbound edge's object in `Request.sink`."""

    def flush(self, sequence: Sequence) -> None:
        """Take the sequence's outbox and pass it on. Called at most once per loop turn. Must not block."""
        ...

    def end(self, request: Request) -> None:
        """The request reached its one terminal outcome; its last `flush` has happened. Must not block."""
        ...


class Link(Protocol):
    """Where attempts go: the southbound edge."""

    def send(self, rank: int, incarnation: int, request: EngineRequest) -> None:
        """Hand an ADD to the rank; failures come back as events."""
        ...

    def renew(self, rank: int, incarnation: int) -> None:
        """Begin the next incarnation of a rank whose sockets are kept; it comes back as `RankRenewed`."""
        ...

    def start_wave(self, ranks: Iterable[int], wave: int) -> None:
        """Make the ranks of a lockstep group step, as far as they are there."""
        ...

    def abort(self, rank: int, incarnation: int, wire_ids: list[str]) -> None:
        """Hand an ABORT to the rank, behind every earlier ADD of that rank."""
        ...

    def remove(self, rank: int) -> None:
        """The rank is configured no more: close its sockets and forget it."""
        ...


class Writes(Protocol):
    """Transports that output was pushed to: they write together."""

    def hold(self) -> None:
        """Output follows, and `write_all` behind it in the same turn."""
        ...

    def write_all(self) -> None:
        """Write. Must not block."""
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
        on_audit: Callable[[AuditFound], None] = lambda _: None,
        on_defect: Callable[[str, Exception], None] = lambda *_: None,
    ) -> None:
        self.router = router
        self.clock = clock
        self.link: Link | None = None
        # Of the transport that sinks push to.
        self.writes: Writes | None = None
        self.flush_items: FlushItems = flush_each
        # Set when the process begins to stop, before the core refuses requests: what asks for its health shall go
        # elsewhere, what has not asked yet is still served.
        self.is_stopping = False
        self._on_ended = on_ended
        self._on_rank_change = on_rank_change
        self._on_audit = on_audit
        self._on_defect = on_defect
        self._is_flush_scheduled = False
        self._early_tick: asyncio.TimerHandle | None = None
        self._early_tick_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_running = False
        self._waiting: deque[Event] = deque()
        self._pacing: Pacing | None = None
        self.ticks = Ticks(clock, lambda: router.is_resting, lambda error: on_defect("tick", error))
        self.ticks.every(INTERVAL_S, self._tick)

    def configure(self, config: Config) -> None:
        """Pass output on as the settings have it. What waits by earlier ones leaves."""
        if self._pacing is not None:
            self._pacing.release()
        interval_tokens, max_delay_s = config.listen.stream_interval_tokens, config.listen.max_flush_delay_ms / 1000
        self._pacing = None
        if interval_tokens > 1:
            self._pacing = Pacing(interval_tokens, max_delay_s, self._running_loop, self._pass_on)

    def emit(self, event: Event, now: float | None = None) -> None:
        """Feed one event to the core and run what it wants done. `now` is for callers who have just read the clock.

        An event that is emitted while effects run waits until they are done: otherwise a failed send
        could end a request between two of its own dispatches.
        """
        if self._is_running:
            self._waiting.append(event)
            return
        if now is None:
            now = self.clock()
        self._follow(self.router.handle(event, now), now)

    def submit(self, arrived: RequestArrived) -> Request:
        """Admit a request. Raises `GatewayError` when it is refused; nothing is held then.

        A sink may submit from within `flush` and `end`: what comes of it leaves in a later loop turn.
        """
        if self._is_running:
            raise GatewayError(Reason.INTERNAL, "a request was submitted from within an effect")
        now = self.clock()
        if self.ticks.rests:
            self.ticks.wake()
        effects = self.router.handle(arrived, now)
        first = effects[0]
        # A refusal too can come with effects for others: any event may let queued requests go.
        del effects[0]
        self._follow(effects, now)
        if type(first) is RequestRefused:
            try:
                raise first.error
            finally:
                # The error's traceback holds this frame: if it held the error in turn, only the collector could free it.
                del effects, first
        assert type(first) is RequestAccepted
        return first.request

    def cancel(self, request: Request, reason: Reason) -> None:
        """End a request early, also one whose answer only waits for its turn; an ended one is left alone."""
        if not request.is_ended:
            self.emit(RequestCancelled(request.handle, reason))

    def _tick(self) -> None:
        self.emit(_TICK)

    def _follow(self, effects: list[Effect], now: float) -> None:
        """Do what an event at `now` wants done, and see to its output and to the next moment that the core names."""
        if effects:
            self._run_all(effects)
            if self._waiting:
                now = self._run_waiting()
        if self.router.dirty and not self._is_flush_scheduled:
            self._schedule_flush()
        due_at = self.router.next_due()
        if due_at is not None:
            self._schedule_tick(due_at, now)

    def _run_all(self, effects: list[Effect]) -> None:
        """One effect's defect must not swallow the others: each may belong to another request."""
        self._is_running = True
        try:
            for effect in effects:
                try:
                    # By type: isinstance costs 0.3 us with a Struct, whose metaclass is an ABCMeta.
                    if type(effect) is Dispatch:
                        assert self.link is not None
                        self.link.send(effect.rank, effect.incarnation, effect.request)
                    elif type(effect) is not RequestEnded:  # whose end the core has put among its output
                        self._run(effect)
                except Exception as error:  # noqa: BLE001 - reported, and the request it belongs to has its deadline
                    self._on_defect(type(effect).__name__, error)
        finally:
            self._is_running = False

    def _run_waiting(self) -> float:
        """Feed what was emitted while effects ran. Returns the time of the last event."""
        while True:
            now = self.clock()
            self._run_all(self.router.handle(self._waiting.popleft(), now))
            if not self._waiting:
                return now

    def _run(self, effect: Effect) -> None:
        """The rarer kinds."""
        match effect:
            case ProbeRank(rank, incarnation, request):
                assert self.link is not None
                self.link.send(rank, incarnation, request)
            case RenewIncarnation(rank, incarnation):
                assert self.link is not None
                self.link.renew(rank, incarnation)
            case StartWave(ranks, wave):
                assert self.link is not None
                self.link.start_wave(ranks, wave)
            case AbortOnRank(rank, incarnation, wire_ids):
                assert self.link is not None
                self.link.abort(rank, incarnation, list(wire_ids))
            case RankRemoved(rank):
                assert self.link is not None
                self.link.remove(rank)
            case RankStateChanged():
                self._on_rank_change(effect)
            case AuditFound():
                self._on_audit(effect)
            case RequestAccepted() | RequestRefused():
                raise AssertionError("admission effects belong to submit()")

    def _schedule_flush(self) -> None:
        self._is_flush_scheduled = True
        self._running_loop().call_soon(self._flush)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _schedule_tick(self, due_at: float, now: float) -> None:
        """Tick at a moment that the core named: a batch's window can end long before the next regular tick."""
        if due_at <= now:
            return  # it has just had its chance
        if self._early_tick is not None:
            if self._early_tick_at <= due_at:
                return  # the core names the next moment then
            self._early_tick.cancel()
        self._early_tick_at = due_at
        self._early_tick = self._running_loop().call_later(max(due_at - now, _MIN_TIMER_S), self._tick_early)

    def _tick_early(self) -> None:
        self._early_tick = None
        try:
            self._tick()
        except Exception as error:  # noqa: BLE001 - as one of the regular ones
            self._on_defect("tick", error)

    def _flush(self) -> None:
        # A list of its own: what a sink makes dirty from here on belongs to the next turn.
        self._is_flush_scheduled = False
        items = self.router.take_dirty()
        self._pass_on(items if self._pacing is None else self._pacing.select(items))
        self.ticks.worked()

    def _pass_on(self, items: list[Sequence | Request]) -> None:
        """Output goes to its sinks and out; what is counted and logged of ends comes behind that."""
        writes = self.writes
        ended: list[Request] = []
        if writes is not None:
            writes.hold()
        try:
            self._hand_out(items, ended)
        finally:
            # Whatever went wrong: nobody else would write, or count.
            if writes is not None:
                writes.write_all()
            for request in ended:
                self._account_for(request)

    def _hand_out(self, items: list[Sequence | Request], ended: list[Request]) -> None:
        def hand_out(item: Sequence | Request) -> None:
            if type(item) is Sequence:
                try:
                    item.sink.flush(item)
                except Exception as error:  # noqa: BLE001 - one broken sink must not silence the others
                    self._on_broken(item, error)
            elif isinstance(item, Request):
                ended.append(item)
                try:
                    item.sink.end(item)
                except Exception as error:  # noqa: BLE001 - as above
                    self._on_defect("end", error)

        self.flush_items(items, hand_out, self._on_broken)

    def _on_broken(self, sequence: Sequence, error: Exception) -> None:
        self._on_defect("flush", error)
        self._give_up(sequence.request)

    def _give_up(self, request: Request) -> None:
        try:
            self.cancel(request, Reason.INTERNAL)
        except Exception as error:  # noqa: BLE001 - as above, and the request has its deadline
            self._on_defect("cancel", error)

    def _account_for(self, request: Request) -> None:
        try:
            self._on_ended(request)
        except Exception as error:  # noqa: BLE001 - as above
            self._on_defect("end", error)
        request.accounted()

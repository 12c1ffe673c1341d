"""The one mutator: `Router.handle(event, now) -> effects`.

Rules of this module:
* nothing outside calls a mutating method of the parts that it owns;
* everything that a request needs is reserved in the call that accepts it, and a rank is charged in the call that
  picks it, before any effect runs;
* in one batch: store the load, append the rows, release what finished;
* every end of a request passes `Endings.settle` once, every end of an attempt `Attempts.release` or `take_back` once.
"""

from collections.abc import Callable
from typing import Any

from gateway.config.schema import Config
from gateway.core.acceptance import Acceptance
from gateway.core.arrivals import Arrivals
from gateway.core.audit import Audit
from gateway.core.batches import BatchIntake
from gateway.core.effects import (
    AbortOnRank,
    Effect,
    RequestAccepted,
    RequestRefused,
)
from gateway.core.endings import Endings
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import (
    AbortAll,
    BatchReceived,
    CacheFlushed,
    DrainStarted,
    Event,
    LoadReported,
    RankDrained,
    RankHeard,
    RankJoined,
    RankLost,
    RankRenewed,
    RankUndrained,
    Reconfigured,
    RequestArrived,
    RequestCancelled,
    SendBlocked,
    SendFailed,
    SendUnblocked,
    Tick,
    WaveReported,
)
from gateway.core.fleet import Fleet
from gateway.core.health import Health
from gateway.core.lifecycle import Evidence, Phase
from gateway.core.moves import Moves
from gateway.core.parts import build
from gateway.core.patience import Patience
from gateway.core.pump import Pump
from gateway.core.ranks import RankState
from gateway.core.readings import Readings
from gateway.core.reconfigure import Configurable, Reconfiguration
from gateway.core.recovery import Recovery
from gateway.core.refusals import (
    ended_by,
    refused_by_engine,
)
from gateway.core.request import Attempt
from gateway.core.straight import Straight
from gateway.core.strays import Strays
from gateway.core.waves import Waves
from gateway.types import FinishReason

_READY, _ENGINE = RankState.READY, Evidence.ENGINE
_COMPLETE = ("stop", "length")
"""The ends that are successes."""


def _never() -> None:
    """Without a queue nothing is ever due."""


class Router(Readings):
    """Owns all state of the gateway. `rng` gives uniform floats in [0, 1); `nonce` is 16 hex digits."""

    def __init__(self, config: Config, *, nonce: str, rng: Callable[[], float]) -> None:
        parts = self._parts = build(config, nonce, rng)
        self.ranks, self.counters, self.predictor = parts.ranks, parts.counters, parts.predictor
        self.is_draining = False
        self._load, self._answers, self._registry = parts.load, parts.answers, parts.registry
        self.dirty, self.take_dirty = parts.answers.dirty, parts.answers.take_dirty
        self.next_due = parts.dispatcher.next_due if parts.dispatcher is not None else _never
        self._admission, self._attempts, self._dispatcher = parts.admission, parts.attempts, parts.dispatcher
        self._arrivals = Arrivals(config, parts)
        self._acceptance = Acceptance(config, parts, self._arrivals)
        self._straight = Straight(config, parts, self._arrivals)
        patience = Patience(parts, parts.dispatcher) if parts.dispatcher is not None else None
        self._endings = Endings(parts, self._acceptance, patience)
        self._pump = Pump(parts, patience, self._endings) if patience is not None else None
        recovery = self._recovery = Recovery(config, parts, self._endings)
        self._strays = Strays(nonce, config.load.abort_settle_s)
        self._intake = BatchIntake(
            self.ranks,
            self._attempts,
            self._load,
            self._strays,
            self.counters,
            config.limits.max_stream_buffer_bytes,
        )
        self._moves = Moves(self.ranks)
        self._health = Health(config, nonce, self.ranks, self._moves, self.counters)
        self._fleet = Fleet(config, parts, self._endings, recovery, self._strays, self._moves, self._health)
        self._audit = Audit(self.ranks, self._attempts.ledger, self.counters)
        self._waves = Waves(config, self.ranks, self.counters)
        others: list[Configurable] = [self._registry, self._arrivals, self._acceptance, self._straight, recovery]
        others += [self._strays, self._intake, self._audit, self._health, self._waves]
        others += [self._dispatcher] if self._dispatcher is not None else []
        self._reconfiguration = Reconfiguration(config, parts, self._fleet, others)
        self._handlers = self._by_event()

    # ---- the one mutator ---------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event. Never raises for anything that a client or a rank can cause."""
        effects: list[Effect] = []
        handler = self._handlers.get(type(event))
        assert handler is not None, event
        handler(event, now, effects)
        if self._pump is not None and self._dispatcher is not None and self._dispatcher.queue.size:
            self._pump.run(now, effects)
        if self._waves.count:
            self._waves.follow(event, effects)
        return effects

    def _by_event(self) -> dict[type[Event], Callable[[Any, float, list[Effect]], None]]:
        """What applies each kind of event: one look-up, however many kinds there are."""
        return {
            BatchReceived: self._on_batch,
            RequestArrived: self._on_arrived,
            RequestCancelled: self._on_cancelled,
            Tick: self._on_tick,
            LoadReported: self._on_report,
            WaveReported: self._on_report,
            RankJoined: self._on_return,
            RankUndrained: self._on_return,
            RankLost: self._fleet.handle,
            RankHeard: self._fleet.handle,
            RankRenewed: self._fleet.handle,
            RankDrained: self._fleet.handle,
            SendFailed: self._fleet.handle,
            SendBlocked: self._fleet.handle,
            SendUnblocked: self._fleet.handle,
            DrainStarted: self._on_drain,
            AbortAll: self._on_drain,
            Reconfigured: self._on_reconfigured,
            CacheFlushed: self._on_cache_flushed,
        }

    # ---- arrival -----------------------------------------------------------------------------

    def _on_arrived(self, arrived: RequestArrived, now: float, effects: list[Effect]) -> None:
        try:
            if self.is_draining:
                raise ended_by(Reason.DRAINING)
            if self._straight.take(arrived, now, effects):
                return
            request, plan = self._acceptance.accept(arrived, now)
        except GatewayError as error:
            refused = self.counters.refused
            refused[error.reason] = refused.get(error.reason, 0) + 1
            self._admission.note_refusal(error, arrived.n)
            # Its traceback holds the frames, and these the effects: a cycle for every refusal of an overload.
            effects.append(RequestRefused(error.with_traceback(None)))
            return
        effects.append(RequestAccepted(request))
        if plan is not None and plan.answer is not None:
            request.first_token_at = now
            self._endings.settle(request, None, Evidence.GATEWAY, now, effects)
        elif plan is not None and plan.is_shared:
            if self._pump is not None:
                self._pump.watch(request)
        elif self._dispatcher is None:
            for sequence in request.sequences:
                if sequence.attempt is not None:
                    self._attempts.dispatch(sequence.attempt, effects)
        else:
            self._acceptance.enqueue(request, self._dispatcher, now)

    # ---- ends --------------------------------------------------------------------------------

    def _on_cancelled(self, event: RequestCancelled, now: float, effects: list[Effect]) -> None:
        request = self._registry.get(event.handle)
        if request is None:
            self.counters.double_ends += 1
        else:
            self._endings.cut_short(request, event.reason, now, effects)

    def _on_drain(self, event: DrainStarted | AbortAll, now: float, effects: list[Effect]) -> None:
        self.is_draining = True
        if isinstance(event, AbortAll):
            # Who only waits for another one's answer goes first: it would be sent to a rank in that one's place.
            for request in sorted(self._registry, key=lambda request: request.phase is not Phase.ACCEPTED):
                self._endings.cut_short(request, event.reason, now, effects)

    def _on_reconfigured(self, event: Reconfigured, now: float, effects: list[Effect]) -> None:
        self._reconfiguration.apply(event.config, self._registry, now, effects)

    def _on_cache_flushed(self, _: CacheFlushed, now: float, effects: list[Effect]) -> None:  # noqa: ARG002 - a handler
        self._answers.flush_cache()

    def _on_tick(self, _: Tick, now: float, effects: list[Effect]) -> None:
        self._load.expire(now)
        for request, reason in self._registry.expire(now):
            self._endings.expire(request, reason, now, effects)
        self._fleet.step(now, effects)
        if self._pump is not None:
            self._pump.expire(now, effects)
            self.counters.queue_delays = self._pump.queue_delays
        self.counters.tenants_overflowed = self._admission.tenants.overflowed
        self._reconfiguration.step(now, effects)
        effects.extend(self._audit.step(now))

    # ---- ranks -------------------------------------------------------------------------------

    def _on_return(self, event: RankJoined | RankUndrained, now: float, effects: list[Effect]) -> None:
        self._fleet.handle(event, now, effects)
        self._reconfiguration.step(now, effects)  # a rank that is left out gets no work in between

    def _on_batch(self, event: BatchReceived, now: float, effects: list[Effect]) -> None:
        rank, batch = event.rank, event.batch
        ranks = self.ranks
        # Most batches are of a READY rank's incarnation.
        is_usual = rank < ranks.size and ranks.incarnation[rank] == event.incarnation and ranks.state[rank] is _READY
        if not is_usual and not self._fleet.is_current(rank, event.incarnation):
            return
        self._health.heard(rank, batch.ids, now, effects)
        result = self._intake.apply(rank, batch, now, self._answers.touched)
        if not self._answers.is_plain:
            self._answers.let_out()
        if result is None:
            return
        for attempt, finish in result.finished:
            if attempt.released:
                continue
            if finish in _COMPLETE:
                if ranks.failures[rank]:
                    self._health.succeeded(rank)
                ranks.observe_finished(rank, attempt.tokens_out)
                self._endings.completed(attempt, finish, now, effects)
            else:
                self._fail(attempt, finish, now, effects)
        for attempt, error in result.failed:
            if error.reason is Reason.ENGINE_ERROR:
                self._health.failed(rank, "engine error", now, effects, attempt.sequence.request.handle)
            if not attempt.sequence.request.is_settled:
                self._endings.settle(attempt.sequence.request, error, Evidence.GATEWAY, now, effects)
        if result.stray_ids:
            self._load.aborted(rank, now)
            self.counters.reaborts += len(result.stray_ids)
            effects.append(AbortOnRank(rank, event.incarnation, result.stray_ids))

    def _on_report(self, event: LoadReported | WaveReported, now: float, effects: list[Effect]) -> None:
        if not self._fleet.is_current(event.rank, event.incarnation):
            return
        self._health.heard(event.rank, (), now, effects)
        if isinstance(event, LoadReported):
            self._load.report(event.rank, event.load, now)
        else:
            self._waves.reported(event, effects)

    def _fail(self, attempt: Attempt, finish: FinishReason, now: float, effects: list[Effect]) -> None:
        """The engine ended an attempt, and not with success."""
        self._attempts.release(attempt, _ENGINE, now)
        request, rank, error = attempt.sequence.request, attempt.rank, refused_by_engine(attempt, finish)
        if finish == "error":
            self._health.failed(rank, "engine error", now, effects, request.handle)
        elif not self.ranks.refuses_by_abort[rank]:
            self._recovery.lost(attempt, error, now, effects)
            return
        self._endings.settle(request, error, Evidence.GATEWAY, now, effects)

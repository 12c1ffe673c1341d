"""The one mutator: `Router.handle(event, now) -> effects`.

Rules of this module:
* nothing outside calls a mutating method of the ledger, the load book or the rank table;
* a request is charged in the same call that picks its rank, before any effect runs;
* in one batch: store the load, append the rows, release what finished;
* every end of a request passes `_end`, every end of an attempt passes `_release`.
"""

from collections.abc import Callable
from math import nan
from typing import assert_never

from msgspec import structs

from gateway.config.schema import Config
from gateway.core.admission import Admission
from gateway.core.batches import BatchIntake
from gateway.core.counters import Counters
from gateway.core.deadlines import Deadlines
from gateway.core.decisions import Decision, DecisionRing
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
from gateway.core.events import (
    AbortAll,
    BatchReceived,
    DrainStarted,
    Event,
    RankJoined,
    RankLost,
    RequestArrived,
    RequestCancelled,
    SendBlocked,
    SendFailed,
    SendUnblocked,
    Tick,
)
from gateway.core.ledger import Ledger
from gateway.core.load import LoadBook
from gateway.core.policy import Policy
from gateway.core.ranks import TRANSITIONS, RankState, RankTable
from gateway.core.refusals import ended_by, no_rank, rank_lost, refused_by_engine, send_failed
from gateway.core.request import Attempt, Request, Sequence
from gateway.core.strays import Strays
from gateway.core.validation import Validator
from gateway.core.views import RankView, rank_view
from gateway.types import EngineRequest, Sampling


class Router:
    """Owns all state of the gateway. `rng` gives uniform floats in [0, 1); `nonce` is 16 hex digits."""

    def __init__(self, config: Config, *, nonce: str, rng: Callable[[], float]) -> None:
        self._config = config
        self._nonce = nonce
        self.ranks = RankTable(config)
        self.counters = Counters(self.ranks.size)
        self.decisions = DecisionRing(config.observability.decision_ring)
        self.is_draining = False
        self.dirty: list[Sequence] = []
        self._ledger = Ledger(self.ranks, self.counters)
        self._load = LoadBook(self.ranks, config.load, config.gateways, self.counters)
        self._admission = Admission(config.admission)
        self._validator = Validator(config.model, config.limits, config.groups[0].protocol, self.ranks.size)
        self._policy = Policy(
            config.policy,
            config.filters,
            self.ranks,
            gateways=config.gateways,
            coupled=any(group.coupled for group in config.groups),
            rng=rng,
        )
        self._strays = Strays(nonce, config.load.abort_settle_s)
        self._intake = BatchIntake(
            self.ranks,
            self._ledger,
            self._load,
            self._strays,
            self.counters,
            config.limits.max_stream_buffer_bytes,
        )
        self._deadlines = Deadlines()
        self._requests: dict[int, Request] = {}
        self._by_client: dict[tuple[str, str], Request] = {}
        self._next_handle = 1

    # ---- reading -----------------------------------------------------------------------------

    @property
    def live_count(self) -> int:
        """Accepted requests without a terminal outcome."""
        return len(self._requests)

    @property
    def in_flight(self) -> int:
        """Attempts that are charged to a rank."""
        return len(self._ledger.live)

    def why_not_ready(self) -> str | None:
        """What keeps the gateway from being ready, or None: `min_ready` READY ranks in every group, no drain."""
        if self.is_draining:
            return "the gateway is draining"
        ready = [0] * len(self._config.groups)
        for state, number in zip(self.ranks.state, self.ranks.group_of, strict=True):
            ready[number] += state is RankState.READY
        for have, group in zip(ready, self._config.groups, strict=True):
            if have < group.min_ready:
                return f"group {group.name}: {have} of {group.ranks} ranks are READY, {group.min_ready} needed"
        return None

    def find(self, client_key: str, request_id: str) -> Request | None:
        """The live request with this client id."""
        return self._by_client.get((client_key, request_id))

    def take_dirty(self) -> list[Sequence]:
        """Sequences with something to flush, each once."""
        dirty, self.dirty = self.dirty, []
        return dirty

    def explain(self, arrived: RequestArrived, now: float) -> Decision:
        """Decide without charging, recording or advancing anything. Raises on an invalid request."""
        self._validator.check(arrived)
        with self._policy.dry_run():
            return self._choose(arrived, now)

    def rank_views(self, now: float) -> list[RankView]:
        """Every rank, in order; `cost` is that of a one-token prompt."""
        costs = self._policy.nominal_costs(now) or [nan] * self.ranks.size
        return [rank_view(self.ranks, rank, now, cost) for rank, cost in enumerate(costs)]

    def check(self) -> None:
        """Assert every invariant; for tests, after every step."""
        self._ledger.check()
        live = {id(attempt) for attempt in self._ledger.live.values()}
        held = {
            id(sequence.attempt)
            for request in self._requests.values()
            for sequence in request.sequences
            if sequence.attempt is not None and not sequence.attempt.released
        }
        assert live == held
        assert all(not request.is_ended and request.unfinished > 0 for request in self._requests.values())
        assert set(map(id, self._by_client.values())) <= set(map(id, self._requests.values()))
        ended = sum(self.counters.ended.values())
        assert self.counters.accepted == ended + len(self._requests)
        assert self.counters.double_releases == 0
        for rank in range(self.ranks.size):
            if self.ranks.state[rank] is not RankState.READY:
                assert self.ranks.in_flight[rank] == 0

    # ---- the one mutator ---------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event. Never raises for anything that a client or a rank can cause."""
        effects: list[Effect] = []
        match event:
            case BatchReceived():
                self._on_batch(event, now, effects)
            case RequestArrived():
                self._on_arrived(event, now, effects)
            case RequestCancelled():
                self._on_cancelled(event, now, effects)
            case Tick():
                self._on_tick(now, effects)
            case RankJoined():
                self._on_joined(event, now, effects)
            case RankLost():
                self._on_lost(event, now, effects)
            case SendFailed():
                self._on_send_failed(event, now, effects)
            case SendBlocked() | SendUnblocked():
                self._on_blocked(event)
            case DrainStarted():
                self.is_draining = True
            case AbortAll():
                for request in list(self._requests.values()):
                    self._end(request, ended_by(event.reason), now, effects)
            case _:
                assert_never(event)
        return effects

    # ---- requests ----------------------------------------------------------------------------

    def _on_arrived(self, arrived: RequestArrived, now: float, effects: list[Effect]) -> None:
        try:
            request = self._admit(arrived, now)
        except GatewayError as error:
            refused = self.counters.refused
            refused[error.reason] = refused.get(error.reason, 0) + 1
            effects.append(RequestRefused(error))
            return
        self._requests[request.handle] = request
        self._by_client[arrived.client_key, arrived.request_id] = request
        self.counters.accepted += 1
        if arrived.deadline_at is not None:
            self._deadlines.add(arrived.deadline_at, request)
        effects.append(RequestAccepted(request))
        for sequence in request.sequences:
            assert sequence.attempt is not None
            effects.append(self._dispatch(sequence.attempt, arrived))

    def _admit(self, arrived: RequestArrived, now: float) -> Request:
        if self.is_draining:
            raise ended_by(Reason.DRAINING)
        self._validator.check(arrived)
        if (arrived.client_key, arrived.request_id) in self._by_client:
            raise GatewayError(
                Reason.DUPLICATE_REQUEST_ID,
                f"a live request already has the id {arrived.request_id!r}",
                request_id=arrived.request_id,
            )
        if arrived.deadline_at is not None and arrived.deadline_at <= now:
            raise ended_by(Reason.DEADLINE_EXCEEDED)
        self._admission.check_total(len(self._ledger.live), arrived.n)
        request = Request(self._next_handle, arrived, now)
        self._next_handle += 1
        self._load.expire(now)
        for sequence in request.sequences:
            decision = self._decide(arrived, now)
            if request.decision_id is None:
                request.decision_id = decision.id
            if decision.rank is None:
                self._roll_back(request, now)
                raise no_rank(decision, arrived, self._admission.retry_after_s(arrived.n))
            self._charge(sequence, decision.rank, now)
        return request

    def _choose(self, arrived: RequestArrived, now: float) -> Decision:
        return self._policy.decide(
            now,
            prompt_tokens=len(arrived.prompt_token_ids),
            max_tokens=arrived.sampling.max_tokens,
            priority=arrived.priority,
            pinned_rank=arrived.pinned_rank,
            label=arrived.request_id,
        )

    def _decide(self, arrived: RequestArrived, now: float) -> Decision:
        decision = self._choose(arrived, now)
        self.decisions.add(decision)
        counters = self.counters
        if decision.rank is not None:
            counters.decisions[decision.rank] += 1
        for name in decision.relaxed:
            counters.relaxed_filters[name] += 1
        counters.non_finite_costs = self._policy.non_finite_costs
        counters.all_non_finite = self._policy.all_non_finite
        return decision

    def _charge(self, sequence: Sequence, rank: int, now: float) -> None:
        request = sequence.request
        sequence.attempts += 1
        wire_id = f"{self._nonce}-{request.handle:x}-{sequence.index}-{sequence.attempts}"
        attempt = Attempt(sequence, wire_id, sequence.attempts, rank, self.ranks.incarnation[rank], now)
        sequence.attempt = attempt
        request.last_rank = rank
        self._ledger.charge(attempt, now)

    def _roll_back(self, request: Request, now: float) -> None:
        """Admission is all or nothing: give back what the earlier sequences of this request took."""
        for sequence in request.sequences:
            attempt = sequence.attempt
            if attempt is not None:
                self._take_back(attempt, now)

    def _dispatch(self, attempt: Attempt, arrived: RequestArrived) -> Dispatch:
        request = EngineRequest(
            wire_id=attempt.wire_id,
            prompt_token_ids=arrived.prompt_token_ids,
            sampling=_sampling_of(attempt.sequence, arrived.sampling),
            eos_token_ids=self._config.model.eos_token_ids,
            priority=arrived.priority,
            arrived_at_unix_s=arrived.arrived_at_unix_s,
        )
        return Dispatch(attempt.rank, attempt.incarnation, request)

    def _on_cancelled(self, event: RequestCancelled, now: float, effects: list[Effect]) -> None:
        request = self._requests.get(event.handle)
        if request is None:
            self.counters.double_ends += 1
            return
        self._end(request, ended_by(event.reason), now, effects)

    def _on_tick(self, now: float, effects: list[Effect]) -> None:
        self._load.expire(now)
        self._deadlines.compact(len(self._requests))
        for request in self._deadlines.expired(now):
            self.counters.deadlines_expired += 1
            self._end(request, ended_by(Reason.DEADLINE_EXCEEDED), now, effects)

    def _end(self, request: Request, error: GatewayError | None, now: float, effects: list[Effect]) -> None:
        """The one terminal outcome. Whatever is still charged is released and aborted at its rank."""
        if request.is_ended:
            self.counters.double_ends += 1
            return
        request.is_ended = True
        request.error = error
        request.ended_at = now
        del self._requests[request.handle]
        arrived = request.arrived
        del self._by_client[arrived.client_key, arrived.request_id]
        for sequence in request.sequences:
            attempt = sequence.attempt
            if attempt is not None and not attempt.released:
                self._release(attempt, now)
                self._load.aborted(attempt.rank, now)
                effects.append(AbortOnRank(attempt.rank, attempt.incarnation, (attempt.wire_id,)))
        outcome = "OK" if error is None else error.reason.value
        self.counters.ended[outcome] = self.counters.ended.get(outcome, 0) + 1
        effects.append(RequestEnded(request))

    def _release(self, attempt: Attempt, now: float) -> None:
        self._admission.released(now)
        if self._ledger.release(attempt, now):
            self._load.clamp(attempt.rank)

    def _take_back(self, attempt: Attempt, now: float) -> None:
        """Release an attempt that never left the gateway: the rank's report is not a stale one of ours."""
        if self._ledger.take_back(attempt, now):
            self._load.unsent(attempt.rank)

    # ---- ranks -------------------------------------------------------------------------------

    def _is_current(self, rank: int, incarnation: int) -> bool:
        is_current = self.ranks.incarnation[rank] == incarnation and self.ranks.state[rank] is RankState.READY
        if not is_current:
            self.counters.stale_events += 1
        return is_current

    def _on_batch(self, event: BatchReceived, now: float, effects: list[Effect]) -> None:
        rank = event.rank
        if not self._is_current(rank, event.incarnation):
            return
        result = self._intake.apply(rank, event.batch, now, self.dirty)
        for attempt, finish in result.finished:
            self._finish(attempt, finish, now, effects)
        for attempt, error in result.failed:
            if not attempt.sequence.request.is_ended:
                self._end(attempt.sequence.request, error, now, effects)
        if result.stray_ids:
            self._load.aborted(rank, now)
            self.counters.reaborts += len(result.stray_ids)
            effects.append(AbortOnRank(rank, event.incarnation, result.stray_ids))

    def _finish(self, attempt: Attempt, finish: str, now: float, effects: list[Effect]) -> None:
        """The engine ended an attempt: stop and length are success, anything else is not."""
        sequence = attempt.sequence
        request = sequence.request
        if attempt.released:
            return
        self._release(attempt, now)
        if finish in ("stop", "length"):
            sequence.finish = "stop" if finish == "stop" else "length"
            request.unfinished -= 1
            if request.unfinished == 0:
                self._end(request, None, now, effects)
            return
        self._end(request, refused_by_engine(attempt, finish), now, effects)

    def _on_joined(self, event: RankJoined, now: float, effects: list[Effect]) -> None:
        rank, ranks = event.rank, self.ranks
        if event.incarnation <= ranks.incarnation[rank]:
            self.counters.stale_events += 1
            return
        if ranks.state[rank] is RankState.READY:
            self._lose(rank, "replaced by a new incarnation", now, effects)
        old = ranks.state[rank]
        ranks.state[rank] = TRANSITIONS[old]["joined"]
        ranks.join(rank, event.incarnation, event.info)
        self._load.join(rank)
        self._strays.forget(rank)
        ranks.refresh(rank)
        cause = "reattached" if event.reattached else "joined"
        effects.append(RankStateChanged(rank, event.incarnation, old.value, ranks.state[rank].value, cause))

    def _on_lost(self, event: RankLost, now: float, effects: list[Effect]) -> None:
        if self._is_current(event.rank, event.incarnation):
            self._lose(event.rank, event.cause, now, effects)

    def _lose(self, rank: int, cause: str, now: float, effects: list[Effect]) -> None:
        ranks = self.ranks
        old = ranks.state[rank]
        ranks.state[rank] = TRANSITIONS[old]["lost"]
        attempts = self._ledger.of_rank(rank)
        for attempt in attempts:
            self._release(attempt, now)
        ranks.forget_snapshot(rank)
        ranks.refresh(rank)
        effects.append(RankStateChanged(rank, ranks.incarnation[rank], old.value, ranks.state[rank].value, cause))
        for attempt in attempts:
            request = attempt.sequence.request
            if not request.is_ended:
                self._end(request, rank_lost(rank, cause), now, effects)

    def _on_send_failed(self, event: SendFailed, now: float, effects: list[Effect]) -> None:
        attempt = self._ledger.live.get(event.wire_id)
        if attempt is None:
            return
        # The rank never saw it: nothing to abort there, and nothing learnt about its load.
        self._take_back(attempt, now)
        self._end(attempt.sequence.request, send_failed(event.rank, event.cause), now, effects)

    def _on_blocked(self, event: SendBlocked | SendUnblocked) -> None:
        if self._is_current(event.rank, event.incarnation):
            self.ranks.is_blocked[event.rank] = isinstance(event, SendBlocked)
            self.ranks.refresh(event.rank)


def _sampling_of(sequence: Sequence, sampling: Sampling) -> Sampling:
    """Continuations of one seeded request must differ: the i-th gets seed + i, as vLLM's own front end does."""
    if sampling.seed is None or sequence.index == 0:
        return sampling
    return structs.replace(sampling, seed=(sampling.seed + sequence.index + 2**63) % 2**64 - 2**63)

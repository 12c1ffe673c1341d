"""What may be read of a router, at any time and without effect."""

from collections.abc import Callable
from math import nan

from gateway.config.schema import Config
from gateway.core.arrivals import Arrivals
from gateway.core.batches_in_flight import BatchesInFlight
from gateway.core.counters import Counters
from gateway.core.decisions import Decision, DecisionRing
from gateway.core.events import RequestArrived
from gateway.core.ordering import Ordering
from gateway.core.parts import Parts
from gateway.core.predictor import Predictor
from gateway.core.ranks import SERVING, RankState, RankTable
from gateway.core.reconfigure import Reconfiguration
from gateway.core.request import Request, Sequence
from gateway.core.response_cache import ResponseCache
from gateway.core.tenants import Account
from gateway.core.views import RankView, rank_view


class Readings:
    """The half of `Router` that changes nothing."""

    ranks: RankTable
    counters: Counters
    predictor: Predictor
    is_draining: bool
    dirty: list[Sequence | Request]
    """What the edge has to send, in order; always the same list."""
    take_dirty: Callable[[], list[Sequence | Request]]
    """Sequences with something to flush and requests that have ended, in the order in which they must leave."""
    next_due: Callable[[], float | None]
    """When the core wants a `Tick` before the usual one, if it does."""
    _parts: Parts
    _arrivals: Arrivals
    _reconfiguration: Reconfiguration

    @property
    def live_count(self) -> int:
        """Accepted requests without a terminal outcome."""
        return len(self._parts.registry)

    @property
    def in_flight(self) -> int:
        """Attempts that are charged to a rank."""
        return len(self._parts.attempts.ledger.live)

    @property
    def decisions(self) -> DecisionRing:
        """The latest decisions."""
        return self._parts.attempts.decisions

    @property
    def queue_depth(self) -> int:
        """Sequences that wait for a rank."""
        return len(self._parts.dispatcher) if self._parts.dispatcher is not None else 0

    @property
    def is_resting(self) -> bool:
        """Whether nothing is under way that time alone would change: a `Tick` may come later than usual."""
        parts, states = self._parts, self.ranks.state
        if len(parts.registry) or parts.load.foreign or any(self.ranks.is_blocked):
            return False
        return states.count(RankState.READY) + states.count(RankState.ABSENT) == len(states)

    @property
    def batches(self) -> BatchesInFlight | None:
        """The batches in flight, in mode batch."""
        return self._parts.dispatcher.batches if self._parts.dispatcher is not None else None

    @property
    def ordering(self) -> Ordering | None:
        """The preserved order, if there is one."""
        return self._parts.answers.ordering

    @property
    def response_cache(self) -> ResponseCache | None:
        """The response cache, if there is one."""
        return self._parts.answers.cache

    @property
    def layout(self) -> Config:
        """The configuration in force, with the ranks that it leaves out and that have not gone yet."""
        return self._reconfiguration.layout

    def accounts(self) -> list[Account]:
        """The accounts of the tenants that the configuration names."""
        return self._parts.admission.tenants.named

    def oldest_age_s(self, now: float) -> float:
        """Age of the oldest live request; 0 when there is none."""
        oldest = self._parts.registry.oldest()
        return now - oldest.accepted_at if oldest is not None else 0.0

    def why_not_ready(self) -> str | None:
        """What keeps the gateway from being ready, or None: `min_ready` READY ranks in every group, no drain."""
        if self.is_draining:
            return "the gateway is draining"
        ready = [0] * len(self.layout.groups)
        for state, number in zip(self.ranks.state, self.ranks.group_of, strict=True):
            ready[number] += state is RankState.READY
        for have, group in zip(ready, self.layout.groups, strict=True):
            if have < group.min_ready:
                return f"group {group.name}: {have} of {group.ranks} ranks are READY, {group.min_ready} needed"
        return None

    def find(self, client_key: str, request_id: str) -> Request | None:
        """The live request with this client id."""
        return self._parts.registry.find(client_key, request_id)

    def explain(self, arrived: RequestArrived, now: float) -> Decision:
        """Decide without charging, recording or advancing anything. Raises on an invalid request."""
        self._arrivals.validate(arrived)
        with self._parts.policy.dry_run():
            decision = self._parts.attempts.choose(
                arrived, self.predictor.prefill_us(len(arrived.prompt_token_ids)), now
            )
        if self._parts.dispatcher is not None:
            decision.gate = self._parts.dispatcher.gate_states(now)
            decision.queue_depth = len(self._parts.dispatcher)
        return decision

    def rank_views(self, now: float) -> list[RankView]:
        """Every rank, in order; `cost` is that of a one-token prompt."""
        costs = self._parts.policy.nominal_costs(now) or [nan] * self.ranks.size
        return [rank_view(self.ranks, rank, now, cost) for rank, cost in enumerate(costs)]

    def check(self) -> None:
        """Assert every invariant; for tests, after every step."""
        requests = list(self._parts.registry)
        sequences = [sequence for request in requests for sequence in request.sequences]
        attempts = [sequence.attempt for sequence in sequences if sequence.attempt is not None]
        self.ranks.check()
        self._parts.registry.check()
        self._parts.answers.check()
        self._reconfiguration.check()
        self._parts.admission.check_sums(requests)
        self._parts.attempts.check([attempt for attempt in attempts if not attempt.released])
        if self._parts.dispatcher is not None:
            self._parts.dispatcher.check([sequence for sequence in sequences if sequence.entry is not None])
        assert all(request.is_settled or request.unfinished > 0 for request in requests)
        assert self.counters.accepted == sum(self.counters.ended.values()) + len(requests)
        for rank in range(self.ranks.size):
            if self.ranks.state[rank] not in SERVING:
                assert self.ranks.in_flight[rank] == 0

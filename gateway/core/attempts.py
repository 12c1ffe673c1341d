"""Picks, charges and releases: the only user of the ledger and of the decision ring.

An attempt is charged in the step that picks its rank and released exactly once, on evidence that stays with it.
"""

from collections.abc import Sequence as Seq

from msgspec import structs

from gateway.config.schema import Config
from gateway.core.batches_in_flight import BatchesInFlight
from gateway.core.counters import Counters
from gateway.core.decisions import Decision, DecisionRing
from gateway.core.effects import Dispatch, Effect
from gateway.core.events import RequestArrived
from gateway.core.ledger import Ledger
from gateway.core.lifecycle import Evidence
from gateway.core.load import LoadBook
from gateway.core.policy import Policy
from gateway.core.predictor import Predictor
from gateway.core.ranks import RankTable
from gateway.core.request import Attempt, Request, Sequence
from gateway.types import EngineRequest, Sampling

_UNSENT = Evidence.UNSENT


class Attempts:
    """From a decision to its charge, and from an end to its release."""

    def __init__(
        self,
        config: Config,
        nonce: str,
        table: RankTable,
        policy: Policy,
        predictor: Predictor,
        load: LoadBook,
        batches: BatchesInFlight | None,
        counters: Counters,
    ) -> None:
        self.ledger = Ledger(table, counters)
        self.decisions = DecisionRing(config.observability.decision_ring)
        self._nonce = nonce
        self._eos_token_ids = config.model.eos_token_ids
        self._table = table
        self._policy = policy
        self._predictor = predictor
        self._load = load
        self._batches = batches
        self._counters = counters
        self._use(config)

    def configure(self, config: Config) -> None:
        """Go by other settings, for as many ranks as the table has now."""
        self._use(config)
        self.ledger.resize()

    def _use(self, config: Config) -> None:
        self._leaves_at_start = config.scheduling.batch.release_at == "first_token" and self._batches is not None
        self.follows_starts = self._leaves_at_start or config.predictor is not None
        """Whether `started` has to be told of first tokens."""

    def choose(self, arrived: RequestArrived, prefill_us: int, now: float) -> Decision:
        """Decide at once; nothing is recorded or charged."""
        decision = self._policy.decide(
            now,
            len(arrived.prompt_token_ids),
            arrived.sampling.max_tokens,
            arrived.priority,
            0,
            arrived.pinned_rank,
            arrived.request_id,
            prefill_us / 1e3,
        )
        if self._predictor.has_model:
            decision.predicted_ms = prefill_us / 1e3
        return decision

    def choose_for(self, sequence: Sequence, now: float) -> Decision:
        """Decide at once for what is left of a sequence; nothing is recorded or charged."""
        request = sequence.request
        arrived, done = request.arrived, sequence.completion_tokens
        decision = self._policy.decide(
            now,
            prompt_tokens=len(arrived.prompt_token_ids) + done,
            max_tokens=arrived.sampling.max_tokens - done,
            priority=arrived.priority,
            pinned_rank=arrived.pinned_rank,
            label=arrived.request_id,
            prefill_ms=request.prefill_us / 1e3,
            tried_rank=sequence.attempt.rank if sequence.attempt is not None else None,
        )
        if not done and self._predictor.has_model:
            decision.predicted_ms = request.prefill_us / 1e3
        return decision

    def record(self, decision: Decision) -> None:
        """Give the decision its number and count it."""
        self.decisions.add(decision)
        counters = self._counters
        if decision.rank is not None:
            counters.decisions[decision.rank] += 1
        if decision.relaxed:
            for name in decision.relaxed:
                counters.relaxed_filters[name] += 1
        if self._policy.may_fault:
            self._count_faults()

    def _count_faults(self) -> None:
        self._counters.non_finite_costs = self._policy.non_finite_costs
        self._counters.all_non_finite = self._policy.all_non_finite

    def charge(self, sequence: Sequence, decision: Decision, now: float) -> Attempt:
        """Charge the decision's rank with the sequence's next attempt, and record the decision."""
        self.record(decision)
        rank = decision.rank
        assert rank is not None
        request = sequence.request
        if request.decision_id is None:
            request.decision_id = decision.id
        if sequence.sent_at is None:
            sequence.sent_at = now
        else:
            self._counters.sent_again(is_resumed=sequence.completion_tokens > 0)
        number = sequence.attempts = sequence.attempts + 1
        wire_id = f"{self._nonce}-{request.handle:x}-{sequence.index}-{number}"
        attempt = Attempt(sequence, wire_id, number, rank, self._table.incarnation[rank], now)
        attempt.decision = decision
        sequence.attempt = attempt
        request.last_rank = rank
        self.ledger.charge(attempt, now)
        return attempt

    def dispatch(self, attempt: Attempt, effects: list[Effect]) -> None:
        """Send it."""
        sequence = attempt.sequence
        arrived = sequence.request.arrived
        prompt: Seq[int] = arrived.prompt_token_ids
        sampling = arrived.sampling
        if sequence.completion_tokens:
            assert sequence.record is not None
            prompt = [*prompt, *sequence.record.token_ids]
            sampling = _rest_of(sampling, sequence.completion_tokens)
        if sequence.index and sampling.seed is not None:
            sampling = _seeded(sampling, sampling.seed, sequence.index)
        request = EngineRequest(
            wire_id=attempt.wire_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            eos_token_ids=self._eos_token_ids,
            priority=arrived.priority,
            arrived_at_unix_s=arrived.arrived_at_unix_s,
        )
        effects.append(Dispatch(attempt.rank, attempt.incarnation, request))

    def send_first(self, request: Request, decision: Decision, now: float, effects: list[Effect]) -> None:
        """`charge` and `dispatch` for the one sequence of a request that has just come, to the rank of its decision."""
        counters, rank, arrived = self._counters, decision.rank, request.arrived
        assert rank is not None
        request.decision_id = self.decisions.add(decision)
        counters.decisions[rank] += 1
        if self._policy.may_fault:
            self._count_faults()
        sequence = request.sequences[0]
        sequence.sent_at = now
        sequence.attempts = 1
        wire_id = f"{self._nonce}-{request.handle:x}-0-1"
        incarnation = self._table.incarnation[rank]
        sequence.attempt = attempt = Attempt(sequence, wire_id, 1, rank, incarnation, now)
        attempt.decision = decision
        request.last_rank = rank
        self.ledger.charge(attempt, now)
        counters.dispatch_reasons["direct"] += 1
        wanted = EngineRequest(
            wire_id=wire_id,
            prompt_token_ids=arrived.prompt_token_ids,
            sampling=arrived.sampling,
            eos_token_ids=self._eos_token_ids,
            priority=arrived.priority,
            arrived_at_unix_s=arrived.arrived_at_unix_s,
        )
        effects.append(Dispatch(rank, incarnation, wanted))

    def send(
        self, sequences: Seq[Sequence], decisions: Seq[Decision], reason: str, now: float, effects: list[Effect]
    ) -> None:
        """Charge and dispatch sequences that go to one rank together, for one of `DISPATCH_REASONS`."""
        attempts = []
        for sequence, decision in zip(sequences, decisions, strict=True):
            attempt = self.charge(sequence, decision, now)
            attempts.append(attempt)
            self.dispatch(attempt, effects)
        counters = self._counters
        counters.dispatch_reasons[reason] += len(attempts)
        if self._batches is not None:
            batch = self._batches.open(attempts[0].rank, attempts)
            for decision in decisions:
                decision.batch = (batch.number, len(attempts), reason)
            counters.batch_sizes[len(attempts)] = counters.batch_sizes.get(len(attempts), 0) + 1

    def dispatch_all(self, request: Request, effects: list[Effect]) -> None:
        """Send every sequence of a request that is charged."""
        for sequence in request.sequences:
            if sequence.attempt is not None:
                self.dispatch(sequence.attempt, effects)

    def started(self, attempt: Attempt) -> None:
        """Its first token is here: what its prefill took is known."""
        actual_us = attempt.actual_prefill_us
        if actual_us is not None and self._predictor.has_model:
            self._predictor.observe_prefill(attempt.prompt_tokens, attempt.cached_tokens, actual_us)
            if attempt.decision is not None:
                attempt.decision.actual_ms = actual_us / 1e3
        if self._leaves_at_start and self._batches is not None:
            self._batches.leave(attempt)

    def release(self, attempt: Attempt, evidence: Evidence, now: float) -> None:
        """Give back the charge of an attempt that the rank has seen."""
        rank, counters = attempt.rank, self._counters
        attempt.evidence = (evidence, attempt.incarnation, counters.batches[rank])
        counters.releases[evidence] += 1
        if self._batches is not None:
            self._batches.leave(attempt)
        if self.ledger.release(attempt, now):
            self._load.clamp(rank)

    def take_back(self, attempt: Attempt, now: float) -> None:
        """Release an attempt that never left the gateway: the rank's report is not a stale one of ours."""
        attempt.evidence = (_UNSENT, attempt.incarnation, self._counters.batches[attempt.rank])
        self._counters.releases[_UNSENT] += 1
        if self._batches is not None:
            self._batches.leave(attempt)
        if self.ledger.take_back(attempt, now):
            self._load.unsent(attempt.rank)

    def check(self, held: list[Attempt]) -> None:
        """Assert that exactly the attempts that requests hold are charged; for tests."""
        self.ledger.check()
        assert set(map(id, self.ledger.live.values())) == set(map(id, held))
        assert self._counters.double_releases == 0
        if self._batches is not None:
            self._batches.check()


def _rest_of(sampling: Sampling, done: int) -> Sampling:
    """What is left of the limits after `done` tokens."""
    return structs.replace(
        sampling, max_tokens=sampling.max_tokens - done, min_tokens=max(0, sampling.min_tokens - done)
    )


def _seeded(sampling: Sampling, seed: int, index: int) -> Sampling:
    """Continuations of one seeded request must differ: the i-th gets seed + i, as vLLM's own front end does."""
    return structs.replace(sampling, seed=(seed + index + 2**63) % 2**64 - 2**63)

"""From an acceptable request to an accepted one: the single point at which everything is reserved.

Order: pick a rank where that happens now (mode direct), then charge the budgets, take the place in the order, and
register. Only the pick can refuse, and it takes back what it charged; so a refusal leaves nothing behind.
"""

from gateway.config.schema import Config
from gateway.core.arrivals import Arrivals, Plan
from gateway.core.decisions import Decision
from gateway.core.dispatcher import Dispatcher
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.lifecycle import TRANSITIONS, Phase
from gateway.core.parts import Parts
from gateway.core.refusals import no_rank, too_many_sequences
from gateway.core.request import BYTES_PER_TOKEN, Record, Request, Sequence, is_resumable
from gateway.core.search import NEVER_FITS
from gateway.core.tenants import Account

_QUEUED, _IN_FLIGHT = Phase.QUEUED, Phase.IN_FLIGHT
_FULL = (Reason.RANKS_FULL, Reason.KV_FULL)


class Acceptance:
    """Accepts requests and sends them on their way: to a rank or into the queue."""

    def __init__(self, config: Config, parts: Parts, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._registry = parts.registry
        self._admission = parts.admission
        self._answers = parts.answers
        self._attempts = parts.attempts
        self._policy = parts.policy
        self._load = parts.load
        self._predictor = parts.predictor
        self._dispatcher = parts.dispatcher
        self._counters = parts.counters
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go by these settings."""
        self._may_resume = config.failure.resume
        self._may_wait_for_ranks = config.scheduling.queue.no_rank_wait_s > 0

    def accept(self, arrived: RequestArrived, now: float) -> tuple[Request, Plan | None]:
        """Accept the request or raise the `GatewayError` that refuses it. Without a plan it goes to a rank."""
        plan = None
        if self._arrivals.is_plain:
            account: Account | None = self._arrivals.check(arrived, now)
            prefill_us = self._predictor.prefill_us(len(arrived.prompt_token_ids))
        else:
            plan = self._arrivals.plan(arrived, now)
            account, prefill_us = plan.account, plan.prefill_us
        needs_rank = plan is None or (plan.answer is None and not plan.is_shared)
        if needs_rank:
            if self._load.foreign:
                self._load.expire(now)
            if self._dispatcher is not None:
                self._refuse_the_impossible(arrived, prefill_us, now)
        request = Request(self._registry.new_handle(), arrived, now, prefill_us)
        if needs_rank and self._dispatcher is None:
            try:
                self.pick_all(request, now)
            except GatewayError:
                request.unlink()
                raise
        if account is not None:
            self._admission.reserve(request, account)
        if plan is not None:
            self._counters.slo_shadow_rejects += plan.is_late
            if not self._answers.is_plain:
                self._answers.accepted(request, plan.cache_key, plan.answer)
        # The only token of a sequence ends it: nobody goes on with that.
        if self._may_resume and arrived.sampling.max_tokens > 1 and (plan is None or plan.answer is None):
            self._keep_record(request)
        self._registry.add(request)
        self._counters.accepted += 1
        return request, plan

    def _keep_record(self, request: Request) -> None:
        """Keep what is generated, as long as it may have to become another rank's prompt."""
        if not is_resumable(request.arrived):
            return
        limit_bytes = BYTES_PER_TOKEN * request.arrived.sampling.max_tokens
        for sequence in request.sequences:
            if sequence.record is None:
                sequence.record = Record(cache_bytes=0)
            sequence.record.token_bytes = limit_bytes

    def pick_all(self, request: Request, now: float) -> None:
        """Mode direct: a rank for every sequence, or an error and none."""
        sequences = request.sequences
        try:
            for sequence in sequences:
                self._pick(sequence, now)
        except BaseException:
            for sequence in sequences:
                if sequence.attempt is not None:
                    self._attempts.take_back(sequence.attempt, now)
            raise
        assert _IN_FLIGHT in TRANSITIONS[request.phase], request.phase
        request.phase = _IN_FLIGHT
        self._counters.dispatch_reasons["direct"] += len(sequences)

    def _pick(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        decision = self._attempts.choose(request.arrived, request.prefill_us, now)
        if decision.rank is None:
            self._attempts.record(decision)
            raise self._no_rank(decision, request.arrived)
        self._attempts.charge(sequence, decision, now)

    def _no_rank(self, decision: Decision, arrived: RequestArrived) -> GatewayError:
        """Mode direct: no rank takes another sequence. If all ranks together are too small for `n`, none ever will."""
        if arrived.n > 1 and decision.refusal in _FULL:
            most = self._policy.most_in_flight(
                len(arrived.prompt_token_ids), arrived.sampling.max_tokens, arrived.pinned_rank
            )
            if arrived.n > most:
                return too_many_sequences(decision, arrived, int(most))
        return no_rank(decision, arrived, self._admission.retry_after_s(arrived.n))

    def enqueue(self, request: Request, dispatcher: Dispatcher, now: float) -> None:
        """Modes queue and batch: queue every sequence."""
        request.advance(_QUEUED)
        for sequence in request.sequences:
            dispatcher.push(sequence, now)

    def _refuse_the_impossible(self, arrived: RequestArrived, prefill_us: int, now: float) -> None:
        """Modes queue and batch: what no rank can take by waiting is refused at once."""
        if arrived.pinned_rank is None and self._policy.is_everyone(
            len(arrived.prompt_token_ids), arrived.sampling.max_tokens
        ):
            return
        decision = self._policy.refuse(
            now,
            prompt_tokens=len(arrived.prompt_token_ids),
            max_tokens=arrived.sampling.max_tokens,
            priority=arrived.priority,
            pinned_rank=arrived.pinned_rank,
            label=arrived.request_id,
            prefill_ms=prefill_us / 1e3,
        )
        if decision is None:
            return
        is_hopeless = decision.refusal in NEVER_FITS or decision.refusal is Reason.PINNED_RANK_UNAVAILABLE
        if is_hopeless or (decision.refusal is Reason.NO_ELIGIBLE_RANK and not self._may_wait_for_ranks):
            self._attempts.record(decision)
            raise no_rank(decision, arrived, self._admission.retry_after_s(arrived.n))

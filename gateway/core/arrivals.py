"""Everything that a request must pass before it is accepted. Nothing here reserves anything.

What changes is counts, the order of use of stored answers, and that a tenant was seen.
The order is cheap first: what costs per prompt token comes after the budgets, so that an overload of requests is
refused at the price of their headers.
"""

import msgspec

from gateway.config.schema import Config
from gateway.core.admission import MAX_RETRY_S, MIN_RETRY_S
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.parts import Parts
from gateway.core.ranks import RankState
from gateway.core.refusals import ended_by
from gateway.core.response_cache import CachedAnswer
from gateway.core.slo import SloTargets
from gateway.core.tenants import Account
from gateway.core.validation import Validator


class Plan(msgspec.Struct, frozen=True):
    """How an acceptable request will be served: from `answer`, with a live one (`is_shared`), or by a rank.

    `account` is None for a stored answer, which takes none of the ranks' time. `is_late`: the objective for its first
    token is predicted to be missed, and nobody enforces it.
    """

    account: Account | None
    prefill_us: int
    cache_key: bytes | None
    answer: CachedAnswer | None = None
    is_shared: bool = False
    is_late: bool = False


class Arrivals:
    """The checks of one gateway."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._table = parts.ranks
        self._registry = parts.registry
        self._admission = parts.admission
        self._answers = parts.answers
        self._predictor = parts.predictor
        self._counters = parts.counters
        self._dispatcher = parts.dispatcher
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go by these limits and objectives, for as many ranks as the table has now."""
        self._slo = SloTargets(config.slo)
        self._has_objectives = config.slo.mode != "off"
        self._has_levels = bool(config.scheduling.queue.levels)
        self.validator = Validator(config.model, config.limits, config.groups[0].protocol, self._table.size)
        # Neither order, nor stored answers, nor objectives: every request is for a rank, and nothing is to be planned.
        self.is_plain = self._answers.is_plain and not self._has_objectives

    def validate(self, arrived: RequestArrived) -> None:
        """Raise the first thing that is wrong with the request itself."""
        self.validator.check(arrived)

    def check(self, arrived: RequestArrived, now: float) -> Account:
        """`plan` for what is plain: raise the first reason against the request, or say whom to charge."""
        self._check_itself(arrived, now)
        account = self._admission.check(arrived, now) if self._dispatcher is None else self._check_budgets(arrived, now)
        self.validator.check_tokens(arrived)
        return account

    def plan(self, arrived: RequestArrived, now: float) -> Plan:
        """Raise the first reason against the request, or say how it will be served."""
        self._check_itself(arrived, now)
        key = answer = None
        if not self._answers.is_plain:
            key = self._answers.key_of(arrived)
            answer = self._answers.stored(key, now)
            self._answers.check_place(arrived, answer, self._admission.retry_after_s(1))
        if answer is not None and key is not None:
            self._answers.used(key)
            return Plan(None, 0, key, answer)
        account = self._check_budgets(arrived, now)
        self.validator.check_tokens(arrived)
        prefill_us = self._predictor.prefill_us(len(arrived.prompt_token_ids))
        if key is not None and self._answers.leader_of(key) is not None:
            return Plan(account, prefill_us, key, is_shared=True)
        is_late = self._has_objectives and self._is_late(arrived, prefill_us, now)
        return Plan(account, prefill_us, key, is_late=is_late)

    def _check_itself(self, arrived: RequestArrived, now: float) -> None:
        """What needs no look at the state of the gateway beyond the ids in use."""
        self.validator.check_shape(arrived)
        self._registry.check_id(arrived, now)
        if arrived.deadline_at is not None and arrived.deadline_at <= now:
            raise ended_by(Reason.DEADLINE_EXCEEDED)

    def _check_budgets(self, arrived: RequestArrived, now: float) -> Account:
        if self._dispatcher is None:
            return self._admission.check(arrived, now)
        queue = self._dispatcher.queue
        at_level = queue.depth_of(arrived.priority) if self._has_levels else 0
        return self._admission.check(arrived, now, queued=queue.size, queued_at_level=at_level)

    def _is_late(self, arrived: RequestArrived, prefill_us: int, now: float) -> bool:
        """Whether the request is predicted to miss its objective for the first token; refused where that is enforced."""
        objective_us = self._slo.objective_us(len(arrived.prompt_token_ids), arrived.priority)
        if objective_us is None:
            return False
        wait_us = self._least_wait_us(arrived.pinned_rank, now)
        room_us = objective_us - self._slo.margin_us
        late_us = wait_us + prefill_us - room_us
        if late_us <= 0 or self._slo.mode == "shadow":
            return late_us > 0
        self._counters.slo_rejects += 1
        # Without anything ahead of it, would it be in time? Only then can a retry help.
        is_transient = prefill_us <= room_us
        margin = f" less the margin of {self._slo.margin_us / 1e3:g} ms" if self._slo.margin_us else ""
        raise GatewayError(
            Reason.SLO_UNATTAINABLE,
            f"the first token is predicted after {(wait_us + prefill_us) / 1e3:.1f} ms, the objective is"
            f" {objective_us / 1e3:g} ms{margin}"
            + ("; retry later" if is_transient else " and the prompt alone misses it"),
            retryable=is_transient,
            retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, late_us / 1e6)) if is_transient else None,
            predicted_ms=round((wait_us + prefill_us) / 1e3, 3),
            objective_ms=objective_us / 1e3,
            margin_ms=self._slo.margin_us / 1e3,
            wait_ms=round(wait_us / 1e3, 3),
        )

    def _least_wait_us(self, pinned_rank: int | None, now: float) -> int:
        """Predicted prefill ahead of a newcomer: the least of any rank it may go to, and a rank's share of the queue.

        Open ranks count; while none is, the READY ones, which are at their limit; and without one the queue alone.
        """
        table = self._table
        backlog_us = self._dispatcher.backlog_us if self._dispatcher is not None else 0
        is_ready = [state is RankState.READY for state in table.state]
        for column in (table.is_open, is_ready):
            waits = [
                table.unstarted_us(rank, now)
                for rank, may_take in enumerate(column)
                if may_take and pinned_rank in (None, rank)
            ]
            if waits:
                return min(waits) + backlog_us // sum(column)
        return backlog_us

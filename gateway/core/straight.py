"""The straight way of the common request: from its arrival to its rank in one step.

Most requests are for one sequence, with parameters that have passed before, while the budgets are far from their ends
and every rank passes every filter. Nothing can refuse these but what is looked at here first, so everything is done at
once what `Acceptance.accept`, `Attempts.charge` and `dispatch` do in turn, to the same effect.
"""

from gateway.config.schema import Config
from gateway.core.arrivals import Arrivals
from gateway.core.effects import Effect, RequestAccepted
from gateway.core.events import RequestArrived
from gateway.core.lifecycle import TRANSITIONS, Phase
from gateway.core.parts import Parts
from gateway.core.request import BYTES_PER_TOKEN, Record, Request, is_resumable

_IN_FLIGHT = Phase.IN_FLIGHT
assert _IN_FLIGHT in TRANSITIONS[Phase.ACCEPTED]


class Straight:
    """Takes the requests that go straight, in mode direct; all others are `Acceptance`'s."""

    def __init__(self, config: Config, parts: Parts, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._registry = parts.registry
        self._admission = parts.admission
        self._policy = parts.policy
        self._predictor = parts.predictor
        self._attempts = parts.attempts
        self._load = parts.load
        self._counters = parts.counters
        self._is_direct = parts.dispatcher is None
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go by these settings; after `Arrivals` does."""
        self._may_resume = config.failure.resume
        self._is_on = self._is_direct and self._arrivals.is_plain
        self._validator = self._arrivals.validator

    def take(self, arrived: RequestArrived, now: float, effects: list[Effect]) -> bool:
        """Accept, charge and dispatch the request. False: it isn't one of these, and nothing was changed.

        Raises `GatewayError` for an id in use: after the shape it is what any request is refused for first.
        """
        if not self._is_on or not self._validator.is_common(arrived):
            return False
        self._registry.check_id(arrived, now)
        admission, deadline_at = self._admission, arrived.deadline_at
        prompt_tokens, max_tokens = len(arrived.prompt_token_ids), arrived.sampling.max_tokens
        has_model = self._predictor.has_model
        if (
            admission.sequences >= admission.plenty
            or (deadline_at is not None and deadline_at <= now)
            or not self._validator.has_known_tokens(arrived.prompt_token_ids)
            or self._load.foreign
            # Faults of a formula are counted: it is asked once only.
            or (has_model and not self._policy.is_everyone(prompt_tokens, max_tokens))
        ):
            return False
        prefill_us = self._predictor.prefill_us(prompt_tokens)
        values = (now, prompt_tokens, 0, prompt_tokens, max_tokens, 0, prefill_us / 1e3)
        decision = self._policy.decide_among_all(values, arrived.request_id)
        if decision is None:
            return False
        # From here on nothing can refuse it.
        if has_model:
            decision.predicted_ms = prefill_us / 1e3
        request = Request(self._registry.new_handle(), arrived, now, prefill_us)
        request.phase = _IN_FLIGHT
        if self._may_resume and max_tokens > 1 and is_resumable(arrived):
            request.sequences[0].record = Record(cache_bytes=0, token_bytes=BYTES_PER_TOKEN * max_tokens)
        admission.sequences += 1
        account = request.account = admission.tenants.account(arrived.tenant, now)
        account.in_flight += 1
        self._registry.add(request)
        self._counters.accepted += 1
        effects.append(RequestAccepted(request))
        self._attempts.send_first(request, decision, now, effects)
        return True

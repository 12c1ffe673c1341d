"""What becomes of a sequence whose attempt was lost through no fault of its own.

Without a token it is re-routed: another rank starts from the beginning. With tokens it is resumed: another rank gets the
prompt and what was generated, and generates the rest, where that continues the same distribution: greedy, without
penalties. So no token is lost or sent twice. All else ends with the error of the loss, after the exact tokens so far.
"""

from gateway.config.schema import Config
from gateway.core.effects import Effect
from gateway.core.endings import Endings
from gateway.core.errors import GatewayError
from gateway.core.lifecycle import Evidence
from gateway.core.parts import Parts
from gateway.core.request import Attempt, Sequence, is_resumable


class Recovery:
    """Gives lost sequences another attempt."""

    def __init__(self, config: Config, parts: Parts, endings: Endings) -> None:
        self._settings = config.failure
        self._attempts = parts.attempts
        self._dispatcher = parts.dispatcher
        self._counters = parts.counters
        self._policy = parts.policy
        self._registry = parts.registry
        self._endings = endings

    def may_retry(self, sequence: Sequence) -> bool:
        """Whether another rank could go on with the sequence."""
        settings, arrived = self._settings, sequence.request.arrived
        if arrived.pinned_rank is not None or sequence.attempts >= settings.max_attempts:
            return False
        done = sequence.completion_tokens
        if not done:
            return settings.reroute
        record = sequence.record
        is_whole = record is not None and len(record.token_ids) == done
        return settings.resume and is_whole and is_resumable(arrived)

    def has_way(self, sequence: Sequence, now: float) -> bool:
        """Whether a rank would take the sequence if it had to go on elsewhere now."""
        if not self.may_retry(sequence):
            return False
        with self._policy.dry_run():
            return self._attempts.choose_for(sequence, now).rank is not None

    def lost(self, attempt: Attempt, error: GatewayError, now: float, effects: list[Effect]) -> None:
        """The attempt is released, and its rank has no more say in it. `error` ends the request if nothing helps."""
        sequence = attempt.sequence
        request = sequence.request
        if request.is_settled or attempt is not sequence.attempt:
            return
        over = self._registry.why_over(request, now)
        if over is not None:
            self._endings.expire(request, over, now, effects)
            return
        if self.may_retry(sequence) and self._retry(sequence, now, effects):
            if sequence.completion_tokens:
                self._counters.resumes += 1
            else:
                self._counters.reroutes += 1
            return
        error.facts["delivered_tokens"] = sequence.completion_tokens
        error.facts["attempts"] = sequence.attempts
        # Sequences on other ranks are not lost: they are aborted there.
        self._endings.settle(request, error, Evidence.GATEWAY, now, effects)

    def _retry(self, sequence: Sequence, now: float, effects: list[Effect]) -> bool:
        if self._dispatcher is not None:
            self._dispatcher.push(sequence, now)
            return True
        decision = self._attempts.choose_for(sequence, now)
        if decision.rank is None:
            self._attempts.record(decision)
            return False
        self._attempts.dispatch(self._attempts.charge(sequence, decision, now), effects)
        self._counters.dispatch_reasons["direct"] += 1
        return True

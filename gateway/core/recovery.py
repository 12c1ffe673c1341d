"""What becomes of a sequence whose attempt was lost through no fault of its own.

Without a token it is re-routed: another rank starts from the beginning. With tokens it is resumed: another rank gets the
prompt and what was generated, and generates the rest, where that continues the same distribution: greedy, without
penalties. So no token is lost or sent twice. One that has all its tokens and only lacks the row that says so is complete.
All else ends with the error of the loss, after the exact tokens so far.
"""

from gateway.config.schema import Config
from gateway.core.decisions import Decision
from gateway.core.effects import AbortOnRank, Effect
from gateway.core.endings import Endings
from gateway.core.errors import GatewayError
from gateway.core.lifecycle import Evidence
from gateway.core.parts import Parts
from gateway.core.refusals import with_progress
from gateway.core.request import Attempt, Record, Sequence, is_resumable
from gateway.types import FinishReason

MAX_UNSENT = 8
"""Attempts of a sequence that may fail without having left the gateway; they are no tries of a rank."""


class Recovery:
    """Gives lost sequences another attempt."""

    def __init__(self, config: Config, parts: Parts, endings: Endings) -> None:
        self.configure(config)
        self._attempts = parts.attempts
        self._dispatcher = parts.dispatcher
        self._table = parts.ranks
        self._load = parts.load
        self._answers = parts.answers
        self._registry = parts.registry
        self._endings = endings

    def configure(self, config: Config) -> None:
        """Go by these settings."""
        self._settings = config.failure
        self._eos_token_ids = frozenset(config.model.eos_token_ids)

    def may_retry(self, sequence: Sequence) -> bool:
        """Whether another rank could go on with the sequence."""
        settings, arrived = self._settings, sequence.request.arrived
        tried = sequence.attempts - sequence.unsent
        if arrived.pinned_rank is not None or tried >= settings.max_attempts or sequence.unsent > MAX_UNSENT:
            return False
        if not sequence.completion_tokens:
            return settings.reroute
        may_resume = settings.resume and _has_all(sequence.record, sequence) and is_resumable(arrived)
        return may_resume and not self._end_of(sequence)

    def move(self, attempt: Attempt, now: float, effects: list[Effect]) -> None:
        """Let another rank go on with a live attempt's sequence if one can take it at once; else it stays where it is."""
        sequence = attempt.sequence
        if not self.may_retry(sequence) or self._registry.why_over(sequence.request, now) is not None:
            return
        with self._attempts.ledger.without(attempt):
            decision, reason = self._elsewhere(sequence, now)
        if decision is None or decision.rank is None:
            return
        self._attempts.release(attempt, Evidence.GATEWAY, now)
        self._load.aborted(attempt.rank, now)
        effects.append(AbortOnRank(attempt.rank, attempt.incarnation, (attempt.wire_id,)))
        self._attempts.send([sequence], [decision], reason, now, effects)

    def lost(self, attempt: Attempt, error: GatewayError, now: float, effects: list[Effect]) -> None:
        """The attempt is released, and its rank has no more say in it. `error` ends the request if nothing helps."""
        sequence = attempt.sequence
        request = sequence.request
        if request.is_settled or attempt is not sequence.attempt:
            return
        finish = self._end_of(sequence)
        if finish:
            self._answers.complete(sequence)
            self._endings.finished(sequence, finish, Evidence.GATEWAY, now, effects)
            return
        over = self._registry.why_over(request, now)
        if over is not None:
            self._endings.expire(request, over, now, effects)
            return
        if self.may_retry(sequence) and self._retry(sequence, error, now, effects):
            return
        # Sequences on other ranks are not lost: they are aborted there.
        self._endings.settle(request, with_progress(error, sequence), Evidence.GATEWAY, now, effects)

    def _retry(self, sequence: Sequence, error: GatewayError, now: float, effects: list[Effect]) -> bool:
        if self._dispatcher is not None:
            self._dispatcher.push(sequence, now, error)
            return True
        decision = self._attempts.choose_for(sequence, now)
        if decision.rank is None:
            self._attempts.record(decision)
            return False
        self._attempts.send([sequence], [decision], "direct", now, effects)
        return True

    def _elsewhere(self, sequence: Sequence, now: float) -> tuple[Decision | None, str]:
        """A rank that takes the sequence now, past no gate and into no queue, and why it does."""
        if self._dispatcher is None:
            return self._attempts.choose_for(sequence, now), "direct"
        found = self._dispatcher.place(sequence, now)
        return (None, "") if found is None else (found.decisions[0], found.reason)

    def _end_of(self, sequence: Sequence) -> FinishReason:
        """How a sequence has ended whose rank has not said so; empty while there is more to come."""
        done, attempt, sampling = sequence.completion_tokens, sequence.attempt, sequence.request.arrived.sampling
        if not done or attempt is None:
            return ""
        length = len(sequence.request.arrived.prompt_token_ids) + done
        if done >= sampling.max_tokens or 0 < self._table.max_model_len[attempt.rank] <= length:
            return "length"
        record = sequence.record
        if record is None or not _has_all(record, sequence) or done < sampling.min_tokens:
            return ""
        last = record.token_ids[-1]
        is_eos = last in self._eos_token_ids and not sampling.ignore_eos
        return "stop" if is_eos or last in sampling.stop_token_ids else ""


def _has_all(record: Record | None, sequence: Sequence) -> bool:
    return record is not None and len(record.token_ids) == sequence.completion_tokens

"""How requests end: once each, whatever ended them, and with everything given back.

`settle` when the outcome is known; the answer then leaves at once, or when its turn in the preserved order has come.
"""

from gateway.core.acceptance import Acceptance
from gateway.core.effects import AbortOnRank, Effect, RequestEnded
from gateway.core.errors import GatewayError, Reason
from gateway.core.lifecycle import TRANSITIONS, Evidence, Phase
from gateway.core.parts import Parts
from gateway.core.patience import Patience
from gateway.core.refusals import ended_by
from gateway.core.request import Attempt, Request, Sequence
from gateway.types import FinishReason

_SETTLED, _ENDED = Phase.SETTLED, Phase.ENDED
_ENGINE = Evidence.ENGINE
_NOBODY: list[Request] = []
_DROPPED = (Reason.CANCELLED, Reason.ABORTED, Reason.INTERNAL)
"""Ends after which nobody waits for the output any more."""


class Endings:
    """The one way out of the gateway."""

    def __init__(self, parts: Parts, acceptance: Acceptance, patience: Patience | None) -> None:
        self._acceptance = acceptance
        self._patience = patience
        self._registry = parts.registry
        self._admission = parts.admission
        self._answers = parts.answers
        self._attempts = parts.attempts
        self._load = parts.load
        self._dispatcher = parts.dispatcher
        self._counters = parts.counters

    def settle(
        self, request: Request, error: GatewayError | None, evidence: Evidence, now: float, effects: list[Effect]
    ) -> None:
        """The outcome is known. Whatever is still charged is released and aborted at its rank."""
        if request.phase >= _SETTLED:
            self._counters.double_ends += 1
            return
        assert _SETTLED in TRANSITIONS[request.phase], request.phase
        request.phase = _SETTLED
        request.settled_at = now
        request.error = error
        for sequence in request.sequences:
            if sequence.entry is not None and self._dispatcher is not None:
                self._dispatcher.forget(sequence)
            attempt = sequence.attempt
            if attempt is not None and not attempt.released:
                self._attempts.release(attempt, evidence, now)
                self._load.aborted(attempt.rank, now)
                effects.append(AbortOnRank(attempt.rank, attempt.incarnation, (attempt.wire_id,)))
        if request.account is not None:
            self._admission.give_back(request, request.unfinished, now)
        followers = _NOBODY
        if request.cache_key is not None:
            self._answers.store(request, now)
            followers = self._answers.followers(request)
        if request.place is None:
            self._answers.dirty.append(request)
            self._end(request, now, effects)
        else:
            self._leave(request, now, effects, is_dropped=error is not None and error.reason in _DROPPED)
        for follower in followers:
            self._follow_up(follower, request, now, effects)

    def completed(self, attempt: Attempt, finish: FinishReason, now: float, effects: list[Effect]) -> None:
        """The engine completed a sequence: its attempt is released, and `finished` has the rest."""
        self._attempts.release(attempt, _ENGINE, now)
        sequence = attempt.sequence
        request = sequence.request
        if len(request.sequences) > 1 or request.place is not None or request.cache_key is not None:
            self.finished(sequence, finish, _ENGINE, now, effects)
            return
        # As `settle` and `_end` for one that has nothing else to release, waits for no turn and is stored nowhere.
        assert request.phase < _SETTLED, request.phase
        sequence.finish = finish
        request.phase = _ENDED
        request.settled_at = request.ended_at = now
        self._admission.give_back(request, 1, now)
        self._answers.dirty.append(request)
        self._registry.remove(request, now)
        self._counters.ended["OK"] += 1
        effects.append(RequestEnded(request))

    def finished(
        self, sequence: Sequence, finish: FinishReason, evidence: Evidence, now: float, effects: list[Effect]
    ) -> None:
        """A sequence is complete; with the last one of its request, so is that. Its attempt is released."""
        request = sequence.request
        sequence.finish = finish
        if request.unfinished == 1:
            self.settle(request, None, evidence, now, effects)
            return
        request.unfinished -= 1
        self._admission.give_back(request, 1, now)

    def cut_short(self, request: Request, reason: Reason, now: float, effects: list[Effect]) -> None:
        """The caller, or the gateway itself, wants no more of it."""
        if not request.is_settled:
            evidence = Evidence.CALLER if reason in _DROPPED else Evidence.GATEWAY
            self.settle(request, ended_by(reason), evidence, now, effects)
        elif not request.is_ended:
            # Its answer waits for its turn, and now nobody waits for the answer.
            request.error = ended_by(reason)
            self._leave(request, now, effects, is_dropped=True)

    def expire(self, request: Request, reason: Reason, now: float, effects: list[Effect]) -> None:
        """Its time is over. An answer that is complete and waits for its turn stays one."""
        if not request.is_settled:
            self._counters.deadlines_expired += reason is Reason.DEADLINE_EXCEEDED
            self.settle(request, ended_by(reason), Evidence.DEADLINE, now, effects)

    def _leave(self, request: Request, now: float, effects: list[Effect], *, is_dropped: bool) -> None:
        """The answer leaves, and with it those that only waited for it to."""
        for ended in self._answers.settled(request, is_dropped=is_dropped):
            self._end(ended, now, effects)

    def _end(self, request: Request, now: float, effects: list[Effect]) -> None:
        """Its answer has left."""
        assert _ENDED in TRANSITIONS[request.phase], request.phase
        request.phase = _ENDED
        request.ended_at = now
        self._registry.remove(request, now)
        ended = self._counters.ended
        if request.error is None:
            ended["OK"] += 1
        else:
            outcome = request.error.reason.value
            ended[outcome] = ended.get(outcome, 0) + 1
        effects.append(RequestEnded(request))

    def _follow_up(self, follower: Request, leader: Request, now: float, effects: list[Effect]) -> None:
        """Give a follower its leader's answer, or a way of its own."""
        if self._answers.answer_as(follower, leader):
            follower.first_token_at = now
            self.settle(follower, None, Evidence.GATEWAY, now, effects)
            return
        over = self._registry.why_over(follower, now)
        if over is not None:
            self.expire(follower, over, now, effects)
            return
        waited = self._patience.why_over(follower, now) if self._patience is not None else None
        if waited is not None:
            self.settle(follower, waited, Evidence.GATEWAY, now, effects)
            return
        if self._answers.follow(follower):
            return
        self._answers.lead(follower)
        if self._dispatcher is not None:
            self._acceptance.enqueue(follower, self._dispatcher, now)
            return
        try:
            self._acceptance.pick_all(follower, now)
        except GatewayError as error:
            self.settle(follower, error.with_traceback(None), Evidence.UNSENT, now, effects)
            return
        self._attempts.dispatch_all(follower, effects)

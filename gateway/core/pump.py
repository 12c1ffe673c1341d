"""Modes queue and batch: moves what is queued to ranks, or to its end.

Runs after every event, because every event may open a gate; it needs no timer of its own.
"""

from gateway.core.dispatcher import Placement
from gateway.core.effects import Effect
from gateway.core.endings import Endings
from gateway.core.entry import Entry
from gateway.core.errors import GatewayError
from gateway.core.lifecycle import Evidence, Phase
from gateway.core.parts import Parts
from gateway.core.patience import Patience
from gateway.core.refusals import no_rank, no_rank_for_long, nobody_else
from gateway.core.request import Request

_QUEUED, _IN_FLIGHT = Phase.QUEUED, Phase.IN_FLIGHT


class Pump:
    """Takes placements from the dispatcher until there is none."""

    def __init__(self, parts: Parts, patience: Patience, endings: Endings) -> None:
        self._dispatcher = patience.dispatcher
        self._attempts = parts.attempts
        self._registry = parts.registry
        self._admission = parts.admission
        self._endings = endings
        self._patience = patience

    @property
    def queue_delays(self) -> int:
        """Sequences that the queue's time-out moved behind all others."""
        return self._dispatcher.queue.timeouts_delayed

    def run(self, now: float, effects: list[Effect]) -> None:
        """Send what may go now."""
        while (found := self._dispatcher.next(now)) is not None:
            if isinstance(found, Placement):
                if not self._expire_late(found, now, effects):
                    self._send(found, now, effects)
                continue
            self._attempts.record(found.decision)
            request = found.entry.sequence.request
            error = no_rank(found.decision, request.arrived, self._admission.retry_after_s(1))
            self._give_up(found.entry, error, now, effects)

    def watch(self, follower: Request) -> None:
        """A request waits for the answer of one that may wait here."""
        self._patience.watch(follower)

    def expire(self, now: float, effects: list[Effect]) -> None:
        """End what waited too long: for the queue's time-out, or for a rank that could take it to be READY."""
        dispatcher = self._dispatcher
        for entry in dispatcher.expired(now):
            if not entry.sequence.request.is_settled:  # its other sequences may have timed out with it
                self._give_up(entry, self._patience.gave_up(entry, now), now, effects)
        for request, limit in self._patience.expired_followers(now):
            if not request.is_settled:
                error = self._patience.timed_out(request.accepted_at, limit, now)
                self._endings.settle(request, error, Evidence.GATEWAY, now, effects)
        for entry in dispatcher.without_rank(now):
            if not entry.sequence.request.is_settled:
                error = no_rank_for_long(dispatcher.no_rank_wait_s, self._admission.retry_after_s(1))
                self._give_up(entry, error, now, effects)

    def _expire_late(self, found: Placement, now: float, effects: list[Effect]) -> bool:
        """The clock moved since the last tick: nothing goes out whose time is over. True if there was such."""
        is_late = False
        for entry in found.entries:
            request = entry.sequence.request
            reason = self._registry.why_over(request, now)
            if reason is not None:
                is_late = True
                self._endings.expire(request, reason, now, effects)
        return is_late

    def _send(self, found: Placement, now: float, effects: list[Effect]) -> None:
        sequences = []
        for entry in found.entries:
            self._dispatcher.taken(entry)
            sequence = entry.sequence
            if sequence.request.phase is _QUEUED:
                sequence.request.advance(_IN_FLIGHT)
            sequences.append(sequence)
        self._attempts.send(sequences, found.decisions, found.reason, now, effects)

    def _give_up(self, entry: Entry, error: GatewayError, now: float, effects: list[Effect]) -> None:
        """An entry's wait is over. One that had a rank before ends for the loss of that, with what it has delivered."""
        request, loss = entry.sequence.request, entry.loss
        if loss is not None:
            error = nobody_else(loss, error, entry.sequence)
        self._endings.settle(request, error, Evidence.GATEWAY, now, effects)

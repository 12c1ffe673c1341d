"""Modes queue and batch: moves what is queued to ranks, or to its end.

Runs after every event, because every event may open a gate; it needs no timer of its own.
"""

from gateway.config.schema import Config
from gateway.core.dispatcher import Dispatcher, Placement
from gateway.core.effects import Effect
from gateway.core.endings import Endings
from gateway.core.lifecycle import Evidence, Phase
from gateway.core.parts import Parts
from gateway.core.refusals import no_rank, no_rank_for_long, queue_timeout

_QUEUED, _IN_FLIGHT = Phase.QUEUED, Phase.IN_FLIGHT


class Pump:
    """Takes placements from the dispatcher until there is none."""

    def __init__(self, config: Config, parts: Parts, dispatcher: Dispatcher, endings: Endings) -> None:
        self._dispatcher = dispatcher
        self._attempts = parts.attempts
        self._registry = parts.registry
        self._admission = parts.admission
        self._endings = endings
        self._counters = parts.counters
        self._no_rank_wait_s = config.scheduling.queue.no_rank_wait_s

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
            self._endings.settle(request, error, Evidence.GATEWAY, now, effects)

    def expire(self, now: float, no_rank_since: float | None, effects: list[Effect]) -> None:
        """End what waited too long: for the queue's time-out, or for any rank to be READY."""
        dispatcher = self._dispatcher
        for entry in dispatcher.expired(now):
            request = entry.sequence.request
            if not request.is_settled:  # its other sequences may have timed out with it
                self._counters.queue_timeouts += 1
                error = queue_timeout(now - entry.enqueued_at, self._admission.retry_after_s(len(dispatcher) + 1))
                self._endings.settle(request, error, Evidence.GATEWAY, now, effects)
        wait_s = self._no_rank_wait_s
        if no_rank_since is None or now - no_rank_since < wait_s:
            return
        for entry in dispatcher.queue.entries():
            request = entry.sequence.request
            if now - entry.enqueued_at >= wait_s and not request.is_settled:
                error = no_rank_for_long(wait_s, self._admission.retry_after_s(1))
                self._endings.settle(request, error, Evidence.GATEWAY, now, effects)

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
        attempts = []
        for entry, decision in zip(found.entries, found.decisions, strict=True):
            self._dispatcher.taken(entry)
            sequence = entry.sequence
            if sequence.request.phase is _QUEUED:
                sequence.request.advance(_IN_FLIGHT)
            attempt = self._attempts.charge(sequence, decision, now)
            attempts.append(attempt)
            self._attempts.dispatch(attempt, effects)
        counters = self._counters
        counters.dispatch_reasons[found.reason] += len(attempts)
        if self._dispatcher.batches is not None:
            batch = self._dispatcher.batches.open(found.rank, attempts)
            for decision in found.decisions:
                decision.batch = (batch.number, len(attempts), found.reason)
            counters.batch_sizes[len(attempts)] = counters.batch_sizes.get(len(attempts), 0) + 1

"""What happens to ranks: they join, are drained, block, and are lost; and what that means for the work they had.

One rank's fate is its own, except in a coupled group: its ranks step together, so the loss of one stops all of them.
"""

from typing import assert_never

from gateway.config.schema import Config
from gateway.core.effects import AbortOnRank, Effect, RankStateChanged
from gateway.core.endings import Endings
from gateway.core.events import (
    RankDrained,
    RankJoined,
    RankLost,
    RankUndrained,
    SendBlocked,
    SendFailed,
    SendUnblocked,
)
from gateway.core.lifecycle import Evidence
from gateway.core.parts import Parts
from gateway.core.ranks import TRANSITIONS, RankState
from gateway.core.recovery import Recovery
from gateway.core.refusals import rank_drained, rank_lost, send_failed
from gateway.core.strays import Strays

RankEvent = RankJoined | RankLost | RankDrained | RankUndrained | SendFailed | SendBlocked | SendUnblocked
_SERVING = (RankState.READY, RankState.DRAINING)


class Fleet:
    """The lifecycle of all ranks. `no_rank_since`: when the last READY one went away, or 0 before the first came."""

    def __init__(self, config: Config, parts: Parts, endings: Endings, recovery: Recovery, strays: Strays) -> None:
        self._ranks = parts.ranks
        self._attempts = parts.attempts
        self._load = parts.load
        self._counters = parts.counters
        self._dispatcher = parts.dispatcher
        self._endings = endings
        self._recovery = recovery
        self._strays = strays
        self._is_coupled = [config.groups[group].coupled for group in parts.ranks.group_of]
        self.no_rank_since: float | None = 0.0

    def is_current(self, rank: int, incarnation: int) -> bool:
        """Whether the incarnation is the one that serves; else the event that names it is counted as stale."""
        is_current = self._ranks.incarnation[rank] == incarnation and self._ranks.state[rank] in _SERVING
        if not is_current:
            self._counters.stale_events += 1
        return is_current

    def handle(self, event: RankEvent, now: float, effects: list[Effect]) -> None:
        """Apply what happened to a rank."""
        match event:
            case RankJoined():
                self._join(event, now, effects)
            case RankLost():
                if self.is_current(event.rank, event.incarnation):
                    self._lose(event.rank, event.cause, now, effects)
            case RankDrained():
                self._drain(event, now, effects)
            case RankUndrained():
                if self._ranks.state[event.rank] is RankState.DRAINING:
                    self._move(event.rank, "undrained", "undrained by an operator", effects)
                    self.no_rank_since = None
            case SendFailed():
                self._unsent(event, now, effects)
            case SendBlocked() | SendUnblocked():
                if self.is_current(event.rank, event.incarnation):
                    self._ranks.is_blocked[event.rank] = isinstance(event, SendBlocked)
                    self._ranks.refresh(event.rank)
            case _:
                assert_never(event)

    def _move(self, rank: int, event: str, cause: str, effects: list[Effect]) -> None:
        ranks = self._ranks
        old = ranks.state[rank]
        new = ranks.state[rank] = TRANSITIONS[old][event]
        ranks.refresh(rank)
        effects.append(RankStateChanged(rank, ranks.incarnation[rank], old.value, new.value, cause))

    def _join(self, event: RankJoined, now: float, effects: list[Effect]) -> None:
        rank, ranks = event.rank, self._ranks
        if event.incarnation <= ranks.incarnation[rank]:
            self._counters.stale_events += 1
            return
        if ranks.state[rank] in _SERVING:
            self._lose(rank, "replaced by a new incarnation", now, effects)
        ranks.join(rank, event.incarnation, event.info)
        self._load.join(rank)
        self._strays.forget(rank)
        self._move(rank, "joined", "reattached" if event.reattached else "joined", effects)
        self.no_rank_since = None

    def _lose(self, rank: int, cause: str, now: float, effects: list[Effect]) -> None:
        ranks = self._ranks
        lost = [rank]
        if self._is_coupled[rank]:
            group = ranks.group_of[rank]
            lost += [
                other
                for other in range(ranks.size)
                if other != rank and ranks.group_of[other] == group and ranks.state[other] in _SERVING
            ]
        # All of them first: what is re-routed must not go to a rank that is about to be lost as well.
        released = []
        for each in lost:
            text = cause if each == rank else f"its group lost rank {rank}"
            attempts = self._attempts.ledger.of_rank(each)
            for attempt in attempts:
                self._attempts.release(attempt, Evidence.RANK_LOST, now)
                if each != rank:
                    effects.append(AbortOnRank(each, attempt.incarnation, (attempt.wire_id,)))
            ranks.forget_snapshot(each)
            ranks.is_blocked[each] = False
            self._move(each, "lost", text, effects)
            released += [(attempt, each, text) for attempt in attempts]
        if RankState.READY not in ranks.state:
            self.no_rank_since = now
        for attempt, each, text in released:
            self._recovery.lost(attempt, rank_lost(each, text), now, effects)
        for each in lost:
            self._end_pinned(each, cause, now, effects)

    def _drain(self, event: RankDrained, now: float, effects: list[Effect]) -> None:
        rank = event.rank
        if self._ranks.state[rank] is RankState.READY:
            self._move(rank, "drained", "drained by an operator", effects)
            if RankState.READY not in self._ranks.state:
                self.no_rank_since = now
            self._end_pinned(rank, "drained by an operator", now, effects)
        if not event.migrate or self._ranks.state[rank] is not RankState.DRAINING:
            return
        for attempt in self._attempts.ledger.of_rank(rank):
            if attempt.is_done or not self._recovery.has_way(attempt.sequence, now):
                continue  # it ends here, in its own time
            self._attempts.release(attempt, Evidence.GATEWAY, now)
            self._load.aborted(rank, now)
            effects.append(AbortOnRank(rank, attempt.incarnation, (attempt.wire_id,)))
            self._recovery.lost(attempt, rank_drained(rank), now, effects)

    def _end_pinned(self, rank: int, cause: str, now: float, effects: list[Effect]) -> None:
        """A pin is never re-routed, and its rank may never come back."""
        if self._dispatcher is None:
            return
        for entry in self._dispatcher.queue.pinned_to(rank):
            request = entry.sequence.request
            if not request.is_settled:
                self._endings.settle(request, rank_lost(rank, cause), Evidence.GATEWAY, now, effects)

    def _unsent(self, event: SendFailed, now: float, effects: list[Effect]) -> None:
        attempt = self._attempts.ledger.live.get(event.wire_id)
        if attempt is None:
            return
        # The rank never saw it: nothing to abort there, and nothing learnt about its load.
        self._attempts.take_back(attempt, now)
        self._recovery.lost(attempt, send_failed(event.rank, event.cause), now, effects)

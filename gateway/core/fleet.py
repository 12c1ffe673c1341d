"""What happens to ranks: they join, are drained, block, and are lost; and what that means for the work they had.

One rank's fate is its own, except in a coupled group: its ranks step together, so the loss of one stops all of them.
"""

from typing import assert_never

from gateway.config.schema import Config
from gateway.core.effects import AbortOnRank, Effect, RankRemoved, RenewIncarnation
from gateway.core.endings import Endings
from gateway.core.events import (
    RankDrained,
    RankHeard,
    RankJoined,
    RankLost,
    RankRenewed,
    RankUndrained,
    SendBlocked,
    SendFailed,
    SendUnblocked,
)
from gateway.core.health import Health
from gateway.core.lifecycle import Evidence
from gateway.core.moves import Moves
from gateway.core.parts import Parts
from gateway.core.rank_rows import vacate
from gateway.core.ranks import SERVING, RankState
from gateway.core.recovery import Recovery
from gateway.core.refusals import rank_lost, send_failed
from gateway.core.request import Attempt
from gateway.core.strays import Strays

LinkEvent = RankJoined | RankLost | RankHeard | RankRenewed | SendFailed | SendBlocked | SendUnblocked
RankEvent = LinkEvent | RankDrained | RankUndrained
_JOINING, _LOST = RankState.JOINING, RankState.LOST


class Fleet:
    """The lifecycle of all ranks."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        endings: Endings,
        recovery: Recovery,
        strays: Strays,
        moves: Moves,
        health: Health,
    ) -> None:
        self._ranks = parts.ranks
        self._attempts = parts.attempts
        self._load = parts.load
        self._counters = parts.counters
        self._dispatcher = parts.dispatcher
        self._endings = endings
        self._recovery = recovery
        self._strays = strays
        self._moves = moves
        self._health = health
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go by other settings, for as many ranks as the table has now."""
        self._is_coupled = [config.groups[group].coupled for group in self._ranks.group_of]

    def is_current(self, rank: int, incarnation: int) -> bool:
        """Whether the incarnation is one that may be heard; else the event that names it is counted as stale.

        One that is configured no more may have sent its last word late.
        """
        ranks = self._ranks
        is_current = rank < ranks.size and ranks.incarnation[rank] == incarnation
        if is_current:
            state = ranks.state[rank]
            is_current = state in SERVING or state is _JOINING or (state is _LOST and self._health.is_kept(rank))
        if not is_current:
            self._counters.stale_events += 1
        return is_current

    def handle(self, event: RankEvent, now: float, effects: list[Effect]) -> None:
        """Apply what happened to a rank."""
        if event.rank >= self._ranks.size:  # the last words of a rank that is configured no more
            self._counters.stale_events += 1
            return
        match event:
            case RankLost() | RankHeard() | SendBlocked() | SendUnblocked():
                if self.is_current(event.rank, event.incarnation):
                    self._note(event, now, effects)
            case RankJoined():
                self._join(event, now, effects)
            case RankRenewed():
                self._renew(event, now, effects)
            case RankDrained():
                self._drain(event, now, effects)
            case RankUndrained():
                self._undrain(event.rank, now, effects)
            case SendFailed():
                self._unsent(event, now, effects)
            case _:
                assert_never(event)

    def _note(
        self, event: RankLost | RankHeard | SendBlocked | SendUnblocked, now: float, effects: list[Effect]
    ) -> None:
        """What the link says of the incarnation that it has."""
        match event:
            case RankLost():
                self._part(event.rank, event.cause, now, effects)
            case RankHeard():
                self._health.heard(event.rank, (), now, effects)
            case SendBlocked() | SendUnblocked():
                self._ranks.is_blocked[event.rank] = isinstance(event, SendBlocked)
                self._ranks.refresh(event.rank)
                if isinstance(event, SendUnblocked):
                    self._health.took(event.rank)

    def step(self, now: float, effects: list[Effect]) -> None:
        """Let time pass: ranks that are silent for too long are lost."""
        for rank in self._health.step(now, effects):
            if self._ranks.state[rank] in SERVING:
                self._lose(rank, self._health.silence(rank), now, effects, is_silent=True)

    def _join(self, event: RankJoined, now: float, effects: list[Effect]) -> None:
        rank, ranks = event.rank, self._ranks
        if event.incarnation <= ranks.incarnation[rank]:
            self._counters.stale_events += 1
            return
        if ranks.state[rank] in SERVING:
            self._lose(rank, "replaced by a new incarnation", now, effects)
        ranks.join(rank, event.incarnation, event.info)
        self._load.join(rank)
        self._strays.forget(rank)
        if not event.reattached:
            self._health.hold(rank, is_held=False)  # a restart is what it was drained for
        how = "held" if self._health.is_held(rank) else "joined"
        self._moves.move(rank, how, "reattached" if event.reattached else "joined", now, effects)
        self._health.joined(rank, now, effects)

    def _part(self, rank: int, cause: str, now: float, effects: list[Effect]) -> None:
        """The link has lost the rank."""
        if self._ranks.state[rank] in SERVING:
            self._lose(rank, cause, now, effects)
            return
        self._health.unreachable(rank)
        self._ranks.forget_snapshot(rank)
        self._ranks.is_blocked[rank] = False
        self._ranks.refresh(rank)
        if self._moves.can(rank, "lost"):
            self._moves.move(rank, "lost", cause, now, effects)

    def _renew(self, event: RankRenewed, now: float, effects: list[Effect]) -> None:
        rank, ranks = event.rank, self._ranks
        if ranks.state[rank] is not _LOST or event.incarnation <= ranks.incarnation[rank]:
            self._counters.stale_events += 1
            return
        info = ranks.info[rank]
        assert info is not None
        ranks.join(rank, event.incarnation, info)
        self._load.join(rank)
        self._health.renewed(rank, now, effects)

    def _lose(self, rank: int, cause: str, now: float, effects: list[Effect], *, is_silent: bool = False) -> None:
        """The rank stops serving, and in a coupled group the others with it."""
        # All of them first: what is re-routed must not go to a rank that is about to be lost as well.
        released = []
        lost = self._stopped_with(rank)
        for each in lost:
            text = cause if each == rank else f"its group lost rank {rank}"
            # What the link does not miss has kept its sockets, and may still work.
            attempts = self._release_all(each, text, now, effects, is_kept=is_silent or each != rank)
            released += [(attempt, each, text) for attempt in attempts]
        self._health.blame(rank, now, effects, is_silent=is_silent)
        self._health.rescue(now, effects)
        for attempt, each, text in released:
            self._recovery.lost(attempt, rank_lost(each, text), now, effects)
        for each in lost:
            self._end_pinned(each, cause, now, effects)

    def _stopped_with(self, rank: int) -> list[int]:
        ranks = self._ranks
        if not self._is_coupled[rank]:
            return [rank]
        group = ranks.group_of[rank]
        others = (other for other in range(ranks.size) if other != rank and ranks.group_of[other] == group)
        return [rank, *(other for other in others if ranks.state[other] in SERVING)]

    def _release_all(self, rank: int, cause: str, now: float, effects: list[Effect], *, is_kept: bool) -> list[Attempt]:
        """Everything on the rank is released, and the rank is LOST."""
        ranks = self._ranks
        incarnation = ranks.incarnation[rank]
        attempts = self._attempts.ledger.of_rank(rank)
        for attempt in attempts:
            self._attempts.release(attempt, Evidence.RANK_LOST, now)
        if is_kept and attempts:
            self._load.aborted(rank, now)
            effects.append(AbortOnRank(rank, incarnation, [attempt.wire_id for attempt in attempts]))
        ranks.forget_snapshot(rank)
        ranks.is_blocked[rank] = False
        self._moves.move(rank, "lost", cause, now, effects)
        self._health.unreachable(rank)
        if is_kept:
            effects.append(RenewIncarnation(rank, incarnation))
        return attempts

    def _drain(self, event: RankDrained, now: float, effects: list[Effect]) -> None:
        rank = event.rank
        self._health.hold(rank, is_held=True)
        if self._moves.can(rank, "drained"):
            self.take_out(rank, "drained by an operator", now, effects)
        if event.migrate and self._ranks.state[rank] is RankState.DRAINING:
            # One by one: each is charged to its next rank before the others are looked at.
            for attempt in self._attempts.ledger.of_rank(rank):
                self._recovery.move(attempt, now, effects)

    def take_out(self, rank: int, cause: str, now: float, effects: list[Effect]) -> None:
        """A rank that may get new work, now or later, gets none from now on."""
        self._moves.move(rank, "drained", cause, now, effects)
        self._health.rescue(now, effects)
        self._end_pinned(rank, cause, now, effects)

    def bring_back(self, rank: int, cause: str, now: float, effects: list[Effect]) -> None:
        """A DRAINING or EJECTED rank takes work again, unless an operator still drains it."""
        if not self._health.is_held(rank):
            self._moves.move(rank, "undrained", cause, now, effects)

    def _undrain(self, rank: int, now: float, effects: list[Effect]) -> None:
        self._health.hold(rank, is_held=False)
        self._health.forgive(rank)
        if self._moves.can(rank, "undrained"):
            self.bring_back(rank, "undrained by an operator", now, effects)

    def remove(self, rank: int, now: float, effects: list[Effect]) -> None:
        """A rank that has no work and may get none is configured no more."""
        if self._ranks.state[rank] is not RankState.ABSENT:
            self._moves.move(rank, "removed", "removed from the configuration", now, effects)
        self._health.forget(rank)
        vacate(self._ranks, rank)
        self._load.join(rank)
        self._strays.forget(rank)
        effects.append(RankRemoved(rank))

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
        rank = attempt.rank
        if event.cause != "encode":  # that is the request's own doing
            attempt.sequence.unsent += 1
        if event.cause == "unreachable":
            # It would look idle and draw all that there is, this sequence first. The link says when it may be tried again.
            self._ranks.is_blocked[rank] = True
            self._ranks.refresh(rank)
            self._health.send_failed(rank, now, effects)
        self._recovery.lost(attempt, send_failed(rank, event.cause), now, effects)

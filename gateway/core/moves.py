"""The only place where a rank's state changes: one step of the lifecycle table at a time, and told."""

from gateway.core.effects import Effect, RankStateChanged
from gateway.core.ranks import TRANSITIONS, RankState, RankTable

_READY = RankState.READY


class Moves:
    """Owns the columns `state` and `away_since`."""

    def __init__(self, table: RankTable) -> None:
        self._table = table

    def can(self, rank: int, event: str) -> bool:
        """Whether the event means anything for the rank's state."""
        return event in TRANSITIONS[self._table.state[rank]]

    def move(self, rank: int, event: str, cause: str, now: float, effects: list[Effect]) -> None:
        """Take the event's step. One that the table doesn't have is a defect of the caller."""
        table = self._table
        old = table.state[rank]
        new = table.state[rank] = TRANSITIONS[old][event]
        table.refresh(rank)
        if new is _READY:
            table.away_since[rank] = None
        elif table.away_since[rank] is None:
            table.away_since[rank] = now
        effects.append(RankStateChanged(rank, table.incarnation[rank], old.value, new.value, cause))

"""Which ranks fail again and again, and for how long they are left alone.

The memory is the rank's, not its incarnation's: reconnecting is no cure. A success clears it. What a rank refuses for
lack of room, gives up for the request's own faults, or was told to abort is no failure, and nor is being slow. Some
ranks always stay: at most a share of a group is ejected at once, and never its last READY rank. A rank that is back
keeps its memory until it has a success, so the next failure ejects it again, for twice as long.

Ranks of coupled groups are never ejected: they work on every step together, so none of them can be left out.
"""

from gateway.config.schema import Config
from gateway.core.columns import resize
from gateway.core.ranks import RankState, RankTable

_READY, _EJECTED = RankState.READY, RankState.EJECTED
_MAX_DOUBLINGS = 40


class Ejection:
    """Owns the column `failures`."""

    def __init__(self, config: Config, table: RankTable) -> None:
        self._table = table
        self._times = [0] * table.size
        self._until = [0.0] * table.size
        self._last_request: list[int | None] = [None] * table.size
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go by other settings, for as many ranks as the table has now."""
        self._settings = config.failure.eject
        self._is_coupled = [group.coupled for group in config.groups]
        size = self._table.size
        resize(self._times, size, int)
        resize(self._until, size, float)
        resize(self._last_request, size, lambda: None)

    @property
    def young_s(self) -> float:
        """A loss this soon after joining is a failure."""
        return self._settings.young_s if self._settings is not None else 0.0

    def fail(self, rank: int, request: int | None) -> bool:
        """Count a failure; False when it is one more of the same request, which may itself be the cause."""
        if request is not None and request == self._last_request[rank]:
            return False
        self._last_request[rank] = request
        self._table.failures[rank] += 1
        return True

    def clear(self, rank: int) -> None:
        """The rank has completed a request, or is another one now."""
        self._table.failures[rank] = self._times[rank] = 0
        self._last_request[rank] = None

    def is_due(self, rank: int) -> bool:
        """Whether a READY rank has failed often enough to be ejected."""
        settings, table = self._settings, self._table
        return (
            settings is not None
            and table.failures[rank] >= settings.after_failures
            and table.state[rank] is _READY
            and not self._is_coupled[table.group_of[rank]]
        )

    def has_room(self, rank: int) -> bool:
        """Whether its group can do without one more READY rank."""
        assert self._settings is not None
        states = self.states_with(rank)
        ejected = states.count(_EJECTED) + 1
        # 0.29 x 100 is a little below 29.
        return states.count(_READY) > 1 and ejected <= self._settings.max_ratio * len(states) + 1e-9

    def states_with(self, rank: int) -> list[RankState]:
        """The states of the rank's group."""
        table = self._table
        group = table.group_of[rank]
        return [state for state, number in zip(table.state, table.group_of, strict=True) if number == group]

    def begin(self, rank: int, now: float) -> float:
        """The rank is ejected; returns for how many seconds."""
        assert self._settings is not None
        doubled = self._settings.base_s * 2.0 ** min(self._times[rank], _MAX_DOUBLINGS)
        duration_s = min(doubled, self._settings.max_s)
        self._times[rank] += 1
        self._until[rank] = now + duration_s
        return duration_s

    def over(self, now: float) -> list[int]:
        """Ejected ranks whose time is up; all of them once ejection is switched off."""
        table, is_off = self._table, self._settings is None
        if _EJECTED not in table.state:
            return []
        return [
            rank for rank, state in enumerate(table.state) if state is _EJECTED and (is_off or now >= self._until[rank])
        ]

    def needed(self) -> list[int]:
        """Of each group that has no READY rank the ejected one that is back first."""
        table = self._table
        if _EJECTED not in table.state:
            return []
        first: dict[int, int] = {}
        for rank, state in enumerate(table.state):
            group = table.group_of[rank]
            if state is _EJECTED and (group not in first or self._until[rank] < self._until[first[group]]):
                first[group] = rank
        return [rank for rank in first.values() if _READY not in self.states_with(rank)]

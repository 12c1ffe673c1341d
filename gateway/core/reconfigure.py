"""Another configuration takes the place of the running one.

What is in flight, queued and charged stays what it is, and so does the state of every rank that goes on: each part is
told its new settings and keeps its books. Rank numbers never change. Ranks come and go at the end of the list only
(`gateway.config.changes` refuses all else): new ones are ABSENT until they dial; those that are left out get no more
work and keep their row until all of them have ended what they had.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import structs

from gateway.config.schema import Config
from gateway.core.effects import Effect
from gateway.core.fleet import Fleet
from gateway.core.parts import Parts
from gateway.core.predictor import Predictor
from gateway.core.presets import resolve
from gateway.core.rank_rows import adopt
from gateway.core.ranks import TRANSITIONS, RankState
from gateway.core.request import Request

REMOVED = "removed from the configuration"
KEPT = "in the configuration again"


class Configurable(Protocol):
    """A part of the router that can change its settings while it works."""

    def configure(self, config: Config) -> None:
        """Go by these settings, for as many ranks as the table has now."""
        ...


def count_ranks(config: Config) -> int:
    """How many ranks a configuration has."""
    return sum(group.ranks for group in config.groups)


def with_leaving_ranks(config: Config, before: Config) -> Config:
    """`config`, and the ranks of `before` that it leaves out, with the numbers that they had.

    Those of a group that is left out as a whole are nothing that readiness waits for.
    """
    groups = list(config.groups)
    for number, old in enumerate(before.groups):
        if number >= len(groups):
            groups.append(structs.replace(old, min_ready=0))
        elif old.ranks > groups[number].ranks:
            groups[number] = structs.replace(groups[number], ranks=old.ranks)
    return structs.replace(config, groups=tuple(groups))


class Reconfiguration:
    """Swaps settings in one step, and follows the ranks that leave.

    `layout` is the configuration in force with the ranks that are still leaving: what the rank table's rows are.
    """

    def __init__(self, config: Config, parts: Parts, fleet: Fleet, others: Sequence[Configurable]) -> None:
        self.layout = config
        self._wanted = config
        self._parts = parts
        self._fleet = fleet
        self._configurable: tuple[Configurable, ...] = (
            parts.policy,
            parts.predictor,
            parts.load,
            parts.attempts,
            *others,
            fleet,
        )
        self._leaving: dict[int, bool] = {}
        """Ranks that are left out and not gone yet, and whether that is why they drain."""
        self._gone: set[int] = set()
        """Ranks that are gone, but have a row until those behind or before them are gone too."""

    def apply(self, config: Config, live: Iterable[Request], now: float, effects: list[Effect]) -> None:
        """Put another configuration into force. Raises ValueError for formulas that can't be used; nothing is changed then."""
        resolve(config.policy)
        Predictor(config.predictor)
        self._wanted = config
        self._lay_out(with_leaving_ranks(config, self.layout))
        self._parts.admission.configure(config, live)
        count = count_ranks(config)
        self._gone = {rank for rank in self._gone if rank >= count}
        for rank in [rank for rank in self._leaving if rank < count]:
            if self._leaving.pop(rank) and self._parts.ranks.state[rank] is RankState.DRAINING:
                self._fleet.bring_back(rank, KEPT, now, effects)
        self.step(now, effects)

    def step(self, now: float, effects: list[Effect]) -> None:
        """Let ranks go that have ended what they had; their rows go once that is true of all of them."""
        table, first = self._parts.ranks, count_ranks(self._wanted)
        for rank in range(first, table.size):
            if rank in self._gone and table.state[rank] is RankState.ABSENT:
                continue
            self._gone.discard(rank)
            may_serve = "drained" in TRANSITIONS[table.state[rank]]
            if may_serve:
                self._fleet.take_out(rank, REMOVED, now, effects)
            self._leaving[rank] = may_serve or self._leaving.get(rank, False)
            if not table.in_flight[rank]:
                del self._leaving[rank]
                self._gone.add(rank)
                self._fleet.remove(rank, now, effects)
        if self._gone and not self._leaving:
            self._gone.clear()
            self._lay_out(self._wanted)

    def check(self) -> None:
        """Assert that the rows are those of the layout; for tests."""
        table, first = self._parts.ranks, count_ranks(self._wanted)
        assert table.size == count_ranks(self.layout)
        assert sorted((*self._leaving, *self._gone)) == list(range(first, table.size))
        lengths = {len(column) for column in vars(table).values() if isinstance(column, list)}
        assert lengths <= {table.size, len(self.layout.groups)}

    def _lay_out(self, layout: Config) -> None:
        adopt(self._parts.ranks, layout)
        self._parts.counters.resize(self._parts.ranks.size)
        for part in self._configurable:
            part.configure(layout)
        self.layout = layout

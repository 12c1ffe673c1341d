"""Waves of lockstep groups: vLLM ranks that step together go to sleep together, and must be woken together.

A wave is what lies between waking and sleeping; its number is known to every rank. A rank that is given a request while
its group sleeps can't step alone, so all of them are told to start (`StartWave`). Rules:

* A wave is started only while the group is known to sleep, and with the number after the one that ended; so the
  numbers only grow. A start that came while a wave is ending would reach some ranks before they sleep and others after:
  those would wait for the rest for ever. No rank is left out of it, since one that has woken for a request may
  have gone back to sleep.
* Every request carries the number. A rank that sleeps already when it comes sees an old one, wakes by itself and says so
  (`start`): the others are told to follow. That closes the race of a request with the end of a wave, and makes up for
  a lost `complete` and for a gateway that was restarted and counts from 0.
"""

from collections.abc import Sequence

from msgspec import structs

from gateway.config.schema import Config
from gateway.core.counters import Counters
from gateway.core.effects import Dispatch, Effect, ProbeRank, StartWave
from gateway.core.events import Event, RankJoined, WaveReported
from gateway.core.ranks import SERVING, RankTable

MAX_WAVE = 1 << 31
"""No group gets there by counting; believing such a number would leave none to go on with."""


class Waves:
    """The waves of all lockstep groups."""

    def __init__(self, config: Config, table: RankTable, counters: Counters) -> None:
        self._table = table
        self._counters = counters
        self._wave: dict[int, int] = {}
        self._is_running: dict[int, bool] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go by the groups of this configuration; those that stay keep their waves."""
        groups = [number for number, group in enumerate(config.groups) if group.has_waves]
        self._wave = {number: self._wave.get(number, 0) for number in groups}
        self._is_running = {number: self._is_running.get(number, False) for number in groups}
        self.count = len(groups)
        """How many such groups there are; without any, nothing has to be looked at."""

    def follow(self, event: Event, effects: list[Effect]) -> None:
        """Add what the waves need to what came of an event."""
        if isinstance(event, RankJoined):
            self._join(event, effects)
        self._stamp(effects)

    def _join(self, event: RankJoined, effects: list[Effect]) -> None:
        """A rank is there (again). With the first one of its group everything begins anew."""
        table = self._table
        if event.rank >= table.size or table.incarnation[event.rank] != event.incarnation:
            return  # configured no more, or replaced already
        group = table.group_of[event.rank]
        if group not in self._wave:
            return
        states = table.state
        if [rank for rank in self._ranks_of(group) if states[rank] in SERVING] == [event.rank]:
            self._wave[group], self._is_running[group] = 0, False
        elif self._is_running[group]:
            effects.append(StartWave((event.rank,), self._wave[group]))

    def reported(self, event: WaveReported, effects: list[Effect]) -> None:
        """What a rank says about its wave."""
        group = self._table.group_of[event.rank]
        wave = self._wave.get(group)
        if wave is None:
            return
        if event.complete is not None and wave <= event.complete < MAX_WAVE:
            self._wave[group], self._is_running[group] = event.complete + 1, False
        start = event.start
        if (
            start is None
            or not self._wave[group] <= start < MAX_WAVE
            or (start == self._wave[group] and self._is_running[group])
        ):
            return
        self._start(group, start, effects)

    def _stamp(self, effects: list[Effect]) -> None:
        """Give what is about to be sent its wave, and start that wave where its group sleeps."""
        for position, effect in enumerate(effects[:]):
            if not isinstance(effect, Dispatch | ProbeRank) or effect.rank >= self._table.size:
                continue  # nothing that steps, or to a rank that this very event has removed
            group = self._table.group_of[effect.rank]
            wave = self._wave.get(group)
            if wave is None:
                continue
            effects[position] = structs.replace(effect, request=structs.replace(effect.request, current_wave=wave))
            if not self._is_running[group]:
                self._start(group, wave, effects)

    def _start(self, group: int, wave: int, effects: list[Effect]) -> None:
        self._wave[group], self._is_running[group] = wave, True
        self._counters.wave_starts += 1
        effects.append(StartWave(self._ranks_of(group), wave))

    def _ranks_of(self, group: int) -> Sequence[int]:
        return [rank for rank, number in enumerate(self._table.group_of) if number == group]

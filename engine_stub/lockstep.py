"""Ranks that step together, as vLLM's do for a mixture of experts: waves, and the barrier at the end of each step.

A step of one rank is a step of all: whoever has nothing to compute takes part all the same, and waits for the others at
the end. When no rank has work left they go to sleep together; the wave is over. The rules of waking are vLLM 0.32's:

* START_DP_WAVE wakes a rank unless the wave is below its own current one;
* a request with a later wave moves the rank's own on; one with an earlier wave wakes a rank that sleeps, which says so;
* the group's first rank says when it has begun a wave and when one is over.

A rank looks at its inputs between two steps only. One that is dead is waited for for ever.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine_stub.wire.codec import Wave


class WaveState:
    """What one rank knows of waves. Pure."""

    def __init__(self) -> None:
        self.current = 0
        self.is_running = False
        self.step = 0

    def start(self, wave: Wave, index: int) -> None:
        """START_DP_WAVE arrived."""
        if wave.exclude != index and wave.wave >= self.current:
            self.current = wave.wave
            self.is_running = True

    def add(self, wave: int) -> int | None:
        """A request arrived; returns the wave to report when the rank wakes for it by itself."""
        if wave > self.current:
            self.current = wave
        elif wave < self.current and not self.is_running:
            self.is_running = True
            return self.current
        return None

    def end_step(self, *, is_unfinished: bool) -> int | None:
        """All ranks are through with a step; returns the number of the wave that is over, if it is."""
        self.step += 1
        self.is_running = is_unfinished
        if is_unfinished:
            return None
        over = self.current
        self.current += 1
        self.step = 0
        return over


class Member(Protocol):
    """One rank at the barrier."""

    def commit(self) -> bool:
        """Store the step and send what came of it; whether the rank has work left."""
        ...

    def go_on(self, *, is_unfinished: bool) -> None:
        """The others are through as well; `is_unfinished`: somebody has work left."""
        ...


class Barrier:
    """Where the ranks of one group wait for each other."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: dict[int, Member] = {}

    def arrive(self, number: int, member: Member) -> None:
        """A rank has computed its part of a step. The last one to come lets all of them through."""
        self._arrived[number] = member
        if len(self._arrived) < self._size:
            return
        members = [self._arrived[position] for position in sorted(self._arrived)]
        self._arrived = {}
        unfinished = [each.commit() for each in members]
        for each in members:
            each.go_on(is_unfinished=any(unfinished))

    def leave(self, number: int) -> None:
        """A rank died: a step that it had a part in never ends."""
        self._arrived.pop(number, None)


Say = Callable[[int | None, int | None], None]
"""Tell the coordinator (complete, start)."""


class LockstepRank:
    """One incarnation's part in its group. `number` counts within the group, `index` is the engine's."""

    def __init__(self, barrier: Barrier, number: int, index: int, say: Say) -> None:
        self.state = WaveState()
        self._barrier = barrier
        self._number = number
        self._index = index
        self._say = say
        self._was_running = False

    def take_up(self, inputs: Sequence[Wave | int]) -> None:
        """Look at what arrived since the last step: starts of waves, and the waves of requests."""
        self._was_running = self.state.is_running
        for each in inputs:
            if isinstance(each, Wave):
                self.state.start(each, self._index)
            elif (wave := self.state.add(each)) is not None:
                self._say(None, wave)

    def arrive(self, member: Member) -> None:
        """Wait for the others."""
        self._barrier.arrive(self._number, member)

    def end_step(self, *, is_unfinished: bool) -> None:
        """The step is over for all ranks."""
        over = self.state.end_step(is_unfinished=is_unfinished)
        if self._number:
            return
        if over is not None:
            self._say(over, None)
        elif not self._was_running:
            self._say(None, self.state.current)

    def leave(self) -> None:
        """The rank is gone."""
        self._barrier.leave(self._number)

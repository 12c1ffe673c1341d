"""One registered incarnation: its data sockets, and the engine stepping on a timer.

A step's modelled time passes between `begin` and `finish`; an engine that lags catches up, so that the
mean pace is the modelled one. An idle engine is silent. All of it runs in callbacks of one loop.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

from engine_stub.coordination import Coordination
from engine_stub.dial import Dialled
from engine_stub.emitting import Addressed
from engine_stub.engine import Fate, RankEngine
from engine_stub.faults import Faults
from engine_stub.lockstep import Barrier, LockstepRank
from engine_stub.sockets import FrameReader, Frames, FrameSender
from engine_stub.watch import ConnectionWatch
from engine_stub.wire.codec import SENTINEL
from engine_stub.wire.vllm import VllmCodec

MAX_CATCH_UP_S = 0.005
"""A lagging step starts at most this much before now."""
LAST_WORDS_LINGER_MS = 1000
"""How long output that was sent before a scripted death may take to leave."""


class Serving:
    """Runs one engine over its sockets until `close`. `on_change` is called after every input and step.

    `names` are what the log calls the rank.
    """

    def __init__(  # noqa: PLR0913 - all of it is of one incarnation
        self,
        engine: RankEngine,
        sockets: Dialled,
        *,
        time_scale: float,
        auto_step: bool,
        index: int,
        names: Mapping[str, int],
        barrier: tuple[Barrier, int] | None,
        on_change: Callable[[], None],
        on_death: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._sockets = sockets
        self._time_scale = time_scale
        self._auto_step = auto_step
        self._on_change = on_change
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._coordination: Coordination | None = None
        if sockets.coordinator is not None:
            codec = engine.codec
            assert isinstance(codec, VllmCodec)  # the dialler takes no coordinator for others
            self._coordination = Coordination(sockets.coordinator, index, codec.report, self._on_frames)
        self._lockstep: LockstepRank | None = None
        if barrier is not None:
            self._lockstep = LockstepRank(*barrier, index, self._say)
        self._watch = ConnectionWatch(sockets.inputs, names)
        engine.clients = 1 + len(sockets.others)
        inputs = [sockets.inputs, *(each for each, _ in sockets.others)]
        outputs = [sockets.outputs, *(each for _, each in sockets.others)]
        self._readers = [FrameReader(each, self._on_frames) for each in inputs]
        self._senders = [FrameSender(each, self._wake) for each in outputs]
        self._is_open = True
        self._is_deaf = False
        self._is_woken = False
        self._is_stepping = False
        self._is_idle_step = False
        self._is_held = False
        self._deadline: float | None = None
        self._step_timer: asyncio.Handle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def apply(self, faults: Faults) -> None:
        """Put faults into effect: stalls begin or end here, the others are looked up where they act."""
        self._engine.faults = faults
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if faults.stall_s is not None:
            self._stall_timer = self._loop.call_later(faults.stall_s, self._end_timed_stall)
        self._stall_or_go_on()

    def step(self) -> bool:
        """Read what has arrived and run one step without its modelled time; whether there was one.

        Without work the report that is owed, if any, is sent.
        """
        for reader in self._readers:
            reader.drain()
        if self._coordination is not None:
            self._coordination.drain()
        if not self._is_open or self._is_stalled or self._has_died():
            return False
        if self._lockstep is not None:
            return self._step_together(self._lockstep)
        has_work = self._engine.begin() is not None
        if self._engine.fate is Fate.DEAD:
            self._die(with_sentinel=True)
            return False
        now = time.monotonic()
        self.send(self._engine.finish(now) if has_work else self._engine.run_dry(now))
        self._report()
        self._on_change()
        return has_work

    def commit(self) -> bool:
        """See `lockstep.Member`."""
        now = time.monotonic()
        self.send(self._engine.run_dry(now) if self._is_idle_step else self._engine.finish(now))
        self._report()
        self._on_change()
        return self._engine.is_unfinished

    def go_on(self, *, is_unfinished: bool) -> None:
        """See `lockstep.Member`."""
        assert self._lockstep is not None
        self._is_stepping = False
        self._lockstep.end_step(is_unfinished=is_unfinished)
        self._wake()

    def send(self, messages: list[Frames]) -> None:
        """Send messages on the output socket; a mute rank sends nothing."""
        if self._is_open and self._engine.fate is not Fate.MUTE:
            for frames in messages:
                if frames == [SENTINEL]:
                    for sender in self._senders:
                        sender.send(frames)
                else:
                    self._senders[frames.client if isinstance(frames, Addressed) else 0].send(frames)

    def close(self, linger_ms: int) -> None:
        """Close the sockets; output that was handed to libzmq gets `linger_ms` to leave. Idempotent."""
        self._is_open = False
        for timer in (self._step_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        for reader in self._readers:
            reader.stop()
        for sender in self._senders:
            sender.stop()
        if self._lockstep is not None:
            self._lockstep.leave()
        if self._coordination is not None:
            self._coordination.close(linger_ms)
        self._watch.close()
        for inputs, outputs in ((self._sockets.inputs, self._sockets.outputs), *self._sockets.others):
            inputs.close(linger=0)
            outputs.close(linger=linger_ms)

    # Inside.

    @property
    def _is_stalled(self) -> bool:
        return self._engine.faults.stall or self._stall_timer is not None

    def _end_timed_stall(self) -> None:
        self._stall_timer = None
        self._stall_or_go_on()

    def _stall_or_go_on(self) -> None:
        if self._is_stalled:
            for reader in self._readers:
                reader.stop()
            if self._coordination is not None:
                self._coordination.stop()
            return
        if not self._is_deaf:
            for reader in self._readers:
                reader.start()
            if self._coordination is not None:
                self._coordination.start()
        if self._is_held:
            self._is_held = False
            self._finish()
        else:
            self._wake()

    def _on_frames(self, frames: Frames) -> None:
        self.send(self._engine.receive(frames, time.monotonic()))
        if self._engine.fate is Fate.DEAD:
            self._die(with_sentinel=True)
            return
        if self._engine.fate is Fate.DEAF:
            self._is_deaf = True
            for reader in self._readers:
                reader.stop()
            if self._coordination is not None:
                self._coordination.stop()
            self._watch.close()
            for inputs in (self._sockets.inputs, *(each for each, _ in self._sockets.others)):
                inputs.close(linger=0)
        self._wake()
        self._on_change()

    def _wake(self) -> None:
        """Look for work once the callbacks at hand are done, so that a burst shares its first step."""
        if self._auto_step and not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._begin_woken)

    def _begin_woken(self) -> None:
        self._is_woken = False
        self._begin()

    def _begin(self) -> None:
        if (
            not self._is_open
            or self._is_stepping
            or self._is_stalled
            or any(sender.is_blocked for sender in self._senders)
        ):
            return
        if self._has_died():
            return
        duration_ms = self._take_part()
        now = time.monotonic()
        if self._engine.fate is Fate.DEAD:
            self._die(with_sentinel=True)
        elif duration_ms is None:
            self._deadline = None
            self.send(self._engine.run_dry(now))
            self._report()
            self._on_change()
        else:
            self._is_stepping = True
            start = now if self._deadline is None else max(self._deadline, now - MAX_CATCH_UP_S)
            self._deadline = start + duration_ms * self._time_scale / 1e3
            delay = self._deadline - now
            finish = self._finish
            self._step_timer = self._loop.call_later(delay, finish) if delay > 0 else self._loop.call_soon(finish)

    def _finish(self) -> None:
        if self._is_stalled:
            self._is_held = True
            return
        if self._lockstep is not None:
            self._lockstep.arrive(self)
            return
        self._is_stepping = False
        self.send(self._engine.finish(time.monotonic()))
        self._report()
        self._on_change()
        self._begin()

    def _take_part(self) -> float | None:
        """Begin a step; its duration in ms, or None when there is none. Ranks in lockstep step with those that have work."""
        if self._lockstep is not None:
            self._lockstep.take_up(self._engine.take_waves())
        duration_ms = self._engine.begin()
        self._report()
        self._is_idle_step = duration_ms is None
        if self._is_idle_step and self._lockstep is not None and self._lockstep.state.is_running:
            return 0.0
        return duration_ms

    def _step_together(self, lockstep: LockstepRank) -> bool:
        """By hand: come to the barrier, unless the rank waits there already; whether it does."""
        if not self._is_stepping:
            if self._take_part() is None:
                self.send(self._engine.run_dry(time.monotonic()))
                return False
            self._is_stepping = True
            lockstep.arrive(self)
        return True

    def _report(self) -> None:
        """Tell the coordinator what has changed."""
        load = self._engine.load_now
        if self._coordination is not None and load is not None and self._engine.fate is not Fate.MUTE:
            wave, step = (self._lockstep.state.current, self._lockstep.state.step) if self._lockstep else (0, 0)
            self._coordination.report(load, wave, step)

    def _say(self, complete: int | None, start: int | None) -> None:
        if self._coordination is not None:
            self._coordination.say(complete, start)

    def _has_died(self) -> bool:
        """Carry out the scripted death when it is due."""
        is_due = self._engine.is_dying
        if is_due:
            self._die(with_sentinel=self._engine.faults.die_with_sentinel)
        return is_due

    def _die(self, *, with_sentinel: bool) -> None:
        if with_sentinel:
            self.send([[SENTINEL]])
        self.close(LAST_WORDS_LINGER_MS)
        self._on_death()

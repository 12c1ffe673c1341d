"""What has to look at the clock, all on one timer, as a wake-up of a core that slept costs more than most of what it is for.

While there is work it ticks every `INTERVAL_S`, or a little earlier behind output that has just left: the core is awake
then, and the timer need not fire at all. While nothing is under way it ticks every `REST_S`.
"""

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.05
EARLY_S = 0.03
"""Behind output a tick comes after so long."""
REST_S = 0.25
# So jobs are called up to so much before their time.
_SLACK_S = INTERVAL_S - EARLY_S + 0.001


class _Job:
    __slots__ = ("call", "due_at", "interval_s")

    def __init__(self, interval_s: float, call: Callable[[], None]) -> None:
        self.interval_s = interval_s
        self.call = call
        self.due_at = 0.0


class Ticks:
    """Calls jobs, those that were added first before the others. Times in seconds of `clock`.

    `is_resting` says that nothing is under way; whoever begins something calls `wake` when `rests` is set.
    """

    def __init__(
        self, clock: Callable[[], float], is_resting: Callable[[], bool], on_defect: Callable[[Exception], None]
    ) -> None:
        self._clock = clock
        self._is_resting = is_resting
        self._on_defect = on_defect
        self._jobs: list[_Job] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.TimerHandle | None = None
        self._early_at = 0.0
        self.rests = False

    def every(self, interval_s: float, call: Callable[[], None]) -> None:
        """Call it with the first tick, and then about every `interval_s`, which is at least that of ticks; for good."""
        self._jobs.append(_Job(interval_s, call))

    def start(self) -> None:
        """Tick from now on, in the running loop, until `stop`."""
        self._loop = loop = asyncio.get_running_loop()
        self._early_at = self._clock() + EARLY_S
        self._next = loop.call_later(INTERVAL_S, self._tick)

    def stop(self) -> None:
        """Tick no more. Idempotent."""
        if self._next is not None:
            self._next.cancel()
        self._loop = self._next = None
        self.rests = False

    def worked(self) -> None:
        """Output has just left."""
        if self._next is not None and self._clock() >= self._early_at:
            self._next.cancel()
            self._tick()

    def wake(self) -> None:
        """Something begins: ticks come as they do while there is work."""
        if self._loop is not None and self._next is not None:
            self.rests = False
            self._next.cancel()
            self._next = self._loop.call_later(INTERVAL_S, self._tick)
            self._early_at = self._clock() + EARLY_S

    def _tick(self) -> None:
        now = self._clock()
        try:
            for job in self._jobs:
                if now >= job.due_at - _SLACK_S:
                    job.due_at = now + job.interval_s
                    self._call(job)
        finally:
            if self._loop is not None:
                self.rests = self._is_resting()
                self._early_at = now + EARLY_S
                if self._next is not None:
                    self._next.cancel()  # a job may have begun something
                self._next = self._loop.call_later(REST_S if self.rests else INTERVAL_S, self._tick)

    def _call(self, job: _Job) -> None:
        try:
            job.call()
        except Exception as error:  # noqa: BLE001 - without ticks no deadline would ever pass again
            self._on_defect(error)

"""Deadlines of calls, looked at once per interval all together, so that a call costs no timer; and none runs without calls."""

import asyncio
from typing import Protocol

INTERVAL_S = 0.1


class Timed(Protocol):
    """A call with a deadline."""

    def expire(self) -> None:
        """The deadline has passed."""
        ...


class Deadlines:
    """Calls by the interval that their deadline falls into. Times in seconds of the loop's clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._intervals: dict[int, set[Timed]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Timed, deadline_at: float) -> int:
        """Remember a call. Returns the number of its interval, to remove it with."""
        number = int(deadline_at / INTERVAL_S) + 1
        calls = self._intervals.get(number)
        if calls is None:
            self._intervals[number] = {call}
        else:
            calls.add(call)
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL_S, self._on_time)
        return number

    def remove(self, call: Timed, number: int) -> None:
        """The call has ended."""
        calls = self._intervals.get(number)
        if calls is not None:
            calls.discard(call)
            if not calls:
                del self._intervals[number]

    def expire(self, now: float) -> None:
        """End the calls whose deadline has passed, up to two intervals late and never early."""
        last = int(now / INTERVAL_S)
        for number in [number for number in self._intervals if number <= last]:
            calls = self._intervals.get(number)
            # One that fails leaves the others to the next time; one may end another.
            while calls:
                calls.pop().expire()
            self._intervals.pop(number, None)

    def close(self) -> None:
        """Nobody's deadline matters any more."""
        self._intervals.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _on_time(self) -> None:
        self._timer = None
        try:
            self.expire(self._loop.time())
        finally:
            if self._intervals and self._timer is None:
                self._timer = self._loop.call_later(INTERVAL_S, self._on_time)

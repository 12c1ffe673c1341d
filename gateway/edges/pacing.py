"""Which tokens wait for others of their sequence: `listen.stream_interval_tokens` and `listen.max_flush_delay_ms`.

A sequence's first tokens never wait, nor do its last ones: they leave with the finish, or before the end of a request that
has none. What waits is in the outbox, and not because of its reader.
"""

import asyncio
from collections.abc import Callable

from gateway.core.request import Request, Sequence

Leaving = list[Sequence | Request]


class Pacing:
    """Holds sequences back, each for no longer than the delay. One timer, for the one that has waited longest."""

    def __init__(
        self,
        interval_tokens: int,
        max_delay_s: float,
        loop_of: Callable[[], asyncio.AbstractEventLoop],
        leave: Callable[[Leaving], None],
    ) -> None:
        self._interval_tokens = interval_tokens
        self._max_delay_s = max_delay_s
        self._loop_of = loop_of
        self._leave = leave
        # Until when. All wait for the same time, so the first has waited longest.
        self._held: dict[Sequence, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def select(self, items: Leaving) -> Leaving:
        """What of the output that may leave does so now, in order; before a request's end everything of it."""
        leaving: Leaving = []
        for item in items:
            if isinstance(item, Request):
                for sequence in item.sequences:
                    self._take(sequence, leaving)
                leaving.append(item)
            elif not self._hold(item):
                self._held.pop(item, None)
                leaving.append(item)
        return leaving

    def release(self) -> None:
        """Nothing waits any more."""
        leaving: Leaving = []
        for sequence in tuple(self._held):
            self._take(sequence, leaving)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._leave(leaving)

    def _hold(self, sequence: Sequence) -> bool:
        """Whether the sequence's tokens wait for more of them."""
        waiting = sequence.backlog_tokens
        if sequence.finish or waiting >= self._interval_tokens or waiting == sequence.completion_tokens:
            return False
        loop = self._loop_of()
        due_at = self._held.get(sequence)
        if due_at is None:
            due_at = self._held[sequence] = loop.time() + self._max_delay_s
            if self._timer is None:
                self._timer = loop.call_at(due_at, self._on_time)
        elif due_at <= loop.time():
            return False
        sequence.put_back()
        return True

    def _take(self, sequence: Sequence, leaving: Leaving) -> None:
        """A sequence that is held leaves."""
        if self._held.pop(sequence, None) is not None and not sequence.is_dirty:
            sequence.is_dirty = True
            leaving.append(sequence)

    def _on_time(self) -> None:
        """Let out whose time is up, and wait for the next one's."""
        self._timer = None
        loop = self._loop_of()
        now, leaving = loop.time(), Leaving()
        for sequence, due_at in tuple(self._held.items()):
            if due_at > now:
                self._timer = loop.call_at(due_at, self._on_time)
                break
            if not sequence.is_dirty:  # else it is among what leaves next
                self._take(sequence, leaving)
        self._leave(leaving)

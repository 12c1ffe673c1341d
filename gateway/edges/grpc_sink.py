"""What the driver flushes into, and a handler takes from when its transport is ready for the next message.

Output and ends are passed on in the order in which the driver brought them. A flush only notes that a sequence has
something: whatever arrives during a slow write leaves as one message, and a reader that stands still keeps its tokens in
the outbox, where the core counts them against `limits.max_stream_buffer_bytes`.
"""

import asyncio
from collections import deque

from gateway.core.errors import Reason
from gateway.core.request import Request, Sequence


class StreamSink:
    """A `Sink` (see the driver) that remembers what is to be sent until a handler asks for it.

    After `close` it ignores everything: the handler is gone, and it must not keep its requests alive.
    """

    # Of a watched stream (see `Watchable`). Here, not per object: most streams end before any of these changes.
    writes = 0
    idle_since: float | None = None
    _waiter: asyncio.Future[None] | None = None
    _is_closed = False

    def __init__(self) -> None:
        # In order; a request stands for its end. Each sequence at most once: the core marks it dirty, and its mark
        # stays until its outbox is taken.
        self.pending: deque[Sequence | Request] = deque()

    def flush(self, sequence: Sequence) -> None:
        """The sequence has tokens or a finish to send."""
        if not self._is_closed:
            self.pending.append(sequence)
            self.wake()

    def end(self, request: Request) -> None:
        """The request is over; what is pending still goes out, unless the reader was too slow for it."""
        if self._is_closed:
            request.answered()  # nobody else will
            return
        if request.error is not None and request.error.reason is Reason.SLOW_READER:
            others = [item for item in self.pending if isinstance(item, Request) or item.request is not request]
            self.pending.clear()
            self.pending.extend(others)
        self.pending.append(request)
        self.wake()

    def wake(self) -> None:
        """Make a handler in `wait` look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Return at the next `wake`. For the one handler of this sink."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def mark(self, *, is_under_way: bool) -> None:
        """A write begins or ends. Saying so twice makes no difference, or a stream would seem to stand still for good."""
        if self.writes % 2 != is_under_way:
            self.writes += 1

    def close(self) -> None:
        """Let go of everything."""
        self._is_closed = True
        self.pending.clear()

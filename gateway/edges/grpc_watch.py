"""Ends streams that stand still: a write that the client does not take, or a shared stream with nothing to do.

The gRPC library tells a writer nothing while the other end reads nothing, and a client that forgets a stream does not
cancel it. So what is open is looked at every second or so. A stream is asked for two plain attributes, and the data
path pays for keeping them only.
"""

import asyncio
from collections.abc import Callable

from gateway.config.limits import Limits
from gateway.edges.grpc_context import Watchable

_LONGEST_INTERVAL_S = 1.0
_LOOKS = 4


class StreamWatch:
    """The streams that are open. One task, however many there are."""

    def __init__(self, limits: Limits, hits: dict[str, int], clock: Callable[[], float]) -> None:
        self.configure(limits)
        self._hits = hits
        self._clock = clock
        # What each had written when it was last seen to move, and when that was. Most end before they are looked at.
        self._seen: dict[Watchable, tuple[int, float]] = {}

    def configure(self, limits: Limits) -> None:
        """Go by these time-outs from the next look on."""
        self._stall_s = limits.reader_stall_timeout_s
        self._idle_s = limits.idle_stream_timeout_s

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def interval_s(self) -> float:
        """How often to look: each time-out is kept to within a quarter of it."""
        bounds = [bound / _LOOKS for bound in (self._stall_s, self._idle_s) if bound is not None]
        return min((_LONGEST_INTERVAL_S, *bounds))

    def add(self, stream: Watchable) -> None:
        """Look after a stream from now on."""
        self._seen[stream] = (stream.writes, self._clock())

    def discard(self, stream: Watchable) -> None:
        """It has ended; one that is not looked after is left alone."""
        self._seen.pop(stream, None)

    async def run(self) -> None:
        """Look at the interval until cancelled."""
        while True:
            await asyncio.sleep(self.interval_s)
            self.look(self._clock())

    def look(self, now: float) -> None:
        """End what has stood still for too long. What is ended is not looked at again."""
        for stream, (writes, since) in list(self._seen.items()):
            idle_since = stream.idle_since
            if self._idle_s is not None and idle_since is not None and now - idle_since >= self._idle_s:
                self._end(stream, "idle_stream_timeout_s", stream.end_idle)
            elif writes != stream.writes:
                self._seen[stream] = (stream.writes, now)
            elif self._stall_s is not None and writes % 2 and now - since >= self._stall_s:
                self._end(stream, "reader_stall_timeout_s", stream.end_stalled)

    def _end(self, stream: Watchable, limit: str, end: Callable[[], None]) -> None:
        self._hits[limit] += 1
        self.discard(stream)
        end()

"""A vLLM rank's side of the coordinator: it hears of waves, and pushes its load whenever the counts have changed."""

import time
from collections.abc import Callable
from typing import NamedTuple

import zmq

from engine_stub.sockets import FrameReader, Frames, FrameSender
from engine_stub.wire.codec import Load

READY = b"READY"
SUBSCRIBE = b"\x01"


class CoordinatorSockets(NamedTuple):
    """Connected; the subscription has been answered."""

    waves: zmq.Socket[bytes]
    reports: zmq.Socket[bytes]


EncodeReport = Callable[..., bytes]
"""`(index, load, wave, step, complete, start, now)` to one message."""


class Coordination:
    """Of one incarnation. `on_frames` gets what the coordinator publishes."""

    def __init__(
        self, sockets: CoordinatorSockets, index: int, encode: EncodeReport, on_frames: Callable[[Frames], None]
    ) -> None:
        self._sockets = sockets
        self._index = index
        self._encode = encode
        self._on_frames = on_frames
        self._reader = FrameReader(sockets.waves, self._take)
        self._sender = FrameSender(sockets.reports, lambda: None)
        self._last: tuple[int, int] | None = (0, 0)
        self._is_open = True

    def start(self) -> None:
        """Listen (again)."""
        if self._is_open:
            self._reader.start()

    def stop(self) -> None:
        """Listen no more; what arrives waits."""
        self._reader.stop()

    def drain(self) -> None:
        """Handle what is there."""
        self._reader.drain()

    def report(self, load: Load, wave: int, step: int) -> None:
        """Push the load if the counts differ from those of the last push."""
        counts = (load.running, load.waiting)
        if counts != self._last:
            self._last = counts
            self._send(load, wave, step, None, None)

    def say(self, complete: int | None, start: int | None) -> None:
        """Push wave control."""
        self._send(None, 0, 0, complete, start)

    def close(self, linger_ms: int) -> None:
        """Close both sockets. Idempotent."""
        self._is_open = False
        self._reader.stop()
        self._sender.stop()
        self._sockets.waves.close(linger=0)
        self._sockets.reports.close(linger=linger_ms)

    def _take(self, frames: Frames) -> None:
        if frames != [READY]:  # a repeated answer is ignored
            self._on_frames(frames)

    def _send(self, load: Load | None, wave: int, step: int, complete: int | None, start: int | None) -> None:
        if self._is_open:
            self._sender.send([self._encode(self._index, load, wave, step, complete, start, time.monotonic())])

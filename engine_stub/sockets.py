"""ZMQ sockets on an asyncio loop: the socket's file descriptor and non-blocking calls, no task per message.

The descriptor is edge-triggered: after it fires, everything must be read before the next wait, and a
send on the same socket may swallow an edge. Hence `drain` until EAGAIN, and a safety tick.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import zmq

Frames = list[bytes]

SAFETY_TICK_S = 1.0
DRAIN_LIMIT = 512
"""Messages handled before other callbacks get their turn."""
RETRY_S = 0.001
"""How soon a refused send is tried again."""


class FrameReader:
    """Calls `on_frames` for every message of a socket while it runs."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[Frames], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = socket.FD
        self._is_running = False
        self._tick: asyncio.Handle | None = None

    def start(self) -> None:
        """Read from now on (again)."""
        if not self._is_running:
            self._is_running = True
            self._loop.add_reader(self._fd, self.drain)
            self._tick = self._loop.call_soon(self._safety_tick)

    def stop(self) -> None:
        """Read no more; what arrives stays in the socket. Call before the socket is closed."""
        if self._is_running:
            self._is_running = False
            self._loop.remove_reader(self._fd)
            if self._tick is not None:
                self._tick.cancel()
                self._tick = None

    def drain(self) -> None:
        """Handle what is there."""
        for _ in range(DRAIN_LIMIT):
            if not self._is_running:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)
        self._loop.call_soon(self.drain)

    def _safety_tick(self) -> None:
        if self._is_running:
            self.drain()
        if self._is_running:
            self._tick = self._loop.call_later(SAFETY_TICK_S, self._safety_tick)


class FrameSender:
    """Sends in order without blocking; what the socket refuses waits here, and `is_blocked` says so."""

    def __init__(self, socket: zmq.Socket[bytes], on_unblocked: Callable[[], None]) -> None:
        self._socket = socket
        self._on_unblocked = on_unblocked
        self._queue: deque[Frames] = deque()
        self._retry: asyncio.TimerHandle | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether the peer doesn't take more: a real engine's scheduler stands still meanwhile."""
        return bool(self._queue)

    def send(self, frames: Frames) -> None:
        """Send one message, or queue it behind those that wait."""
        if self._queue or not self._try(frames):
            self._queue.append(frames)
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._flush)

    def stop(self) -> None:
        """Forget what waits. Call before the socket is closed."""
        self._queue.clear()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _try(self, frames: Frames) -> bool:
        try:
            if len(frames) == 1:
                self._socket.send(frames[0], zmq.NOBLOCK)
            else:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _flush(self) -> None:
        self._retry = None
        while self._queue:
            if not self._try(self._queue[0]):
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._flush)
                return
            self._queue.popleft()
        self._on_unblocked()

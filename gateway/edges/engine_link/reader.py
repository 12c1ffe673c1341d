"""Reads a ZMQ socket from the event loop without a task and without `zmq.asyncio`.

A ZMQ socket's descriptor is edge-triggered: it becomes readable when the socket's mailbox stops being
empty, and any call on the socket may consume that edge. So: read until EAGAIN; look at EVENTS again
after every send (`poke`); and a slow tick looks at all sockets, in case an edge was lost.
One callback handles a bounded number of messages, so that one busy rank can't starve the loop.
"""

import asyncio
from collections.abc import Callable

import zmq

MAX_MESSAGES_PER_CALLBACK = 64

Socket = zmq.Socket[bytes]
OnMessage = Callable[[list[zmq.Frame]], None]


def receive(socket: Socket) -> list[zmq.Frame]:
    """All frames of the next message. Raises zmq.Again when there is none.

    Uncopied frames: `more` is then a plain attribute, and a big batch is decoded where it lies.
    """
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        frames.append(frame)
    return frames


class SocketReader:
    """Calls `on_message` for each message, `on_writable` when a send may succeed again.

    `on_writable` is only called while `wants_write` is set. Handlers may close the reader.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: Socket,
        on_message: OnMessage,
        on_writable: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._on_message = on_message
        self._on_writable = on_writable
        self._scheduled: asyncio.Handle | None = None
        self._closed = False
        self.wants_write = False
        self._fd = int(socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._run)
        self.poke()

    def poke(self) -> None:
        """Schedule a read if the socket has something that the descriptor may no longer announce."""
        if self._closed or self._scheduled is not None:
            return
        wanted = zmq.POLLIN | zmq.POLLOUT if self.wants_write else zmq.POLLIN
        if self.events() & wanted:
            self._schedule()

    def events(self) -> int:
        """What the socket is ready for now (POLLIN, POLLOUT); the descriptor may not announce it any more."""
        return int(self._socket.getsockopt(zmq.EVENTS))

    def drain(self, limit: int = MAX_MESSAGES_PER_CALLBACK) -> bool:
        """Handle up to `limit` messages; True when the socket is empty (or closed)."""
        for _ in range(limit):
            if self._closed:
                return True
            try:
                frames = receive(self._socket)
            except zmq.Again:
                return True
            self._on_message(frames)
        return False

    def close(self) -> None:
        """Stop reading. The caller closes the socket afterwards."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None

    def _schedule(self) -> None:
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._run)

    def _run(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._closed:
            return
        is_empty = False
        try:
            if self.wants_write and self._on_writable is not None:
                self._on_writable()
            is_empty = self.drain()
        finally:
            # Also after a handler's exception: the edge is gone, nobody else would call again.
            if not is_empty:
                self._schedule()

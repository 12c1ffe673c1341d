"""Reads a ZMQ socket from the event loop without a task and without `zmq.asyncio`.

A ZMQ socket's descriptor is edge-triggered: it becomes readable when the socket's mailbox stops being
empty, and any call on the socket may consume that edge. So: read until EAGAIN; look at EVENTS again
after every send (`poke`); and a slow tick looks at all sockets, in case an edge was lost.
One callback handles a bounded number of messages, so that one busy rank can't starve the loop.

Costs rule the details (µs each): the library's own `recv` and `send` spend more on flags that are enum members than on
the message, so the backend's are called, with plain integers; EAGAIN (6) is dearer than a look at EVENTS (2.5), and
that is dearer than a message (2), so EVENTS is looked at after the first message only.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.backend import Socket as _Backend

MAX_MESSAGES_PER_CALLBACK = 64
MAX_HELD_BYTES = 256 * 1024
"""Messages are read ahead of their handling up to here, and so handled before output leaves: some thousand rows, or one message."""
NOBLOCK = int(zmq.NOBLOCK)
_EVENTS, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
_recv: Callable[["Socket", int, bool], zmq.Frame] = _Backend.recv  # type: ignore[assignment]  # its overloads say Literal
_get: Callable[["Socket", int], Any] = _Backend.get

Socket = zmq.Socket[bytes]
OnMessage = Callable[[list[zmq.Frame]], None]


def receive(socket: Socket) -> list[zmq.Frame]:
    """All frames of the next message. Raises zmq.Again when there is none.

    Uncopied frames: `more` is then a plain attribute, and a big batch is decoded where it lies.
    """
    frame = _recv(socket, NOBLOCK, False)
    if not frame.more:
        return [frame]
    frames = [frame]
    while True:
        frame = _recv(socket, NOBLOCK, False)
        frames.append(frame)
        if not frame.more:
            return frames


def _ignore(_: list[zmq.Frame]) -> None:
    pass


class SocketReader:
    """Calls `on_message` for each message, `on_writable` when a send may succeed again.

    `on_writable` is only called while `wants_write` is set. `on_read` is called when messages were read, before the first
    of them is handled, and `on_handled` after the last. Handlers may close the reader.
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
        self.on_read: Callable[[], None] | None = None
        self.on_handled: Callable[[], None] | None = None
        # Read and not yet handled: more than none after a handler's exception only.
        self._held: deque[list[zmq.Frame]] = deque()
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
        wanted = _POLLIN | _POLLOUT if self.wants_write else _POLLIN
        if _get(self._socket, _EVENTS) & wanted:
            self._schedule()

    def has_message(self) -> bool:
        """Whether a message waits on the socket; the descriptor may not announce it any more."""
        return bool(_get(self._socket, _EVENTS) & _POLLIN)

    def drain(self, limit: int = MAX_MESSAGES_PER_CALLBACK) -> bool:
        """Handle up to `limit` messages; True when the socket is empty (or closed)."""
        held, on_handled = self._held, self.on_handled
        is_empty = self._read(limit - len(held))
        if held and self.on_read is not None:
            self.on_read()
        try:
            while held:
                self._on_message(held.popleft())
        finally:
            if on_handled is not None:
                on_handled()
        return is_empty

    def _read(self, limit: int) -> bool:
        """Read up to `limit` messages; True when there are no more."""
        if self._closed:
            return True
        socket, held = self._socket, self._held
        room_bytes = MAX_HELD_BYTES
        for number in range(limit):
            try:
                frame = _recv(socket, NOBLOCK, False)
            except zmq.Again:
                return True
            frames = [frame]
            if frame.more:
                frames += receive(socket)
            held.append(frames)
            if number == 0 and not _get(socket, _EVENTS) & _POLLIN:
                return True
            room_bytes -= len(frame)
            if room_bytes < 0:
                return False
        return False

    def close(self) -> None:
        """Stop reading. The caller closes the socket afterwards."""
        if self._closed:
            return
        self._closed = True
        self._held.clear()
        # Handlers mostly belong to who owns the reader: no cycle is left to the collector, which comes by once in hours.
        self._on_message = _ignore
        self._on_writable = self.on_read = self.on_handled = None
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

"""One bound socket with its reader, and the monitor that follows its connections."""

import asyncio
import itertools
import sys
from collections.abc import Callable, Mapping

import zmq

from gateway.edges.engine_link.connections import MONITORED, Change, Connections
from gateway.edges.engine_link.endpoints import remove_ipc_path
from gateway.edges.engine_link.reader import OnMessage, Socket, SocketReader

Context = zmq.Context[Socket]
Binder = Callable[[Socket], str]

SOCKETS_EACH = 3
"""What one of these costs of ZMQ_MAX_SOCKETS: itself, and the monitor's pair (one end is inside libzmq)."""

_monitor_numbers = itertools.count()


def _ignore(_: Change) -> None:
    pass


class MonitoredSocket:
    """Binds in the constructor (raises what `bind` raises, leaving nothing open); handlers run from the loop."""

    def __init__(
        self,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        *,
        kind: int,
        options: Mapping[int, int],
        bind: Binder,
        on_message: OnMessage,
        on_writable: Callable[[], None],
        on_change: Callable[[Change], None],
    ) -> None:
        self.connections = Connections()
        self._on_change = on_change
        self._closed = False
        self._monitor: Socket | None = None
        self.socket: Socket = context.socket(kind)
        try:
            for option, value in options.items():
                self.socket.setsockopt(option, value)
            # The monitor comes first: an engine that waits for a recorded address connects at once.
            self._monitor = self._open_monitor(context)
            self.address = bind(self.socket)
        except BaseException:
            self._close_sockets(0)
            raise
        self.reader = SocketReader(loop, self.socket, on_message, on_writable)
        self._monitor_reader = SocketReader(loop, self._monitor, self._on_event)

    def look(self) -> None:
        """Take note of every connection that was lost or established by now."""
        if self._monitor_reader.has_message():
            self._monitor_reader.drain()

    def poke(self, *, with_monitor: bool) -> None:
        """Look for what the descriptors may have failed to announce."""
        self.reader.poke()
        if with_monitor:
            self._monitor_reader.poke()

    def close(self, linger_ms: int = 0) -> None:
        """Stop reading and close; unsent messages get `linger_ms`."""
        if self._closed:
            return
        self._closed = True
        self.reader.close()
        self._monitor_reader.close()
        self._close_sockets(linger_ms)
        self._on_change = _ignore  # whose owner has this object
        remove_ipc_path(self.address)

    def _open_monitor(self, context: Context) -> Socket:
        address = f"inproc://rank-monitor-{next(_monitor_numbers)}"
        monitor: Socket = context.socket(zmq.PAIR)
        try:
            # Unbounded: a full monitor pipe would block libzmq's I/O thread, which means every rank.
            monitor.setsockopt(zmq.RCVHWM, 0)
            monitor.setsockopt(zmq.LINGER, 0)
            self.socket.monitor(address, MONITORED)
            monitor.connect(address)
        except BaseException:
            monitor.close()
            raise
        return monitor

    def _close_sockets(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        if self._monitor is not None:
            self._monitor.close()
        self.socket.close(linger_ms)

    def _on_event(self, frames: list[zmq.Frame]) -> None:
        # zmq_socket_monitor(3): the first frame is event (uint16) and value (int32) in host byte order.
        data = frames[0].bytes
        event = int.from_bytes(data[:2], sys.byteorder)
        value = int.from_bytes(data[2:6], sys.byteorder, signed=True)
        change = self.connections.feed(event, value)
        if change is not Change.NONE:
            self._on_change(change)

"""Says in the log when a rank's connection to its gateway was lost, and when libzmq has it back."""

import logging
from collections.abc import Mapping

import zmq
from zmq.utils.monitor import parse_monitor_message

from engine_stub.sockets import FrameReader, Frames

LOG = logging.getLogger("engine_stub")
_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
SOCKETS = 2
"""Both ends of what libzmq tells of the socket."""


class ConnectionWatch:
    """Of one rank's input socket. `names` go into its lines. To be closed before the socket."""

    def __init__(self, socket: zmq.Socket[bytes], names: Mapping[str, int]) -> None:
        self._socket = socket
        self._names = names
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._reader = FrameReader(self._monitor, self._take)
        self._reader.start()
        self._is_open = True
        self._is_lost = False

    def close(self) -> None:
        """Look no more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._reader.stop()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)

    def _take(self, frames: Frames) -> None:
        is_lost = parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED
        if is_lost and not self._is_lost:
            LOG.warning("connection_lost", extra=self._names)
        elif self._is_lost and not is_lost:
            LOG.info("connection_back", extra=self._names)
        self._is_lost = is_lost

"""Follows the connections of one bound socket by its monitor events. Pure.

Facts (libzmq 4.3.5, observed): HANDSHAKE_SUCCEEDED carries no descriptor, so connections are counted;
a peer that fails the greeting (a port scanner) gives HANDSHAKE_FAILED_* and then, from the same I/O
thread and with nothing between, its DISCONNECTED; the descriptor of a message's connection is known
(`ZMQ_SRCFD`), so a socket that took a message of its rank can tell the rank's connection from strays.
"""

from enum import Enum

import zmq

_FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
MONITORED = int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | _FAILED)
_SUCCEEDED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
_DISCONNECTED = int(zmq.Event.DISCONNECTED)


class Change(Enum):
    """What a monitor event means for the rank."""

    NONE = "none"
    UP = "up"
    DOWN = "down"


class Connections:
    """Counts established connections; `source_fd` is the rank's own when it is known.

    While it isn't, as many may end as there are besides the rank's (`surplus`) before a loss is the rank's.
    """

    def __init__(self) -> None:
        self.live = 0
        self.surplus = 0
        self.source_fd: int | None = None
        self._last_failed = False

    @property
    def is_up(self) -> bool:
        """Whether any peer is connected."""
        return self.live > 0

    def begin(self) -> None:
        """The rank joins with the connections that there are; which one is its own is to be learnt anew."""
        self.source_fd = None
        self.surplus = max(self.live - 1, 0)

    def feed(self, event: int, value: int) -> Change:
        """Apply one monitor event. A loss is the rank's unless another connection is known to be its own."""
        if event == _SUCCEEDED:
            self.live += 1
            return Change.UP
        if event & int(_FAILED):
            self._last_failed = True
            return Change.NONE
        if event != _DISCONNECTED:
            return Change.NONE
        was_established = not self._last_failed and self.live > 0
        self._last_failed = False
        if not was_established:
            return Change.NONE
        self.live -= 1
        is_other = self.surplus > 0 if self.source_fd is None else value != self.source_fd
        if is_other:
            self.surplus = max(self.surplus - 1, 0)
            return Change.NONE
        self.source_fd = None
        return Change.DOWN


def source_fd(frame: zmq.Frame) -> int | None:
    """The descriptor of the connection that a message came from, None if libzmq doesn't say."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None

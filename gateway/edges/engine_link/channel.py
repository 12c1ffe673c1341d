"""The private sockets of one rank incarnation: a ROUTER for its requests, a PULL for its batches.

The rank takes both addresses from its own INIT (wire 1.1), so whatever arrives here is this rank's,
whatever index it claims, and a connection lost here is this rank's.
"""

import asyncio
from typing import NamedTuple, Protocol

import zmq
from zmq.backend import Socket as _Backend

from gateway.edges.engine_link.connections import Change
from gateway.edges.engine_link.coordinator import SOCKETS_PER_COORDINATOR, Coordinator, CoordinatorOwner
from gateway.edges.engine_link.monitored import SOCKETS_EACH, Binder, Context, MonitoredSocket
from gateway.edges.engine_link.reader import NOBLOCK

SEND_HWM = 1000
HEARTBEAT_INTERVAL_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
HEARTBEAT_TTL_MS = 10_000
"""Travels with the heartbeats: an engine that hears nothing for so long after one drops the connection and dials again.

libzmq (4.3.5) forgets it when another message follows the heartbeat, so this doesn't find every half-open connection.
"""
MAX_REGISTRATION_BYTES = 1024 * 1024
MAX_BATCH_BYTES = 256 * 1024 * 1024
SOCKETS_PER_CHANNEL = 2 * SOCKETS_EACH + SOCKETS_PER_COORDINATOR
FDS_PER_CHANNEL = 16
"""Eight mailboxes, four listeners, four connections; without a coordinator ten in all."""

# A half-open TCP connection gives no event; heartbeats end it (and answer from libzmq's own thread,
# so a long engine step doesn't trip them). Engines set none themselves: without the time to live one whose connection
# only broke at this end would wait for ever for what nobody sends.
COMMON: dict[int, int] = {
    zmq.LINGER: 0,
    zmq.HEARTBEAT_IVL: HEARTBEAT_INTERVAL_MS,
    zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
    zmq.HEARTBEAT_TTL: HEARTBEAT_TTL_MS,
}
_INPUT: dict[int, int] = COMMON | {
    zmq.SNDHWM: SEND_HWM,
    zmq.ROUTER_MANDATORY: 1,
    zmq.ROUTER_HANDOVER: 1,
    zmq.MAXMSGSIZE: MAX_REGISTRATION_BYTES,
}
# An engine's scheduler blocks on a full PUSH: nothing on our side may fill up.
_OUTPUT: dict[int, int] = COMMON | {zmq.RCVHWM: 0, zmq.MAXMSGSIZE: MAX_BATCH_BYTES}

_MORE: int = NOBLOCK | int(zmq.SNDMORE)
_send = _Backend.send


class Addresses(NamedTuple):
    """Where the rank is to connect."""

    input: str
    output: str
    coordinator_input: str | None = None
    coordinator_output: str | None = None


class ChannelOwner(CoordinatorOwner, Protocol):
    """Who is told what happens on a channel. Called from the event loop, never from a constructor."""

    def on_input(self, frames: list[zmq.Frame]) -> None:
        """A message `[identity, payload…]` on the request socket."""
        ...

    def on_output_read(self) -> None:
        """Messages were read from the batch socket, which `on_output` will be given."""
        ...

    def on_output(self, frames: list[zmq.Frame]) -> None:
        """A message on the batch socket."""
        ...

    def on_writable(self) -> None:
        """A refused send may succeed now."""
        ...

    def on_up(self, *, is_output: bool) -> None:
        """A connection was established on one of the sockets."""
        ...

    def on_down(self, *, is_output: bool) -> None:
        """The rank's connection on one of the sockets was lost."""
        ...


class Channel:
    """Both sockets, bound; with the coordinator's, which it takes over. Raises what the binders raise."""

    def __init__(
        self,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        *,
        identity: bytes,
        bind_input: Binder,
        bind_output: Binder,
        owner: ChannelOwner,
        coordinator: Coordinator | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._identity = identity
        self._owner = owner
        self.input = MonitoredSocket(
            context,
            loop,
            kind=zmq.ROUTER,
            options=_INPUT,
            bind=bind_input,
            on_message=owner.on_input,
            on_writable=owner.on_writable,
            on_change=lambda change: self._on_change(change, is_output=False),
        )
        self._input_socket, self._input_reader = self.input.socket, self.input.reader
        try:
            self.output = MonitoredSocket(
                context,
                loop,
                kind=zmq.PULL,
                options=_OUTPUT,
                bind=bind_output,
                on_message=owner.on_output,
                on_writable=lambda: None,
                on_change=lambda change: self._on_change(change, is_output=True),
            )
            self.output.reader.on_read = owner.on_output_read
        except BaseException:
            self.input.close()
            raise

    @property
    def addresses(self) -> Addresses:
        """All addresses as bound."""
        own, coordinator = (self.input.address, self.output.address), self.coordinator
        if coordinator is None:
            return Addresses(*own)
        return Addresses(*own, coordinator.input_address, coordinator.output_address)

    @property
    def is_up(self) -> bool:
        """Whether both sockets have a connection."""
        return self.input.connections.is_up and self.output.connections.is_up

    def send(self, frames: list[bytes]) -> None:
        """Send without waiting. Raises zmq.Again when the pipe is full, zmq.ZMQError when the rank is not there."""
        socket = self._input_socket
        kind, payload = frames
        try:
            _send(socket, self._identity, _MORE)
            _send(socket, kind, _MORE)
            _send(socket, payload, NOBLOCK)
        finally:
            # A send may consume the edge that says that there is room. What a joined rank sends here is for nobody.
            if self._input_reader.wants_write:
                self._input_reader.poke()

    def learn_peers(self) -> None:
        """Let the ROUTER take note of new connections. A send may skip that, and would then refuse a known rank."""
        self.input.reader.poke()

    def set_wants_write(self, wants_write: bool) -> None:
        """Whether `on_writable` is to be called."""
        self.input.reader.wants_write = wants_write
        if wants_write:
            self.input.reader.poke()

    def poke(self, *, with_monitors: bool) -> None:
        """Look for what the descriptors may have failed to announce."""
        self.input.poke(with_monitor=with_monitors)
        self.output.poke(with_monitor=with_monitors)
        if self.coordinator is not None:
            self.coordinator.poke()

    def close(self, linger_ms: int = 0) -> None:
        """Close the sockets; unsent requests and aborts get `linger_ms`."""
        self.input.close(linger_ms)
        self.output.close()
        if self.coordinator is not None:
            self.coordinator.close()

    def _on_change(self, change: Change, *, is_output: bool) -> None:
        if change is Change.UP:
            self._owner.on_up(is_output=is_output)
        else:
            self._owner.on_down(is_output=is_output)

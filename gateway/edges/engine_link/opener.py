"""Opens the channels of one rank: on fresh addresses, or on those of an earlier process."""

from dataclasses import dataclass

from gateway.edges.engine_link.channel import COMMON, Addresses, Channel, ChannelOwner
from gateway.edges.engine_link.coordinator import Coordinator
from gateway.edges.engine_link.env import LinkEnv
from gateway.edges.engine_link.monitored import Binder
from gateway.edges.engine_link.reader import Socket
from gateway.wire.protocol import CoordinatorProtocol

Binders = tuple[Binder, Binder]


@dataclass(frozen=True, slots=True)
class ChannelOpener:
    """Both methods raise LinkError, and zmq.ZMQError when there are no more sockets or descriptors.

    `codec` is None where the group has no coordinator.
    """

    env: LinkEnv
    identity: bytes
    group_number: int
    index: int
    codec: CoordinatorProtocol | None

    def fresh(self, owner: ChannelOwner) -> Channel:
        """Private addresses that no incarnation had before."""
        binders = (self._bind_fresh, self._bind_fresh)
        coordinator = self._open_coordinator(owner, binders, is_released=False) if self.codec is not None else None
        return self._open(owner, binders, coordinator)

    def recorded(self, owner: ChannelOwner, addresses: Addresses, *, is_started: bool) -> Channel:
        """The addresses that a running engine reconnects to. What it was given counts, not what is configured now."""
        coordinator = None
        if addresses.coordinator_input is not None and addresses.coordinator_output is not None:
            binders = (
                self._bind_recorded(addresses.coordinator_input),
                self._bind_recorded(addresses.coordinator_output),
            )
            coordinator = self._open_coordinator(owner, binders, is_released=is_started)
        return self._open(
            owner, (self._bind_recorded(addresses.input), self._bind_recorded(addresses.output)), coordinator
        )

    def _open(self, owner: ChannelOwner, binders: Binders, coordinator: Coordinator | None) -> Channel:
        bind_input, bind_output = binders
        try:
            return Channel(
                self.env.context,
                self.env.loop,
                identity=self.identity,
                bind_input=bind_input,
                bind_output=bind_output,
                owner=owner,
                coordinator=coordinator,
            )
        except BaseException:
            if coordinator is not None:
                coordinator.close()
            raise

    def _open_coordinator(self, owner: ChannelOwner, binders: Binders, *, is_released: bool) -> Coordinator | None:
        if self.codec is None:
            return None
        return Coordinator(
            self.env.context,
            self.env.loop,
            codec=self.codec,
            options=COMMON,
            binders=binders,
            owner=owner,
            is_released=is_released,
        )

    def _bind_fresh(self, socket: Socket) -> str:
        return self.env.endpoints.bind_fresh(socket, self.group_number, self.index)

    def _bind_recorded(self, address: str) -> Binder:
        return lambda socket: self.env.endpoints.bind_recorded(socket, address)

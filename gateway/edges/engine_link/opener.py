"""Opens the channels of one rank: on fresh addresses, or on those of an earlier process."""

from dataclasses import dataclass

from gateway.edges.engine_link.channel import Channel, ChannelOwner
from gateway.edges.engine_link.env import LinkEnv
from gateway.edges.engine_link.monitored import Binder
from gateway.edges.engine_link.reader import Socket


@dataclass(frozen=True, slots=True)
class ChannelOpener:
    """Both methods raise LinkError, and zmq.ZMQError when there are no more sockets or descriptors."""

    env: LinkEnv
    identity: bytes
    group_number: int
    index: int

    def fresh(self, owner: ChannelOwner) -> Channel:
        """Private addresses that no incarnation had before."""
        return self._open(owner, self._bind_fresh, self._bind_fresh)

    def recorded(self, owner: ChannelOwner, input_address: str | None, output_address: str | None) -> Channel:
        """The addresses that a running engine reconnects to."""
        return self._open(owner, self._bind_recorded(input_address), self._bind_recorded(output_address))

    def _open(self, owner: ChannelOwner, bind_input: Binder, bind_output: Binder) -> Channel:
        return Channel(
            self.env.context,
            self.env.loop,
            identity=self.identity,
            bind_input=bind_input,
            bind_output=bind_output,
            owner=owner,
        )

    def _bind_fresh(self, socket: Socket) -> str:
        return self.env.endpoints.bind_fresh(socket, self.group_number, self.index)

    def _bind_recorded(self, address: str | None) -> Binder:
        assert address is not None
        return lambda socket: self.env.endpoints.bind_recorded(socket, address)

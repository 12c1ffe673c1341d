"""How a rank joins a gateway: HELLO, wait for INIT, connect and register.

TokenSpeed sends READY before it registers on the input socket, vLLM after. libzmq keeps dialling, so
the gateway may start later; and a gateway that comes back on the same data addresses is served on
without a new handshake, because the data sockets reconnect by themselves.
"""

import asyncio

import msgspec
import zmq

from engine_stub.coordination import READY, SUBSCRIBE, CoordinatorSockets
from engine_stub.faults import Faults
from engine_stub.sockets import FrameReader, Frames
from engine_stub.wire.codec import Codec, RankCard
from engine_stub.wire.handshake import Addresses, HandshakeError, decode_init

HANDSHAKE_LINGER_MS = 1000
"""READY is the handshake socket's last message; it must leave before the socket is gone."""


class Dialled(msgspec.Struct, frozen=True):
    """The two data sockets of a registered rank, and those to the coordinator if it was given one.

    `others` are the two of each further front end, in the order of their client indexes.
    """

    inputs: zmq.Socket[bytes]
    outputs: zmq.Socket[bytes]
    others: tuple[tuple[zmq.Socket[bytes], zmq.Socket[bytes]], ...] = ()
    coordinator: CoordinatorSockets | None = None


class Dialler(msgspec.Struct, frozen=True, kw_only=True):
    """What every handshake of a group has in common."""

    context: zmq.Context[zmq.Socket[bytes]]
    address: str
    codec: Codec
    output_hwm: int
    timeout_s: float
    socks_proxy: str | None = None

    async def dial(self, identity: bytes, card: RankCard, faults: Faults) -> Dialled:
        """Run one handshake; raises `HandshakeError` when no usable INIT comes in time."""
        socket = self._socket(zmq.DEALER)
        arrived: asyncio.Queue[Frames] = asyncio.Queue()
        reader = FrameReader(socket, arrived.put_nowait)
        try:
            await asyncio.sleep(faults.slow_handshake_s)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.LINGER, HANDSHAKE_LINGER_MS)
            socket.connect(self.address)
            greetings = ["READY"] * faults.ready_first + ["HELLO"] + ["HELLO"] * faults.duplicate_hello
            for status in greetings:
                socket.send(self.codec.status(status))
            reader.start()
            async with asyncio.timeout(self.timeout_s):
                addresses = decode_init(await arrived.get())
            self._question(addresses)
            await asyncio.sleep(faults.slow_handshake_s)
            return await self._register(socket, identity, card, addresses, faults)
        except TimeoutError:
            socket.setsockopt(zmq.LINGER, 0)
            raise HandshakeError(
                f"no INIT from {self.address} within {self.timeout_s:g} s: is the gateway up? If it is, it may not"
                f" expect engine index {card.index}: see its log"
            ) from None
        except zmq.ZMQError as error:
            raise HandshakeError(f"the handshake address {self.address} can't be used: {error}") from error
        except asyncio.CancelledError:
            socket.setsockopt(zmq.LINGER, 0)
            raise
        finally:
            reader.stop()
            socket.close()

    def _question(self, addresses: Addresses) -> None:
        """Whether it is an answer to this family; raises `HandshakeError`."""
        coordinator = addresses.coordinator_input or addresses.coordinator_output
        if coordinator is not None and not self.codec.has_coordinator:
            raise HandshakeError(
                f"INIT names a coordinator ({coordinator}), which vllm has and tokenspeed has not: the gateway's group"
                " speaks another protocol than these ranks, see --protocol"
            )

    async def _register(
        self, handshake: zmq.Socket[bytes], identity: bytes, card: RankCard, addresses: Addresses, faults: Faults
    ) -> Dialled:
        registers_first = self.codec.registers_before_ready is not faults.swap_ready
        if not registers_first:
            handshake.send(self.codec.status("READY"))
        pairs = list(zip(addresses.inputs, addresses.outputs, strict=False))
        opened: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []
        try:
            for pair in pairs if self.codec.has_coordinator else pairs[:1]:
                opened.append((self._socket(zmq.DEALER), self._socket(zmq.PUSH)))
                self._connect(*opened[-1], identity, card, pair)
            coordinator = await self._subscribe(addresses)
        except BaseException:
            for inputs, outputs in opened:
                inputs.close()
                outputs.close()
            raise
        if registers_first:
            handshake.send(self.codec.status("READY"))
        return Dialled(*opened[0], tuple(opened[1:]), coordinator)

    def _connect(
        self,
        inputs: zmq.Socket[bytes],
        outputs: zmq.Socket[bytes],
        identity: bytes,
        card: RankCard,
        addresses: tuple[str, str],
    ) -> None:
        """Connect to one front end, and register there."""
        try:
            for data_socket in (inputs, outputs):
                data_socket.setsockopt(zmq.LINGER, 0)
            inputs.setsockopt(zmq.IDENTITY, identity)
            inputs.setsockopt(zmq.RCVHWM, 0)
            outputs.setsockopt(zmq.SNDHWM, self.output_hwm)
            inputs.connect(addresses[0])
            inputs.send(self.codec.registration(card))
            outputs.connect(addresses[1])
        except zmq.ZMQError as error:
            raise HandshakeError(f"INIT's addresses can't be used ({', '.join(addresses)}): {error}") from error

    async def _subscribe(self, addresses: Addresses) -> CoordinatorSockets | None:
        """Ask the coordinator for what it publishes, and wait for its answer, as a real rank does."""
        if addresses.coordinator_input is None or addresses.coordinator_output is None:
            return None
        waves, reports = self._socket(zmq.XSUB), self._socket(zmq.PUSH)
        arrived: asyncio.Queue[Frames] = asyncio.Queue()
        reader = FrameReader(waves, arrived.put_nowait)
        try:
            for socket, address in ((waves, addresses.coordinator_input), (reports, addresses.coordinator_output)):
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(address)
            waves.send(SUBSCRIBE)
            reader.start()
            async with asyncio.timeout(self.timeout_s):
                while await arrived.get() != [READY]:
                    pass
        except BaseException as error:
            reader.stop()
            waves.close()
            reports.close()
            if isinstance(error, TimeoutError):
                raise HandshakeError(f"the coordinator did not answer within {self.timeout_s:g} s") from None
            raise
        reader.stop()
        return CoordinatorSockets(waves, reports)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        if self.socks_proxy is not None:
            socket.setsockopt_string(zmq.SOCKS_PROXY, self.socks_proxy)
        return socket

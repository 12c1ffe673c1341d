"""How a rank joins a gateway: HELLO, wait for INIT, connect and register.

TokenSpeed sends READY before it registers on the input socket, vLLM after. libzmq keeps dialling, so
the gateway may start later; and a gateway that comes back on the same data addresses is served on
without a new handshake, because the data sockets reconnect by themselves.
"""

import asyncio

import msgspec
import zmq

from engine_stub.faults import Faults
from engine_stub.sockets import FrameReader, Frames
from engine_stub.wire.codec import Codec, RankCard
from engine_stub.wire.handshake import HandshakeError, decode_init

HANDSHAKE_LINGER_MS = 1000
"""READY is the handshake socket's last message; it must leave before the socket is gone."""


class Dialled(msgspec.Struct, frozen=True):
    """The two data sockets of a registered rank."""

    inputs: zmq.Socket[bytes]
    outputs: zmq.Socket[bytes]


class Dialler(msgspec.Struct, frozen=True, kw_only=True):
    """What every handshake of a group has in common."""

    context: zmq.Context[zmq.Socket[bytes]]
    address: str
    codec: Codec
    output_hwm: int
    timeout_s: float

    async def dial(self, identity: bytes, card: RankCard, faults: Faults) -> Dialled:
        """Run one handshake; raises `HandshakeError` when no usable INIT comes in time."""
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
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
            await asyncio.sleep(faults.slow_handshake_s)
            return self._register(socket, identity, card, addresses.inputs[0], addresses.outputs[0], faults)
        except TimeoutError:
            socket.setsockopt(zmq.LINGER, 0)
            raise HandshakeError(
                f"no INIT from {self.address} within {self.timeout_s:g} s: is the gateway up?"
            ) from None
        except asyncio.CancelledError:
            socket.setsockopt(zmq.LINGER, 0)
            raise
        finally:
            reader.stop()
            socket.close()

    def _register(
        self,
        handshake: zmq.Socket[bytes],
        identity: bytes,
        card: RankCard,
        input_address: str,
        output_address: str,
        faults: Faults,
    ) -> Dialled:
        registers_first = self.codec.registers_before_ready is not faults.swap_ready
        if not registers_first:
            handshake.send(self.codec.status("READY"))
        inputs: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        outputs: zmq.Socket[bytes] = self.context.socket(zmq.PUSH)
        try:
            for data_socket in (inputs, outputs):
                data_socket.setsockopt(zmq.LINGER, 0)
            inputs.setsockopt(zmq.IDENTITY, identity)
            inputs.setsockopt(zmq.RCVHWM, 0)
            outputs.setsockopt(zmq.SNDHWM, self.output_hwm)
            inputs.connect(input_address)
            inputs.send(self.codec.registration(card))
            outputs.connect(output_address)
        except zmq.ZMQError as error:
            inputs.close()
            outputs.close()
            raise HandshakeError(
                f"INIT's addresses can't be used ({input_address}, {output_address}): {error}"
            ) from error
        if registers_first:
            handshake.send(self.codec.status("READY"))
        return Dialled(inputs, outputs)

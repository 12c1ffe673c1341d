"""A network between ranks and gateway that can be broken: one small SOCKS5 proxy per rank.

Ranks are told to use it (`socks_proxy`), so neither the wire nor the gateway knows of it. Bytes are passed on as they
are: connections are cut, held up, or not answered, but nothing is changed on the way.
"""

import asyncio
import socket
import struct
from contextlib import suppress
from enum import Enum

from tests.support.processes import WAIT_S

TOLD_AFTER_S = 4.0
"""How long a rank's end of a connection stays half open."""
_GREETING = b"\x05\x00"  # version 5, no authentication
_CONNECTED = b"\x05\x00\x00\x01" + bytes(6)
_CONNECT, _IPV4 = 1, 1
_REQUEST = struct.Struct("!BBBB4sH")


class Way(Enum):
    """Which bytes are held up."""

    BOTH = "both"
    TO_GATEWAY = "to_gateway"
    TO_RANK = "to_rank"


class Side(Enum):
    """Whose end of a connection is cut."""

    BOTH = "both"
    RANK = "rank"
    GATEWAY = "gateway"


class _Pipe(asyncio.Protocol):
    """One end of a connection: what arrives is written to the other one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Pipe | None = None
        self._early = b""
        self._is_held = False
        self._is_full = False

    def join(self, other: "_Pipe", greeting: bytes) -> None:
        """From now on what arrives here goes there and the other way round. Here is the rank's end."""
        self.other, other.other = other, self
        if self.transport is None or other.transport is None:
            for pipe in (self, other):
                pipe.abort()
            return
        self.transport.write(greeting + other._early)
        other.transport.write(self._early)

    def abort(self) -> None:
        """End the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._adjust()

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data  # one side may speak before the other is there
        elif self.other.transport is not None:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.other is not None and self.other.transport is not None:
            # What was read before is still to be passed on, as a router that forwards packets would.
            self.other.transport.close()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other._is_full = True
            self.other._adjust()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other._is_full = False
            self.other._adjust()

    def hold(self, is_held: bool) -> None:
        """Read nothing more, or go on."""
        self._is_held = is_held
        self._adjust()

    def _adjust(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._is_held or self._is_full:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()


class _Pair:
    """Both ends of one connection."""

    def __init__(self, rank_side: _Pipe, gateway_side: _Pipe) -> None:
        self.rank_side = rank_side
        self.gateway_side = gateway_side

    @property
    def is_closed(self) -> bool:
        return self.rank_side.transport is None and self.gateway_side.transport is None

    def cut(self, side: Side) -> None:
        """Reset it, or one end of it."""
        if side is not Side.GATEWAY:
            self._reset(self.rank_side, closes_other=side is Side.BOTH)
        if side is not Side.RANK:
            self._reset(self.gateway_side, closes_other=side is Side.BOTH)
        if side is Side.GATEWAY:
            asyncio.get_running_loop().call_later(TOLD_AFTER_S, self._reset, self.rank_side)

    def _reset(self, pipe: _Pipe, *, closes_other: bool = True) -> None:
        if not closes_other:
            pipe.other = None
        if pipe.transport is not None:
            _reset(pipe.transport)


class Path:
    """One peer's connections to the gateway. `address` is what a rank needs as `socks_proxy`.

    With a `target` (HOST:PORT) it is a plain relay to that address instead, for clients.
    """

    def __init__(self, target: str | None = None) -> None:
        self._target = target
        self.address = ""
        self.connected = 0
        self._held: Way | None = None
        self._pairs: list[_Pair] = []
        self._server: asyncio.Server | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Entry(self, self._target), "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await self._server.wait_closed()
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def cut(self, share: float = 1.0, side: Side = Side.BOTH) -> int:
        """Reset the oldest `share` of the connections; how many there were.

        With one side only, the other's end stays half open: it looks alive, and nobody is there. The gateway finds out by
        its heartbeats. An engine has none of its own and only listens: its end is told late, as by a kernel that goes
        on sending what was not acknowledged.
        """
        self._forget_closed()
        doomed = self._pairs[: max(1, round(len(self._pairs) * share))]
        for pair in doomed:
            pair.cut(side)
        return len(doomed)

    def hold(self, way: Way) -> None:
        """Pass nothing on, neither of these connections nor of new ones."""
        self._held = way
        self._apply()

    def release(self) -> None:
        """Pass on what was held up, and all that follows."""
        self._held = None
        self._apply()

    def _apply(self) -> None:
        self._forget_closed()
        for pair in self._pairs:
            pair.rank_side.hold(self._held in (Way.BOTH, Way.TO_GATEWAY))
            pair.gateway_side.hold(self._held in (Way.BOTH, Way.TO_RANK))

    def _forget_closed(self) -> None:
        self._pairs = [pair for pair in self._pairs if not pair.is_closed]

    def accept(self, rank_side: _Pipe, host: str, port: int) -> None:
        """A rank wants a connection to this address: make it, then let the two ends do the rest."""
        task = asyncio.get_running_loop().create_task(self._connect(rank_side, host, port))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, rank_side: _Pipe, host: str, port: int) -> None:
        gateway_side = _Pipe()
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.get_running_loop().create_connection(lambda: gateway_side, host, port)
        except (OSError, TimeoutError):
            rank_side.abort()
            return
        self.connected += 1
        self._pairs.append(_Pair(rank_side, gateway_side))
        rank_side.join(gateway_side, b"" if self._target is not None else _CONNECTED)
        self._apply()


class _Entry(asyncio.Protocol):
    """A new connection: to the target, or where it asks to go (SOCKS5, no authentication, IPv4: RFC 1928)."""

    def __init__(self, path: Path, target: str | None) -> None:
        self._path = path
        self._target = target
        self._read = bytearray()
        self._is_greeted = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if self._target is not None:
            host, _, port = self._target.rpartition(":")
            self._go(host, int(port))

    def data_received(self, data: bytes) -> None:
        transport, read = self._transport, self._read
        assert transport is not None
        read += data
        if not self._is_greeted and len(read) >= 2 and len(read) >= 2 + read[1]:
            del read[: 2 + read[1]]
            self._is_greeted = True
            transport.write(_GREETING)
        if not self._is_greeted or len(read) < _REQUEST.size:
            return
        version, command, _, kind, packed, port = _REQUEST.unpack_from(read)
        if (version, command, kind) != (5, _CONNECT, _IPV4):
            transport.abort()
            return
        # The rank sends nothing before it has read the answer: the buffer holds no more than the request.
        self._go(socket.inet_ntoa(packed), port)

    def _go(self, host: str, port: int) -> None:
        assert self._transport is not None
        near = _Pipe()
        self._transport.set_protocol(near)
        near.connection_made(self._transport)
        self._path.accept(near, host, port)


def _reset(transport: asyncio.Transport) -> None:
    """End with RST, as when a middlebox drops the connection: neither side gets what is still under way."""
    raw = transport.get_extra_info("socket")
    if raw is not None:
        with suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()

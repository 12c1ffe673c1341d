"""A connection of our server without a socket: a transport that keeps what is written, and a loop that turns on demand."""

import asyncio
from typing import Any

from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server
from gateway.h2.server.connection import ServerConnection
from tests.conformance.service import MAX_MESSAGE_BYTES, Service


class Transport(asyncio.Transport):
    """Takes everything, keeps it until it is taken, and says whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: Any) -> None:
        assert data
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def take(self) -> bytes:
        data = bytes(self.written)
        self.written.clear()
        return data


class Wired:
    """A server with the small service table, and connections to it. `faults` are exceptions that nobody caught."""

    def __init__(self, **limits: Any) -> None:
        self.service = Service()
        self.faults: list[str] = []
        bounds = Limits(**({"max_request_bytes": MAX_MESSAGE_BYTES} | limits))
        self._server = Server(limits=bounds, max_message_bytes=MAX_MESSAGE_BYTES)
        self._server.add_generic_rpc_handlers((self.service.handler(),))

    async def start(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note)
        await self._server.start()

    def connect(self) -> tuple[ServerConnection, Transport]:
        shared = self._server._shared
        assert shared is not None
        connection, transport = ServerConnection(shared), Transport()
        connection.connection_made(transport)
        return connection, transport

    async def stop(self) -> None:
        await self._server.stop(None)

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context['message']}: {context.get('exception')!r}")


async def turn(times: int = 1) -> None:
    """Let what was scheduled run."""
    for _ in range(times):
        await asyncio.sleep(0)

"""The server: listeners, connections and calls, behind the interface of `grpc.aio.Server`."""

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gateway.h2.protocol.heads import HeadMemo
from gateway.h2.protocol.limits import Limits
from gateway.h2.rpc.status import Code, RpcError
from gateway.h2.server.connection import ServerConnection
from gateway.h2.server.deadlines import Deadlines
from gateway.h2.server.faults import Faults
from gateway.h2.server.handlers import Handlers
from gateway.h2.server.listener import ContextSource, Listener, bind
from gateway.h2.server.writes import Writes

# At level debug the library writes every header, tokens included.
logging.getLogger("hpack").setLevel(logging.INFO)

_CHECK_S = 1.0
"""How often connections are looked at."""
_CLOSE_S = 1.0
_POLL_S = 0.01


class Shared:
    """What the connections of one server have in common."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        max_message_bytes: int,
        handlers: Handlers,
        faults: Faults,
    ) -> None:
        self.loop = loop
        self.limits = limits
        self.max_message_bytes = max_message_bytes
        self.handlers = handlers
        self.faults = faults
        self.deadlines = Deadlines(loop)
        self.writes = Writes(loop)
        self.connections: set[ServerConnection] = set()
        # Accepted, but not open yet.
        self.joining: set[ServerConnection] = set()
        self.head_memo = HeadMemo()
        self.tasks: set[asyncio.Task[None]] = set()

    def admit(self) -> ServerConnection | None:
        """The protocol of a connection that was accepted; None when there are enough."""
        if len(self.connections) + len(self.joining) >= self.limits.max_connections:
            return None
        connection = ServerConnection(self)
        self.joining.add(connection)
        return connection


class Server:
    """Add handlers and ports, `start` once, `stop` once. Responses may have `max_message_bytes`."""

    def __init__(self, *, limits: Limits, max_message_bytes: int, faults: Faults | None = None) -> None:
        self._limits = limits
        self._faults = Faults() if faults is None else faults
        self._max_message_bytes = max_message_bytes
        self._handlers = Handlers()
        self._bound: list[tuple[socket.socket, ContextSource | None]] = []
        self._listeners: list[Listener] = []
        self._shared: Shared | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._stopped = asyncio.Event()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """Handlers that are asked for each call."""
        self._handlers.add_generic(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Handlers by method name."""
        self._handlers.add_registered(service_name, method_handlers)

    def add_insecure_port(self, address: str) -> int:
        """Bind HOST:PORT for plaintext. Returns the port. Raises RuntimeError, as grpcio does."""
        return self._add_port(address, None)

    def add_secure_port(self, address: str, server_credentials: ContextSource) -> int:
        """The same for TLS. `server_credentials` gives the context of each new connection, with ALPN `h2`."""
        return self._add_port(address, server_credentials)

    def set_unread_timeout(self, timeout_s: float | None) -> None:
        """Go by another `Limits.unread_timeout_s`, also on the connections that are open."""
        self._limits = replace(self._limits, unread_timeout_s=timeout_s)
        if self._shared is not None:
            self._shared.limits = self._limits
            for connection in self._shared.connections | self._shared.joining:
                connection.http.unread_timeout_s = timeout_s

    @property
    def writes(self) -> Writes:
        """What gathers the writes of all connections, once the server has started."""
        assert self._shared is not None
        return self._shared.writes

    async def start(self) -> None:
        """Begin to serve what was bound."""
        loop = asyncio.get_running_loop()
        limits = self._limits
        shared = self._shared = Shared(loop, limits, self._max_message_bytes, self._handlers, self._faults)
        for listening, context in self._bound:
            listener = Listener(listening, context, self._limits.handshake_timeout_s)
            listener.start(shared.admit, shared.joining.discard)
            self._listeners.append(listener)
        self._tick = loop.call_later(_CHECK_S, self._check, shared)

    async def stop(self, grace: float | None) -> None:
        """Take no new calls; let those that run end for up to `grace` seconds; then end them and every connection."""
        if self._shared is None:
            for listening, _ in self._bound:
                listening.close()
            return
        shared, self._shared = self._shared, None
        for listener in self._listeners:
            await listener.close()
        for connection in list(shared.connections):
            connection.drain()
        await _until_empty(shared.connections, grace or 0.0)
        error = RpcError(Code.UNAVAILABLE, "the server is shutting down")
        for connection in list(shared.connections):
            connection.shut_down(error)
        await _until_empty(shared.connections, _CLOSE_S)
        for connection in list(shared.connections):
            connection.abort()
        await _until_empty(shared.connections, _CLOSE_S)
        if self._tick is not None:
            self._tick.cancel()
        shared.deadlines.close()
        await asyncio.gather(*shared.tasks, return_exceptions=True)
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Return when the server has stopped, True if it has not within the time."""
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return True
        return False

    def _add_port(self, address: str, context: ContextSource | None) -> int:
        host, _, port = address.rpartition(":")
        try:
            sockets = bind(host.strip("[]"), int(port))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"cannot bind {address}: {error}") from None
        self._bound += ((each, context) for each in sockets)
        number: int = sockets[0].getsockname()[1]
        return number

    def _check(self, shared: Shared) -> None:
        self._tick = shared.loop.call_later(_CHECK_S, self._check, shared)
        now = shared.loop.time()
        for connection in list(shared.connections):
            connection.check(now)


async def _until_empty(connections: set[ServerConnection], timeout_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while connections and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - happens once
        await asyncio.sleep(_POLL_S)

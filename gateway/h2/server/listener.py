"""Listening sockets, and the TLS handshakes of what they accept."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

import structlog

_log = structlog.get_logger("gateway.h2")
_BACKLOG = 1024
_RETRY_S = 1.0
"""Pause after a failure to accept: mostly the process has no file descriptor left."""

ContextSource = Callable[[], ssl.SSLContext]
Admit = Callable[[], asyncio.Protocol | None]
Forget = Callable[[Any], None]


_shared_ports: set[int] = set()


def share_port(port: int) -> None:
    """Let other processes of this user listen on the port beside this one; each gets a part of the connections.

    Without it SO_REUSEPORT stays off: a second gateway on the same port must fail, not take half of the connections.
    """
    _shared_ports.add(port)


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address that the host stands for, all on one port. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if sockets and not port:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])  # noqa: PLW2901 - the port we got
            each = socket.socket(family, kind, protocol)
            sockets.append(each)
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port in _shared_ports:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, len(found) > 1)
            each.bind(address)
            each.listen(_BACKLOG)
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


class Listener:
    """Accepts on one socket until it is closed."""

    def __init__(self, listening: socket.socket, context: ContextSource | None, handshake_timeout_s: float) -> None:
        self._socket = listening
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._admit: Admit | None = None
        self._forget: Forget | None = None
        # Connections that are not open yet: TLS takes some time, and the client may take more.
        self._joining: dict[asyncio.Task[None], tuple[socket.socket, asyncio.Protocol]] = {}
        self._is_accepting = False

    def start(self, admit: Admit, forget: Forget) -> None:
        """Begin to accept. `admit` gives the protocol of each connection, None if there is no room: it is closed at once.

        `forget` is told when there is nothing left to wait for: the connection is open, or it never will be.
        """
        self._admit, self._forget = admit, forget
        self._resume()

    async def close(self) -> None:
        """Accept no more; handshakes that are under way are broken off."""
        self._pause()
        self._admit = None
        tasks = list(self._joining)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    def _resume(self) -> None:
        if not self._is_accepting and self._admit is not None:
            self._is_accepting = True
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _pause(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            asyncio.get_running_loop().remove_reader(self._socket)

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # gone again
        except OSError as error:
            _log.warning("accept_failed", error=str(error))
            self._pause()
            asyncio.get_running_loop().call_later(_RETRY_S, self._resume)
            return
        protocol = None if self._admit is None else self._admit()
        if protocol is None:
            accepted.close()
            return
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._join(accepted, protocol))
        self._joining[task] = accepted, protocol
        task.add_done_callback(self._joined)

    def _joined(self, task: "asyncio.Task[None]") -> None:
        accepted, protocol = self._joining.pop(task)
        if self._forget is not None:
            self._forget(protocol)
        if task.cancelled():
            accepted.close()

    async def _join(self, accepted: socket.socket, protocol: asyncio.Protocol) -> None:
        context = None if self._context is None else self._context()
        timeout_s = None if context is None else self._handshake_timeout_s
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context, ssl_handshake_timeout=timeout_s)
        except OSError as error:
            # Garbage instead of a handshake, a certificate that does not do, a client that left: all the same here.
            _log.debug("handshake_failed", error=str(error))

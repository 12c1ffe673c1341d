"""The port that the processes share, held by the supervisor: it is nobody else's while processes come and go."""

import socket
from typing import Any

from gateway.h2.server import listener


class HeldPort:
    """Bound, never listening: the system gives all connections to the processes that do. Raises OSError."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        # First alone: other processes that share the port among themselves would let us in.
        alone = listener.bind(host.strip("[]"), int(port))
        names = [each.getsockname() for each in alone]
        for each in alone:
            each.close()
        self.port: int = names[0][1]
        self.address = f"{host}:{self.port}"
        self._sockets: list[socket.socket] = []
        try:
            # Without SO_REUSEADDR, as that lets others in while nobody listens. Connections of an earlier run that are
            # not quite over may ask for it.
            self._bind(alone, names, reuses_address=False)
        except OSError:
            self._bind(alone, names, reuses_address=True)

    def _bind(self, alone: list[socket.socket], names: list[Any], *, reuses_address: bool) -> None:
        try:
            for one, name in zip(alone, names, strict=True):
                held = socket.socket(one.family, socket.SOCK_STREAM)
                self._sockets.append(held)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses_address)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if one.family == socket.AF_INET6:
                    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, len(alone) > 1)
                held.bind(name)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Let it go. Idempotent."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()

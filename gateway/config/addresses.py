"""Addresses as the configuration writes them, taken apart and compared without asking the network."""

import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")
_MAX_LABEL = 63
MAX_PORT = 65535
MAX_IPC_PATH_BYTES = 107
"""Linux's `sun_path` holds 108 bytes with the closing zero."""
_SOCKET_NAME = "rg-{}-{}-" + "0" * 12
"""As long as the names that the engine link gives its sockets; a test compares them."""


class Address(NamedTuple):
    """A TCP address; `host` has no brackets and loopback names are written as their number."""

    host: str
    port: int

    def clashes(self, other: "Address") -> bool:
        """Whether both can't be bound at once. Port 0 takes a free one and never clashes."""
        if self.port != other.port or not self.port:
            return False
        return self.host == other.host or is_wildcard(self.host) or is_wildcard(other.host)


def parse_address(text: str) -> Address:
    """Take `HOST:PORT` apart: a name, IPv4 address, `*` or [IPv6 address]. Raises `ValueError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ValueError("expected HOST:PORT")
    if int(port) > MAX_PORT:
        raise ValueError(f"port {port} is out of range; the largest is {MAX_PORT}")
    return Address(parse_host(host), int(port))


def parse_tcp(endpoint: str) -> Address:
    """Take `tcp://HOST:PORT` apart. Raises `ValueError`."""
    return parse_address(endpoint.removeprefix("tcp://"))


def check_ipc_path(path: str | Path) -> None:
    """Raise `ValueError` for a socket path that the system can't bind."""
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ValueError(f"the socket path is longer than {MAX_IPC_PATH_BYTES} bytes; use a shorter directory")


def rank_socket_bytes(directory: Path, group: int, ranks: int) -> int:
    """Length of the longest path of a rank's sockets in `directory`; of a relative one, as far as it is written."""
    return len(os.fsencode(directory / _SOCKET_NAME.format(group, ranks - 1)))


def parse_host(text: str) -> str:
    """Check a host and bring it into the one form that comparisons use. Raises `ValueError`."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare:
        if bare is text:
            raise ValueError(f"put the IPv6 address in brackets, [{text}]")
        try:
            return str(ipaddress.IPv6Address(bare))
        except ValueError:
            raise ValueError(f"{text} is not an IPv6 address") from None
    is_name = _HOST_NAME.fullmatch(bare) and all(len(label) <= _MAX_LABEL for label in bare.split("."))
    if bare is not text or not (bare == "*" or is_name):
        raise ValueError(f"'{text}' is not a host name, an IPv4 address or an [IPv6 address]")
    return "127.0.0.1" if bare.lower() == "localhost" else bare


def is_wildcard(host: str) -> bool:
    """Whether binding this host (as `parse_host` returns it) means every interface."""
    if host == "*":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # The C library also takes short and hexadecimal forms such as 0, 0x0 and 0.0.
        try:
            return socket.inet_aton(host) == bytes(4)
        except OSError:
            return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach it; an unknown name counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

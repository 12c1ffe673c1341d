"""Where the sockets are bound: checks at start, private addresses per incarnation.

An address is used for one incarnation of one rank and never given to another: the engine behind it
reconnects to it for ever, also after it was declared lost.
"""

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import zmq

from gateway.config.addresses import Address, check_ipc_path, is_wildcard, parse_tcp
from gateway.config.schema import Config, Group
from gateway.edges.engine_link.errors import LinkError
from gateway.edges.engine_link.reader import Socket
from gateway.edges.state_store import ensure_private_dir

_SOCKET_PREFIX = "rg-"
_REMEMBERED_PORTS = 2048
_BIND_ATTEMPTS = 16


def parse(address: str) -> Address:
    """Take `tcp://HOST:PORT` apart. Raises LinkError."""
    try:
        return parse_tcp(address)
    except ValueError as error:
        raise LinkError(address, str(error)) from error


def bind(socket_: Socket, address: str) -> str:
    """Bind and return the real address. Raises LinkError with the system's reason."""
    if address.startswith("tcp://["):
        socket_.setsockopt(zmq.IPV6, 1)
    try:
        socket_.bind(address)
    except zmq.ZMQError as error:
        raise LinkError(address, f"can't bind: {error.strerror}") from error
    return bytes(socket_.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def clear_ipc_path(address: str) -> None:
    """Make room for an ipc socket: remove a stale one. Raises LinkError if something else is there.

    libzmq itself would remove any file at the path, and would take over a socket that is in use.
    """
    path = _short_path(address)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise LinkError(address, str(error)) from error
    if not stat.S_ISSOCK(mode):
        raise LinkError(address, "a file that is not a socket is in the way")
    if _is_listening(path):
        raise LinkError(address, "in use by another process")
    path.unlink(missing_ok=True)


def remove_ipc_path(address: str) -> None:
    """Remove the file of a socket that was closed; libzmq 4.3.5 leaves it. Does nothing for tcp."""
    if address.startswith("ipc://"):
        with contextlib.suppress(OSError):
            Path(address.removeprefix("ipc://")).unlink()


def check_handshake(address: str, *, allow_wildcard: bool) -> None:
    """Refuse what must not be bound. Raises LinkError."""
    if address.startswith("ipc://"):
        clear_ipc_path(address)
    elif is_wildcard(parse(address).host) and not allow_wildcard:
        raise LinkError(address, "binds all interfaces, and the wire has no authentication: set listen.allow_wildcard")


class Endpoints:
    """Hands out addresses for all groups of one link and owns its temporary directory."""

    def __init__(self, config: Config, state_dir: Path | None) -> None:
        self._config = config
        self._state_dir = state_dir
        self._temporary: Path | None = None
        self._dirs: dict[int, Path] = {}
        self._used_ports: deque[int] = deque(maxlen=_REMEMBERED_PORTS)

    def prepare(self, config: Config, new: Iterable[int]) -> None:
        """Take the configuration's groups; check the `new` ones by their numbers, and create what is missing.

        Raises LinkError; nothing is taken then.
        """
        for number in new:
            group = config.groups[number]
            check_handshake(group.handshake, allow_wildcard=config.listen.allow_wildcard)
            if group.sockets.transport == "tcp":
                self._check_tcp_host(group)
            else:
                self._dirs[number] = self._prepare_dir(group)
                _short_path(self._ipc_address(number, group.ranks - 1))
        self._config = config

    def bind_fresh(self, socket_: Socket, number: int, index: int) -> str:
        """Bind to an address that no incarnation had before. Raises LinkError."""
        group = self._config.groups[number]
        if group.sockets.transport == "ipc":
            return bind(socket_, self._ipc_address(number, index))
        for _ in range(_BIND_ATTEMPTS):
            address = bind(socket_, f"tcp://{_bracket(group.sockets.host)}:*")
            port = parse(address).port
            if port not in self._used_ports:
                self._used_ports.append(port)
                return address
            socket_.unbind(address)
        raise LinkError(f"tcp://{group.sockets.host}", "no unused port found")

    def bind_recorded(self, socket_: Socket, address: str) -> str:
        """Bind again to an address of an earlier process. Raises LinkError."""
        if address.startswith("ipc://"):
            path = Path(address.removeprefix("ipc://"))
            try:
                ensure_private_dir(path.parent)
            except OSError as error:
                raise LinkError(address, str(error)) from error
            clear_ipc_path(address)
        else:
            host, port = parse(address)
            if is_wildcard(host):
                raise LinkError(address, "a recorded address must not be a wildcard")
            self._used_ports.append(port)
        return bind(socket_, address)

    def close(self) -> None:
        """Remove the temporary directory."""
        if self._temporary is not None:
            for leftover in self._temporary.iterdir():
                leftover.unlink(missing_ok=True)
            self._temporary.rmdir()
            self._temporary = None

    def _ipc_address(self, number: int, index: int) -> str:
        return f"ipc://{self._dirs[number]}/{_SOCKET_PREFIX}{number}-{index}-{secrets.token_hex(6)}"

    def _prepare_dir(self, group: Group) -> Path:
        if group.sockets.dir is None and self._state_dir is None:
            if self._temporary is None:
                self._temporary = Path(tempfile.mkdtemp(prefix="rankgate-"))
            return self._temporary
        # With a state directory the addresses must outlive the process: a temporary one won't do.
        path = Path(group.sockets.dir) if group.sockets.dir is not None else Path(self._state_dir or "") / "sockets"
        try:
            ensure_private_dir(path)
            # Where ranks of ours are at work already it was done, and to look again would mean to knock at their sockets.
            if path.absolute() not in self._dirs.values():
                _remove_stale_sockets(path)
        except OSError as error:
            raise LinkError(f"ipc://{path}", f"group {group.name}: {error}") from error
        return path.absolute()

    def _check_tcp_host(self, group: Group) -> None:
        host = group.sockets.host
        address = f"tcp://{host}"
        if is_wildcard(host.strip("[]")):
            raise LinkError(address, f"group {group.name}: sockets.host is announced to the ranks, name one address")
        try:
            ip = ipaddress.ip_address(host.strip("[]"))
            family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((str(ip), 0))
        except (ValueError, OSError) as error:
            raise LinkError(
                address, f"group {group.name}: sockets.host is no IP address of this host: {error}"
            ) from error


def _short_path(address: str) -> Path:
    """The path of an ipc address. Raises LinkError when it is too long to bind."""
    path = Path(address.removeprefix("ipc://"))
    try:
        check_ipc_path(path)
    except ValueError as error:
        raise LinkError(address, str(error)) from error
    return path


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            # A full backlog (EAGAIN) is somebody's; anything else says that nobody listens.
            return error.errno == errno.EAGAIN
    return True


def _remove_stale_sockets(directory: Path) -> None:
    """Remove what a gateway that was killed left behind; sockets in use belong to another gateway."""
    for path in directory.glob(f"{_SOCKET_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode) and not _is_listening(path):
                path.unlink()

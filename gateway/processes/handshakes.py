"""The handshake addresses of several processes as one: the supervisor has them, and passes on what ranks say there.

A rank's HELLO goes to every process that is to serve it, under the rank's identity. Each of them binds its own sockets
and answers; the rank is told all addresses at once, when all have answered, and READY goes to all of them again. A process
that starts anew finds its sockets in its state; what it has missed of a handshake is repeated.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zmq

from gateway.config.checks import MAX_RANKS
from gateway.config.schema import Config, Group
from gateway.edges.engine_link.connections import source_fd
from gateway.edges.engine_link.counters import LimitedLog
from gateway.edges.engine_link.endpoints import bind, check_handshake, remove_ipc_path
from gateway.edges.engine_link.handshake_port import MAX_FRAME_BYTES, MAX_RECEIVED_BYTES
from gateway.edges.engine_link.reader import Socket, SocketReader
from gateway.processes.init import merged_init
from gateway.processes.plan import handshake_address, processes_of, rank_at
from gateway.wire.handshake import WireError, decode_hello, index_of

_FACING_RANKS: dict[int, int] = {
    zmq.LINGER: 0,
    zmq.ROUTER_MANDATORY: 1,
    zmq.ROUTER_HANDOVER: 1,
    zmq.MAXMSGSIZE: MAX_RECEIVED_BYTES,
}
_LINGER_MS = 1000
_LEAVE_S = 2.0
_TICK_S = 0.25
_SETTLE_S = 10.0
"""A process that dies so soon after a rank's READY may have taken no note of it."""
_MAX_SOCKETS = 65536
_log = structlog.get_logger("gateway.processes")


@dataclass
class _Line:
    """A connection to a process, in the name of one rank."""

    socket: Socket
    reader: SocketReader

    def close(self, linger_ms: int = _LINGER_MS) -> None:
        self.reader.close()
        self.socket.close(linger=linger_ms)


@dataclass(eq=False)
class _Rank:
    """A rank's handshake, as far as it has come."""

    processes: tuple[int, ...]
    fd: int | None
    hello: bytes
    lines: dict[int, _Line] = field(default_factory=dict)
    answers: dict[int, bytes] = field(default_factory=dict)
    ready: bytes | None = None
    ready_at: float = 0.0
    missed: set[int] = field(default_factory=set)

    def close(self) -> None:
        for line in self.lines.values():
            line.close()
        self.lines.clear()


class _Port:
    """The handshake address of one group."""

    def __init__(self, relay: "HandshakeRelay", number: int, group: Group) -> None:
        self._relay = relay
        self._number = number
        self._group = group
        self._ranks: dict[bytes, _Rank] = {}
        self._leaving: list[_Rank] = []
        self._socket: Socket = relay.context.socket(zmq.ROUTER)
        try:
            for option, value in _FACING_RANKS.items():
                self._socket.setsockopt(option, value)
            self.address = bind(self._socket, group.handshake)
        except BaseException:
            self._socket.close()
            raise
        self._reader = SocketReader(relay.loop, self._socket, self._on_message)

    def poke(self) -> None:
        """Safety tick."""
        self._reader.poke()
        for rank in self._ranks.values():
            for line in rank.lines.values():
                line.reader.poke()

    def started(self, process: int) -> None:
        """Repeat what the process has missed."""
        for identity, rank in self._ranks.items():
            if process not in rank.processes:
                continue
            if len(rank.answers) < len(rank.processes):
                if process not in rank.answers:
                    self._say(identity, rank, process, rank.hello, anew=True)
            elif process in rank.missed and rank.ready is not None:
                rank.missed.discard(process)
                self._say(identity, rank, process, rank.ready, anew=True)

    def died(self, process: int) -> None:
        """The process hears nothing from now on."""
        for rank in self._ranks.values():
            if rank.ready is not None and time.monotonic() - rank.ready_at < _SETTLE_S:
                rank.missed.add(process)

    def close(self) -> None:
        """Listen no more."""
        for rank in (*self._ranks.values(), *self._leaving):
            rank.close()
        self._reader.close()
        self._socket.close()
        remove_ipc_path(self.address)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        index = index_of(identity)
        if index is None or any(len(frame) > MAX_FRAME_BYTES for frame in frames):
            self._ignore(identity, "not a rank's")
            return
        payload = frames[-1].bytes
        try:
            hello = decode_hello([payload] if len(frames) > 1 else [])
        except WireError as error:
            self._ignore(identity, str(error))
            return
        place = index - self._group.start_index
        if not 0 <= place < MAX_RANKS:
            self._ignore(identity, "an index that no rank of the group can have")
        elif hello.status == "HELLO":
            self._greet(identity, place, payload, source_fd(frames[0]))
        else:
            self._pass_ready(identity, place, payload)

    def _greet(self, identity: bytes, place: int, payload: bytes, fd: int | None) -> None:
        rank = self._ranks.get(identity)
        # The same engine process may ask twice; another one's HELLO has to come over another connection.
        is_same = rank is not None and fd is not None and rank.fd == fd
        if rank is None or not is_same:
            if rank is not None:
                # Not yet: the next connection could get the descriptor of this one, by which a process tells them apart.
                self._leaving.append(rank)
                self._relay.loop.call_later(_LEAVE_S, self._close_leaving, rank)
            processes = processes_of(self._relay.config, self._number, place)
            rank = self._ranks[identity] = _Rank(processes, fd, payload)
        rank.answers.clear()
        rank.ready = None
        rank.missed.clear()
        for process in rank.processes:
            if self._relay.is_up(process):  # else it is told when it is
                self._say(identity, rank, process, payload)

    def _close_leaving(self, rank: _Rank) -> None:
        rank.close()
        if rank in self._leaving:
            self._leaving.remove(rank)

    def _pass_ready(self, identity: bytes, place: int, payload: bytes) -> None:
        rank = self._ranks.get(identity)
        if rank is None:
            self._ignore(identity, "READY without HELLO")
            return
        is_answered = len(rank.answers) == len(rank.processes)
        is_new = is_answered and rank.ready is None  # else it is no end of a start-up
        rank.ready, rank.ready_at = payload, time.monotonic()
        rank.missed = {process for process in rank.processes if not self._relay.is_up(process)}
        for process in rank.processes:
            if process not in rank.missed:
                self._say(identity, rank, process, payload)
        if is_answered:
            rank.close()  # what was said still leaves; nothing is answered any more
        config = self._relay.config
        if is_new and place < config.groups[self._number].ranks:
            self._relay.on_ready(rank_at(config, self._number, place))

    def _say(self, identity: bytes, rank: _Rank, process: int, payload: bytes, *, anew: bool = False) -> None:
        line = rank.lines.get(process)
        if line is not None and anew:
            # What waits in the old one must not arrive as well.
            line.close(0)
            del rank.lines[process]
            line = None
        try:
            if line is None:
                line = rank.lines[process] = self._open_line(identity, rank, process)
            line.socket.send(payload, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.warning("handshake_not_passed_on", group=self._group.name, process=process, error=error.strerror)
        if line is not None:
            line.reader.poke()

    def _open_line(self, identity: bytes, rank: _Rank, process: int) -> _Line:
        relay = self._relay
        socket: Socket = relay.context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.connect(handshake_address(relay.directory, self._number, process))
        except BaseException:
            socket.close(0)
            raise

        def on_answer(frames: list[zmq.Frame]) -> None:
            self._on_answer(identity, rank, process, frames[-1].bytes)

        return _Line(socket, SocketReader(relay.loop, socket, on_answer))

    def _on_answer(self, identity: bytes, rank: _Rank, process: int, payload: bytes) -> None:
        rank.answers[process] = payload
        if len(rank.answers) < len(rank.processes) or self._ranks.get(identity) is not rank:
            return
        init = merged_init([rank.answers[each] for each in rank.processes])
        try:
            self._socket.send_multipart([identity, init], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # It is gone: the next one that dials gets fresh addresses.
            _log.warning("rank_left_handshake", group=self._group.name, error=error.strerror)
        finally:
            self._reader.poke()

    def _ignore(self, identity: bytes, why: str) -> None:
        self._relay.limited_log.warning(
            "handshake_ignored", group=self._group.name, identity=identity[:16].hex(), why=why
        )


class HandshakeRelay:
    """All groups' handshake addresses. `configure` binds; `close` ends it. `directory` is where the processes listen.

    `on_ready` is called with the number of a rank whose engine process, a new one, is through with its start-up.
    """

    def __init__(self, config: Config, directory: Path, on_ready: Callable[[int], None]) -> None:
        self.config = config
        self.directory = directory
        self.on_ready = on_ready
        self.loop = asyncio.get_running_loop()
        self.limited_log = LimitedLog(_log, self.loop.time)
        self.context: zmq.Context[Socket] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._ports: dict[int, _Port] = {}
        self._up: set[int] = set()
        self._tick = self.loop.call_later(_TICK_S, self._poke)

    @property
    def addresses(self) -> list[str]:
        """Where each group's ranks dial, as bound."""
        return [port.address for port in self._ports.values()]

    def is_up(self, process: int) -> bool:
        """Whether the process listens."""
        return process in self._up

    def configure(self, config: Config) -> None:
        """Bind what is new. Raises OSError, with nothing changed; LinkError names the address."""
        opened: dict[int, _Port] = {}
        try:
            for number, group in enumerate(config.groups):
                if number not in self._ports:
                    check_handshake(group.handshake, allow_wildcard=config.listen.allow_wildcard)
                    opened[number] = _Port(self, number, group)
        except BaseException:
            for port in opened.values():
                port.close()
            raise
        self.config = config
        self._ports |= opened
        for number in [number for number in self._ports if number >= len(config.groups)]:
            self._ports.pop(number).close()

    def started(self, process: int) -> None:
        """The process listens."""
        self._up.add(process)
        for port in self._ports.values():
            port.started(process)

    def died(self, process: int) -> None:
        """The process has ended."""
        self._up.discard(process)
        for port in self._ports.values():
            port.died(process)

    async def close(self) -> None:
        """Close all sockets. Idempotent."""
        self._tick.cancel()
        for port in self._ports.values():
            port.close()
        self._ports.clear()
        await asyncio.to_thread(self.context.destroy, 0)

    def _poke(self) -> None:
        self._tick = self.loop.call_later(_TICK_S, self._poke)
        for port in self._ports.values():
            port.poke()

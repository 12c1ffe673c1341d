"""The coordinator's sockets of one rank incarnation, and where the ranks of a lockstep group meet.

As its other sockets they are the rank's own, so whatever arrives is this rank's; and the answer to one rank's
subscription doesn't reach another that serves already, which older releases would not survive.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Protocol

import zmq

from gateway.config.schema import Group
from gateway.core.events import LoadReported, RankHeard, WaveReported
from gateway.edges.engine_link.endpoints import remove_ipc_path
from gateway.edges.engine_link.env import LinkEnv
from gateway.edges.engine_link.monitored import Binder, Context
from gateway.edges.engine_link.reader import Socket, SocketReader
from gateway.types import EngineBatch, EngineControl, EngineLoad, EngineNoise
from gateway.wire.handshake import meeting_point
from gateway.wire.protocol import CoordinatorProtocol

SOCKETS_PER_COORDINATOR = 2
MAX_SUBSCRIPTION_BYTES = 4096
MAX_REPORT_BYTES = 64 * 1024
"""A report has under 1 kB; libzmq cuts off whoever sends more."""
MEETING_PORTS = 6
"""One for the group of the engines, one for that of their models, the rest for what a rank may open later."""

_INPUT: dict[int, int] = {
    # Without it a second subscription to the same is swallowed, and a rank that dialled again before its first connection
    # was seen to end would wait for its answer for ever.
    zmq.XPUB_VERBOSE: 1,
    zmq.MAXMSGSIZE: MAX_SUBSCRIPTION_BYTES,
}
_OUTPUT: dict[int, int] = {zmq.RCVHWM: 0, zmq.MAXMSGSIZE: MAX_REPORT_BYTES}


class CoordinatorOwner(Protocol):
    """Who is told what a rank says to its coordinator. Called from the event loop."""

    def on_subscribed(self) -> None:
        """The rank asks for what is published: it starts, or has dialled again."""
        ...

    def on_report(self, frames: list[zmq.Frame]) -> None:
        """The rank pushed a report."""
        ...


class Coordinator:
    """Both sockets, bound; `options` are those of all sockets to ranks. Raises what the binders raise."""

    def __init__(
        self,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        *,
        codec: CoordinatorProtocol,
        options: Mapping[int, int],
        binders: tuple[Binder, Binder],
        owner: CoordinatorOwner,
        is_released: bool,
    ) -> None:
        self._codec = codec
        self._owner = owner
        self.is_released = is_released
        """Whether the rank has its answer: before, it would take anything else for it."""
        self._last_start: list[bytes] | None = None
        self._sockets: list[Socket] = []
        self._readers: list[SocketReader] = []
        try:
            bind_input, bind_output = binders
            self.input_address = self._open(context, zmq.XPUB, {**options, **_INPUT}, bind_input)
            self.output_address = self._open(context, zmq.PULL, {**options, **_OUTPUT}, bind_output)
        except BaseException:
            for each in self._sockets:
                each.close()
            raise
        handlers = (self._on_subscription, owner.on_report)
        for each, handler in zip(self._sockets, handlers, strict=True):
            self._readers.append(SocketReader(loop, each, handler))

    def start_wave(self, wave: int) -> None:
        """Make the rank step. One that is still starting hears of the wave when it has joined."""
        if self.is_released:
            self._last_start = self._codec.encode_start_wave(wave)
            self._publish(self._last_start)

    def release(self) -> None:
        """Answer the subscription of a rank that starts."""
        self.is_released = True
        self._publish([self._codec.ready])

    def repeat(self) -> None:
        """A rank that serves has dialled again: what was published in between was lost, and a rank ignores repetitions."""
        if self._last_start is not None:
            self._publish(self._last_start)

    def poke(self) -> None:
        """Look for what the descriptors may have failed to announce."""
        for reader in self._readers:
            reader.poke()

    def close(self) -> None:
        """Close both sockets. Idempotent."""
        for reader in self._readers:
            reader.close()
        for each in self._sockets:
            each.close()
        for address in (self.input_address, self.output_address):
            remove_ipc_path(address)

    def _open(self, context: Context, kind: int, options: dict[int, int], bind: Binder) -> str:
        opened: Socket = context.socket(kind)
        self._sockets.append(opened)
        for option, value in options.items():
            opened.setsockopt(option, value)
        return bind(opened)

    def _publish(self, frames: list[bytes]) -> None:
        # An XPUB never blocks; what a rank that is gone would have got is dropped.
        self._sockets[0].send_multipart(frames, zmq.NOBLOCK)
        self._readers[0].poke()

    def _on_subscription(self, frames: list[zmq.Frame]) -> None:
        if self._codec.is_subscription(frames[0].buffer):
            self._owner.on_subscribed()


class ReportIntake:
    """Turns what one rank pushes into events. Of the loads that come in one turn of the loop the last one counts."""

    def __init__(self, env: LinkEnv, codec: CoordinatorProtocol, rank: int, engine_index: int) -> None:
        self._env = env
        self._codec = codec
        self._rank = rank
        self._engine_index = engine_index
        self._latest: tuple[int, EngineLoad] | None = None

    def take(self, frames: list[zmq.Frame], incarnation: int | None) -> bool:
        """Handle one report; True if it is a sign of life. Without an incarnation nobody has joined whom it could be about."""
        counters = self._env.counters
        counters.reports += 1
        message = self._codec.decode_report([frame.buffer for frame in frames])
        if isinstance(message, EngineNoise):
            counters.noise.add(message.reason)
            self._env.limited_log.warning("report_noise", rank=self._rank, reason=message.reason)
        elif incarnation is None:
            counters.early_frames += 1
        elif isinstance(message, EngineBatch):
            self._cross_check(message.engine_index)
            self._take_load(message, incarnation)
            return True
        elif isinstance(message, EngineControl):
            self._cross_check(message.engine_index)
            self._env.events.emit(WaveReported(self._rank, incarnation, message.wave_complete, message.start_wave))
            return True
        return False

    def _cross_check(self, claimed: int | None) -> None:
        if claimed is not None and claimed != self._engine_index:
            self._env.counters.index_mismatch += 1
            self._env.limited_log.warning("engine_index_mismatch", rank=self._rank, claimed=claimed)

    def _take_load(self, batch: EngineBatch, incarnation: int) -> None:
        if batch.load is None:
            self._env.counters.load_faults.add(str(batch.load_fault))
            self._env.events.emit(RankHeard(self._rank, incarnation))
            return
        if self._latest is None:
            self._env.loop.call_soon(self._pass_on)
        self._latest = (incarnation, batch.load)

    def _pass_on(self) -> None:
        assert self._latest is not None
        (incarnation, load), self._latest = self._latest, None
        self._env.events.emit(LoadReported(self._rank, incarnation, load))


class MeetingPoint:
    """Where the ranks of one lockstep group meet: fresh ports for every start of the group.

    A rank that asks again is the first one of another start. Ranks that were given different ports fail in their own
    start-up, and ask again.
    """

    def __init__(self, group: Group, find_ports: Callable[[str, int], list[int]] | None = None) -> None:
        self._group = group
        self._find_ports = find_ports or free_ports
        self._given: set[int] = set()
        self._ports: list[int] = []

    def give(self, index: int) -> dict[str, object]:
        """The `parallel_config` for the rank at `index`. Raises OSError when there is no port."""
        group = self._group
        host = group.coordinator.meeting_host or (
            "127.0.0.1" if group.sockets.transport == "ipc" else group.sockets.host
        )
        host = host.strip("[]")
        if not self._ports or index in self._given:
            self._ports = self._find_ports(host, MEETING_PORTS)
            self._given.clear()
        self._given.add(index)
        return meeting_point(host, self._ports, group.ranks)


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody uses now, on `host` if it is this one; on another host they are likely to be free as well."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probes: list[socket.socket] = []
    try:
        for _ in range(count):
            probes.append(socket.socket(family, socket.SOCK_STREAM))
            try:
                probes[-1].bind((host, 0))
            except OSError:
                probes[-1].bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()

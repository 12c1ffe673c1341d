"""The southbound edge as one object: starts and stops it, and routes sends to the rank they are for.

Everything runs on one event loop without tasks: socket callbacks, and `look`, which whoever owns the link calls every `LOOK_S`.
"""

import asyncio
import os
import resource
from collections.abc import Callable, Iterable

import zmq
from structlog.typing import FilteringBoundLogger

from gateway.config.checks import MAX_RANKS
from gateway.config.schema import Config
from gateway.core.events import Event
from gateway.edges.engine_link.channel import FDS_PER_CHANNEL, SOCKETS_PER_CHANNEL
from gateway.edges.engine_link.coordinator import MeetingPoint
from gateway.edges.engine_link.counters import LimitedLog, LinkCounters
from gateway.edges.engine_link.endpoints import Endpoints
from gateway.edges.engine_link.env import EventQueue, LinkEnv
from gateway.edges.engine_link.handshake_port import HandshakePort
from gateway.edges.engine_link.io_thread import may_batch_io_thread
from gateway.edges.engine_link.rank_link import LinkState, RankLink
from gateway.edges.state_store import StateStore
from gateway.types import EngineRequest
from gateway.wire.registry import protocol_for

LOOK_S = 0.25
"""How often `look` is to be called."""
RANKS_PER_LOOK = 320
"""Looking at one rank costs about 5 µs; with more ranks than this each gets its turn less often."""
MONITOR_ROUNDS = 2
"""Monitors are looked at every other time: a lost edge there only delays a loss."""
CLOSE_LINGER_MS = 200
"""What the last aborts get to leave at close."""
_SPARE_FDS = 256


class EngineLink:
    """Implements `driver.Link`. `emit` is never called from inside `send` or `abort`.

    With a `store`, ranks of an earlier process are awaited on their recorded addresses; the link opens
    and closes the store. `client_index` is this gateway's place among those that a rank connects to.
    """

    def __init__(
        self,
        config: Config,
        *,
        emit: Callable[[Event], None],
        log: FilteringBoundLogger,
        store: StateStore | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        client_index: int = 0,
    ) -> None:
        self._client_index = client_index
        self.counters = LinkCounters()
        self._config = self._layout = config
        self._emit = emit
        self._log = log
        self._store = store
        self._loop = loop
        self._env: LinkEnv | None = None
        self._ports: dict[int, HandshakePort] = {}
        self._ranks: list[RankLink] = []
        self._meetings: dict[int, MeetingPoint] = {}
        # Per rank its group's number and its place in it; None once it is configured no more.
        self._places: list[tuple[int, int] | None] = []
        self._next_poked = 0
        self._poke_rounds = 0

    @property
    def handshake_addresses(self) -> list[str]:
        """Where each group's ranks dial, as bound (a port 0 in the configuration is resolved)."""
        return [port.address for port in self._ports.values()]

    def state_of(self, rank: int) -> LinkState:
        """Where a rank is in its handshake; for logs and tests."""
        return self._ranks[rank].state

    async def start(self) -> None:
        """Bind everything and await recorded ranks. Raises OSError; LinkError names the address."""
        loop = self._loop or asyncio.get_running_loop()
        try:
            self._open(loop)
        except BaseException:
            await self.close()
            raise

    def send(self, rank: int, incarnation: int, request: EngineRequest) -> None:
        """Hand an ADD to the rank. What goes wrong comes back as `SendFailed`."""
        self._ranks[rank].send(incarnation, request)

    def renew(self, rank: int, incarnation: int) -> None:
        """The core gave up an incarnation that is silent: the rank's sockets begin the next one (`RankRenewed`)."""
        self._ranks[rank].renew(incarnation)

    def start_wave(self, ranks: Iterable[int], wave: int) -> None:
        """Make the ranks of a lockstep group step, as far as they are there."""
        for rank in ranks:
            self._ranks[rank].start_wave(wave)

    def abort(self, rank: int, incarnation: int, wire_ids: list[str]) -> None:
        """Hand an ABORT to the rank; an ADD that is still queued here is taken back instead."""
        self._ranks[rank].abort(incarnation, wire_ids)

    def configure(self, config: Config, layout: Config) -> None:
        """Take in the ranks and groups that are new. The others' sockets stay as they are.

        `layout` is the configuration with the ranks that are still leaving (see `remove`). Raises OSError, with nothing
        changed; LinkError names the address.
        """
        env = self._env
        assert env is not None
        new = [number for number in range(len(config.groups)) if number not in self._ports]
        env.endpoints.prepare(layout, new)
        opened: dict[int, HandshakePort] = {}
        try:
            for number in new:
                opened[number] = port = HandshakePort(config.groups[number], env.counters, env.limited_log)
                port.open(env.context, env.loop)
        except BaseException:
            for port in opened.values():
                port.close()
            env.endpoints.prepare(self._layout, ())
            raise
        self._ports |= opened
        self._config, self._layout = config, layout
        self._add_ranks(env)
        for number, port in opened.items():
            group = config.groups[number]
            self._log.info("handshake_bound", group=group.name, address=port.address, ranks=group.ranks)

    def remove(self, rank: int) -> None:
        """Close the rank's sockets and forget it; the handshake address of a group without ranks is given up."""
        place = self._places[rank]
        if place is None:
            return
        self._places[rank] = None
        self._ranks[rank].retire(CLOSE_LINGER_MS)
        number, index = place
        port = self._ports[number]
        port.remove(index)
        if port.is_idle:
            del self._ports[number]
            self._meetings.pop(number, None)
            port.close()
            self._log.info("handshake_closed", address=port.address)

    def look(self) -> None:
        """Look for what the sockets' descriptors may have failed to announce, and let refused sends try again."""
        if self._env is None:
            return
        for port in self._ports.values():
            port.poke()
        with_monitors = self._poke_rounds % MONITOR_ROUNDS == 0
        first = self._next_poked
        for rank in self._ranks[first : first + RANKS_PER_LOOK]:
            rank.poke(with_monitors=with_monitors)
        self._next_poked = first + RANKS_PER_LOOK
        if self._next_poked >= len(self._ranks):
            self._next_poked = 0
            self._poke_rounds += 1

    async def close(self) -> None:
        """Close all sockets and wait until they are gone. Running ranks don't notice. Idempotent."""
        env, self._env = self._env, None
        if env is None:
            return
        env.events.close()
        for port in self._ports.values():
            port.close()
        for rank in self._ranks:
            rank.close(CLOSE_LINGER_MS)
        # Waits for the lingering sockets, so not on the loop.
        await asyncio.to_thread(env.context.term)
        env.endpoints.close()
        if self._store is not None:
            self._store.close()

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        config = self._config
        context = zmq.Context()
        # For as many ranks as there can ever be: the limit can't be raised later. Twice, since a rank that shakes hands
        # again has old and new sockets for a moment.
        context.set(zmq.MAX_SOCKETS, 64 + 2 * SOCKETS_PER_CHANNEL * MAX_RANKS)
        if may_batch_io_thread():
            context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        store = self._store
        self._env = LinkEnv(
            loop=loop,
            context=context,
            events=EventQueue(loop, self._emit),
            counters=self.counters,
            endpoints=Endpoints(config, store.directory if store is not None else None),
            store=store,
            max_context_tokens=config.model.max_context_tokens,
            log=self._log,
            limited_log=LimitedLog(self._log, loop.time),
        )
        if store is not None:
            store.open()
        self.configure(config, config)

    def _add_ranks(self, env: LinkEnv) -> None:
        """Make what is missing of the configuration's ranks."""
        places = [(number, index) for number, group in enumerate(self._config.groups) for index in range(group.ranks)]
        self._check_fd_limit(len(places))
        for number, place in enumerate(places):
            if number < len(self._places) and self._places[number] is not None:
                continue
            rank = self._make_rank(env, number, *place)
            # A rank that was removed and is wanted again starts anew.
            self._places[number : number + 1] = [place]
            self._ranks[number : number + 1] = [rank]
            rank.restore()
            self._ports[place[0]].add(place[1], rank)

    def _make_rank(self, env: LinkEnv, rank: int, number: int, index: int) -> RankLink:
        group = self._config.groups[number]
        return RankLink(
            env,
            rank=rank,
            group=group,
            group_number=number,
            index=index,
            protocol=protocol_for(group.protocol, client_index=self._client_index),
            send_init=self._ports[number].send_init,
            meeting=self._meetings.setdefault(number, MeetingPoint(group)) if group.has_waves else None,
        )

    def _check_fd_limit(self, rank_count: int) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = rank_count * FDS_PER_CHANNEL + _SPARE_FDS
        if soft != resource.RLIM_INFINITY and soft < needed:
            self._log.warning("open_files_limit_low", limit=soft, needed=needed, ranks=rank_count)

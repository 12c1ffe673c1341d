"""The southbound edge as one object: starts and stops it, and routes sends to the rank they are for.

Everything runs on one event loop without tasks: socket callbacks, and one safety tick.
"""

import asyncio
import resource
from collections.abc import Callable

import zmq
from structlog.typing import FilteringBoundLogger

from gateway.config.schema import Config
from gateway.core.events import Event
from gateway.edges.engine_link.channel import FDS_PER_CHANNEL, SOCKETS_PER_CHANNEL
from gateway.edges.engine_link.counters import LimitedLog, LinkCounters
from gateway.edges.engine_link.endpoints import Endpoints
from gateway.edges.engine_link.env import EventQueue, LinkEnv
from gateway.edges.engine_link.handshake_port import HandshakePort
from gateway.edges.engine_link.rank_link import LinkState, RankLink
from gateway.edges.state_store import StateStore
from gateway.types import EngineRequest
from gateway.wire.registry import protocol_for

TICK_S = 0.05
RANKS_PER_TICK = 64
"""Looking at one rank costs about 5 µs; with more ranks than this each gets its turn less often."""
MONITOR_ROUNDS = 10
"""Monitors are looked at every tenth time: a lost edge there only delays a loss."""
CLOSE_LINGER_MS = 200
"""What the last aborts get to leave at close."""
_SPARE_FDS = 256


class EngineLink:
    """Implements `driver.Link`. `emit` is never called from inside `send` or `abort`.

    With a `store`, ranks of an earlier process are awaited on their recorded addresses; the link opens
    and closes the store.
    """

    def __init__(
        self,
        config: Config,
        *,
        emit: Callable[[Event], None],
        log: FilteringBoundLogger,
        store: StateStore | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.counters = LinkCounters()
        self._config = config
        self._emit = emit
        self._log = log
        self._store = store
        self._loop = loop
        self._env: LinkEnv | None = None
        self._ports: list[HandshakePort] = []
        self._ranks: list[RankLink] = []
        self._tick_handle: asyncio.TimerHandle | None = None
        self._next_poked = 0
        self._poke_rounds = 0

    @property
    def handshake_addresses(self) -> list[str]:
        """Where each group's ranks dial, as bound (a port 0 in the configuration is resolved)."""
        return [port.address for port in self._ports]

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
        self._tick_handle = loop.call_later(TICK_S, self._tick)

    def send(self, rank: int, incarnation: int, request: EngineRequest) -> None:
        """Hand an ADD to the rank. What goes wrong comes back as `SendFailed`."""
        self._ranks[rank].send(incarnation, request)

    def abort(self, rank: int, incarnation: int, wire_ids: list[str]) -> None:
        """Hand an ABORT to the rank; an ADD that is still queued here is taken back instead."""
        self._ranks[rank].abort(incarnation, wire_ids)

    async def close(self) -> None:
        """Close all sockets and wait until they are gone. Running ranks don't notice. Idempotent."""
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None
        env, self._env = self._env, None
        if env is None:
            return
        env.events.close()
        for port in self._ports:
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
        rank_count = sum(group.ranks for group in config.groups)
        context = zmq.Context()
        # Twice, since a rank that shakes hands again has old and new sockets for a moment.
        context.set(zmq.MAX_SOCKETS, 64 + 2 * SOCKETS_PER_CHANNEL * rank_count)
        store = self._store
        self._env = LinkEnv(
            loop=loop,
            context=context,
            events=EventQueue(loop, self._emit),
            counters=self.counters,
            endpoints=Endpoints(config, store.directory if store is not None else None),
            store=store,
            log=self._log,
            limited_log=LimitedLog(self._log, loop.time),
        )
        if store is not None:
            store.open()
        self._check_fd_limit(rank_count)
        self._env.endpoints.prepare()
        self._open_groups(self._env)

    def _open_groups(self, env: LinkEnv) -> None:
        for number, group in enumerate(self._config.groups):
            port = HandshakePort(group, env.counters, env.limited_log)
            ranks = [
                RankLink(
                    env,
                    rank=len(self._ranks) + index,
                    group=group,
                    group_number=number,
                    index=index,
                    protocol=protocol_for(group.protocol),
                    send_init=port.send_init,
                )
                for index in range(group.ranks)
            ]
            self._ports.append(port)
            self._ranks.extend(ranks)
            port.open(env.context, env.loop, ranks)
            for rank in ranks:
                rank.restore()
            self._log.info("handshake_bound", group=group.name, address=port.address, ranks=group.ranks)

    def _check_fd_limit(self, rank_count: int) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = rank_count * FDS_PER_CHANNEL + _SPARE_FDS
        if soft != resource.RLIM_INFINITY and soft < needed:
            self._log.warning("open_files_limit_low", limit=soft, needed=needed, ranks=rank_count)

    def _tick(self) -> None:
        assert self._env is not None
        self._tick_handle = self._env.loop.call_later(TICK_S, self._tick)
        for port in self._ports:
            port.poke()
        with_monitors = self._poke_rounds % MONITOR_ROUNDS == 0
        first = self._next_poked
        for rank in self._ranks[first : first + RANKS_PER_TICK]:
            rank.poke(with_monitors=with_monitors)
        self._next_poked = first + RANKS_PER_TICK
        if self._next_poked >= len(self._ranks):
            self._next_poked = 0
            self._poke_rounds += 1

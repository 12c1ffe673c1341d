"""The composition root: the only module that knows every edge. Builds, runs, drains and stops them."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from gateway import __version__
from gateway.config.effective import cautions
from gateway.config.schema import Config
from gateway.core.effects import AuditFound, RankStateChanged
from gateway.core.errors import Reason
from gateway.core.events import AbortAll, BatchReceived, DrainStarted, Event, Reconfigured
from gateway.core.ranks import RankState
from gateway.core.reconfigure import with_leaving_ranks
from gateway.core.request import Request
from gateway.core.router import Router
from gateway.edges import logs
from gateway.edges.driver import Driver
from gateway.edges.engine_link.link import LOOK_S, EngineLink
from gateway.edges.grpc_engine import engine_service
from gateway.edges.grpc_server import GrpcServers
from gateway.edges.metrics import Metrics
from gateway.edges.reload import Reloader
from gateway.edges.security import Security
from gateway.edges.service_manager import ServiceManager
from gateway.edges.state_store import StateStore
from gateway.edges.ticks import INTERVAL_S
from gateway.native import compiled

_DRAIN_POLL_S = 0.02
_DECISIONS_EACH = 10**12
"""Ids that each process has for its decisions, from one more than a multiple of it."""
_FLUSH_GRACE_S = 2.0
_WARNED = (RankState.LOST, RankState.SUSPECT, RankState.EJECTED)


class Seat(NamedTuple):
    """A gateway's place among others that one supervisor keeps. Alone, it has none of its own.

    `client_index` is the place of its addresses in what ranks are told.
    """

    process: int | None = None
    client_index: int = 0
    make_reloader: Callable[..., Reloader] = Reloader
    make_servers: Callable[..., GrpcServers] = GrpcServers


_ALONE = Seat()


class Gateway:
    """One running gateway, to `start` and `stop`; `gateway.process` adds what a process has around it.

    `load` reads the configuration again, for reloads; raises ConfigError.
    """

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config] | None = None,
        manager: ServiceManager | None = None,
        seat: Seat = _ALONE,
    ) -> None:
        self.config = config
        self.log = structlog.get_logger("gateway")
        if seat.process is not None:
            self.log = self.log.bind(process=seat.process)
        self._seat = seat
        self.manager = ServiceManager({}) if manager is None else manager
        self._random = random.Random(config.policy.seed)  # noqa: S311 - spreading load is no secret
        self.router = Router(config, nonce=secrets.token_hex(8), rng=self._random.random)
        if seat.process:
            self.router.decisions.begin_at(seat.process * _DECISIONS_EACH + 1)
        self.driver = Driver(
            self.router,
            on_ended=self._on_ended,
            on_rank_change=self._on_rank_change,
            on_audit=self._on_audit,
            on_defect=self._on_defect,
        )
        store = StateStore(config.state_dir) if config.state_dir is not None else None
        self.link = EngineLink(
            config, emit=self._on_engine_event, log=self.log, store=store, client_index=seat.client_index
        )
        self.driver.link = self.link
        self.driver.ticks.every(LOOK_S, self.link.look)
        self.driver.ticks.every(INTERVAL_S, logs.write_waiting)
        self.driver.configure(config)
        self.security = Security(config.listen)
        self.reloader = None if load is None else self._make_reloader(load)
        engine = engine_service(config, self.driver)
        self.servers = seat.make_servers(config, self.driver, [engine], self.security, self.reloader)
        self.metrics = Metrics(
            config,
            self.router,
            self.link.counters,
            security=self.security,
            gate=self.servers.gate,
            reloader=self.reloader,
        )
        self.is_ready = False

    async def start(self) -> None:
        """Bind everything. Raises OSError (credentials, metrics, engine sockets) or ListenError; nothing stays bound then."""
        try:
            await self.security.start()
            self._start_metrics()
            await self.link.start()
            await self.servers.start()
        except BaseException:
            await self._close()
            raise
        self.driver.ticks.start()
        self._check_ready()
        self.log.info(
            "started",
            version=__version__,
            grpc=self.servers.grpc_address,
            admin=self.servers.admin_address,
            metrics=self.config.listen.metrics,
            transport=self.config.listen.transport,
            native=compiled is not None,
            tls=self.config.listen.tls is not None,
            auth=self.config.listen.auth is not None,
            handshakes=self.link.handshake_addresses,
            ranks=self.router.ranks.size,
            policy=self.config.policy.preset or "custom",
            mode=self.config.scheduling.mode,
            ordering=self.config.ordering,
        )
        for remark in cautions(self.config):
            self.log.warning("config_remark", remark=remark)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Readiness off, wait, refuse new requests, let the live ones end. `hurry` cuts every wait short."""
        drain = self.config.drain
        self.driver.is_stopping = True
        self.manager.stopping(self.status())
        self.log.info("draining", live=self.router.live_count, delay_s=drain.delay_s, grace_s=drain.grace_s)
        self._check_ready()
        await _wait(hurry, drain.delay_s)
        self.driver.emit(DrainStarted())
        deadline = time.monotonic() + drain.grace_s
        while self.router.live_count and not hurry.is_set() and time.monotonic() < deadline:
            await _wait(hurry, _DRAIN_POLL_S)
        if self.router.live_count:
            self.log.warning("drain_incomplete", live=self.router.live_count)
            self.driver.emit(AbortAll(Reason.DRAINING))

    async def stop(self) -> None:
        """End what is live, say so to clients and ranks, and close everything."""
        self.driver.is_stopping = True
        self.driver.emit(AbortAll(Reason.DRAINING))
        await asyncio.sleep(0)
        await self._close()
        self.log.info("stopped", accepted=self.router.counters.accepted, ended=dict(self.router.counters.ended))

    def reconfigure(self, config: Config) -> None:
        """Put another configuration in force, which `gateway.config.changes.refusals` has nothing against.

        Raises OSError when an address can't be bound; nothing has changed then.
        """
        if self.driver.is_stopping:
            raise OSError("the gateway is stopping")
        self.link.configure(config, with_leaving_ranks(config, self.router.layout))
        before, self.config = self.config, config
        if config.policy.seed != before.policy.seed:
            self._random.seed(config.policy.seed)
        self.driver.emit(Reconfigured(config))
        self.driver.configure(config)
        self.servers.configure(config)
        self.metrics.configure(config)
        if config.observability.log_level != before.observability.log_level:
            logs.configure(config.observability.log_level, config.observability.log_format)
        self._check_ready()

    def status(self) -> str:
        """One line for people."""
        states = self.router.ranks.state
        ready = f"{states.count(RankState.READY)} of {len(states)} ranks READY"
        return f"draining, {self.router.live_count} requests live" if self.driver.is_stopping else ready

    def _make_reloader(self, load: Callable[[], Config]) -> Reloader:
        def around(is_before: bool) -> None:
            if self.driver.is_stopping:
                return  # which is what the service manager knows, and no reload changes
            if is_before:
                self.manager.reloading()
            else:
                self.manager.ready(self.status())

        make = self._seat.make_reloader
        return make(load, in_force=lambda: (self.config, self.router.layout), apply=self.reconfigure, around=around)

    def _start_metrics(self) -> None:
        if self.config.listen.metrics is not None:
            host, _, port = self.config.listen.metrics.rpartition(":")
            self.metrics.start(host.strip("[]"), int(port))

    async def _close(self) -> None:
        self.driver.ticks.stop()
        await self.servers.stop(_FLUSH_GRACE_S)
        await self.link.close()
        self.metrics.stop()
        await self.security.stop()

    def _on_engine_event(self, event: Event) -> None:
        if type(event) is BatchReceived:  # isinstance costs 0.3 us with a Struct, whose metaclass is an ABCMeta
            now = self.driver.clock()
            self.metrics.observe_batch(event, now)
            self.driver.emit(event, now)
        else:
            self.driver.emit(event)

    def _on_ended(self, request: Request) -> None:
        now = self.driver.clock()
        self.metrics.observe_ended(request, now)
        logs.terminal_line(self.log, request, now)

    def _on_rank_change(self, change: RankStateChanged) -> None:
        write = self.log.warning if change.new in _WARNED else self.log.info
        write(
            "rank_state",
            rank=change.rank,
            incarnation=change.incarnation,
            old=change.old,
            new=change.new,
            cause=change.cause,
        )
        self.manager.status(self.status())
        self._check_ready()

    def _on_audit(self, found: AuditFound) -> None:
        self.log.error(
            "audit",
            kind=found.kind,
            rank=found.rank,
            incarnation=found.incarnation,
            batches=found.batches,
            subject=found.subject,
        )

    def _on_defect(self, where: str, error: Exception) -> None:
        self.log.error("defect", where=where, exc_info=error)

    def _check_ready(self) -> None:
        """Ready: every group has its `min_ready` READY ranks, and the gateway is not stopping."""
        is_ready = self.router.why_not_ready() is None and not self.driver.is_stopping
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self.servers.set_ready(is_ready=is_ready)
            self.log.info("readiness", ready=is_ready)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass

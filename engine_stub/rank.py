"""One rank through its incarnations, for tests to look into and to break."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from engine_stub import views
from engine_stub.backend import Backend
from engine_stub.config import StubConfig
from engine_stub.dial import Dialler
from engine_stub.engine import RankEngine, ScriptedRow
from engine_stub.faults import Faults, changed
from engine_stub.kv_events import KvEventPublisher
from engine_stub.lockstep import Barrier
from engine_stub.records import Records
from engine_stub.scheduler import Request
from engine_stub.serving import Serving
from engine_stub.sockets import Frames
from engine_stub.wire.codec import SENTINEL, Load, RankCard
from engine_stub.wire.handshake import HandshakeError

LOG = logging.getLogger("engine_stub")


class RankPhase(StrEnum):
    """Where a rank is."""

    DIALING = "dialing"
    SERVING = "serving"
    DEAD = "dead"
    FAILED = "failed"
    """Its handshake failed; `ready` and the log say why."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a group have in common."""

    dialler: Dialler
    make_backend: Callable[[], Backend]
    config: StubConfig
    auto_step: bool
    record_limit: int
    barrier: Barrier | None = None
    on_misfit: Callable[[], None]


class StubRank:
    """One rank of a `StubGroup`. `records` counts over all incarnations, `engine` is the current one."""

    def __init__(self, number: int, card: RankCard, settings: RankSettings) -> None:
        self.number = number
        self.names = {"engine_index": card.index, "rank": number}
        """What the log calls it: by its index in the gateway's group, then by its number for the control socket."""
        self.phase = RankPhase.DEAD
        self.incarnation = 0
        self.is_misfit = False
        """Whether it was sent a request of the other family. The engine goes on as a real one would."""
        self.records = Records(settings.record_limit)
        self._settings = settings
        config = settings.config
        self.kv_events: KvEventPublisher | None = None
        if config.kv_events.endpoint is not None:
            self.kv_events = KvEventPublisher(
                settings.dialler.context, config.kv_events, rank=card.index, block_size=config.scheduler.block_size
            )
            card = msgspec.structs.replace(card, kv_events=self.kv_events.ready_config)
        self._card = card
        self.engine = self._new_engine(settings.config.faults_of(number))
        self._serving: Serving | None = None
        self._dial_task: asyncio.Task[None] | None = None
        self._failure: HandshakeError | None = None
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    # What there is to see.

    @property
    def live_ids(self) -> frozenset[str]:
        """Ids that the rank holds now; empty when it is dead."""
        return self.engine.live_ids if self.phase is RankPhase.SERVING else frozenset()

    @property
    def faults(self) -> Faults:
        """The faults in effect."""
        return self.engine.faults

    @property
    def received_adds(self) -> Sequence[Request]:
        """The latest requests, good and bad, oldest first."""
        return self.records.received_adds

    @property
    def received_aborts(self) -> Sequence[str]:
        """The latest aborted ids, oldest first."""
        return self.records.received_aborts

    @property
    def tokens_generated(self) -> int:
        """Tokens over all incarnations."""
        return self.records.tokens

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float | None = 10.0) -> None:
        """Wait until `predicate()` holds; looked at after every input, step and change of phase (TimeoutError)."""
        if predicate():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((predicate, future))
        async with asyncio.timeout(timeout_s):
            await future

    @property
    def is_serving(self) -> bool:
        """Whether an incarnation is registered and alive."""
        return self.phase is RankPhase.SERVING

    @property
    def config(self) -> StubConfig:
        """The group's settings."""
        return self._settings.config

    def state(self) -> dict[str, Any]:
        """A JSON-safe picture for the control socket."""
        return views.state(self)

    # Life cycle.

    def start(self) -> None:
        """Begin an incarnation: dial and serve."""
        assert self.phase is not RankPhase.SERVING, "already serving"
        assert self._dial_task is None, "already dialling"
        self.incarnation += 1
        self.phase = RankPhase.DIALING
        self._failure = None
        self._dial_task = asyncio.get_running_loop().create_task(self._dial(), name=f"dial-rank-{self.number}")

    async def ready(self, timeout_s: float | None = 30.0) -> None:
        """Wait until the rank has registered; raises HandshakeError when it can't, TimeoutError when it doesn't."""
        await self.wait_until(lambda: self.phase is not RankPhase.DIALING, timeout_s)
        if self._failure is not None:
            raise self._failure

    async def kill(self) -> None:
        """Die now, as by SIGKILL: sockets closed, nothing flushed."""
        await self._stop_dialling()
        if self._serving is not None:
            self._serving.close(0)
        self._bury()

    def close(self) -> None:
        """Let go of what outlives an incarnation. The rank can't be started any more."""
        if self.kv_events is not None:
            self.kv_events.close()

    async def restart(self, faults: Faults | None = None) -> None:
        """Dial again as a new incarnation, healthy unless told otherwise; `ready` waits for its registration."""
        await self.kill()
        self.engine = self._new_engine(faults or Faults())
        self.start()

    async def shut_down(self, linger_ms: int) -> None:
        """End as the real engine does on SIGTERM: the sentinel, or an `abort` row per live request."""
        if self._serving is not None:
            if self.engine.codec.announces_shutdown:
                self._serving.send([[SENTINEL]])
            else:
                self._serving.send(self.engine.abort_all(time.monotonic()))
            self._serving.close(linger_ms)
        await self.kill()

    def set_faults(self, **changes: object) -> None:
        """Switch single faults (fields of `Faults`); raises msgspec.ValidationError."""
        faults = changed(self.faults, changes)
        if self._serving is None:
            self.engine.faults = faults
        else:
            self._serving.apply(faults)

    # By hand.

    async def step(self) -> bool:
        """Manual mode: read what has arrived and run one step at once; whether there was one."""
        assert not self._settings.auto_step, "the rank steps by itself"
        await asyncio.sleep(0)
        return self._serving is not None and self._serving.step()

    def send_rows(self, rows: Sequence[ScriptedRow] = (), load: Load | None = None) -> None:
        """Send a batch of the test's making: rows `(id, new tokens, finish)` and a snapshot (None: none).

        Tokens count as generated, a finish ends the request at the rank; faults don't apply.
        """
        self.send_raw(self.engine.scripted(rows, load, time.monotonic()))
        self._notify()

    def send_raw(self, frames: Frames) -> None:
        """Send any message on the output socket."""
        assert self._serving is not None, "the rank is not serving"
        self._serving.send([frames])

    # Inside.

    def _new_engine(self, faults: Faults) -> RankEngine:
        settings = self._settings
        return RankEngine(
            settings.dialler.codec,
            settings.make_backend(),
            settings.config,
            self._card.index,
            self.records,
            faults,
        )

    async def _dial(self) -> None:
        identity = self._card.index.to_bytes(2, "little")
        try:
            sockets = await self._settings.dialler.dial(identity, self._card, self.faults)
        except HandshakeError as error:
            self._failure = error
            self.phase = RankPhase.FAILED
            LOG.error("handshake_failed", extra={**self.names, "reason": str(error)})  # noqa: TRY400 - the reason says it all
            self._notify()
            return
        except Exception as error:
            self._failure = HandshakeError(f"a defect of the stub: {error!r}")
            self.phase = RankPhase.FAILED
            LOG.exception("handshake_defect", extra=self.names)
            self._notify()
            return
        finally:
            self._dial_task = None
        self._serving = Serving(
            self.engine,
            sockets,
            time_scale=self._settings.config.time_scale,
            auto_step=self._settings.auto_step,
            barrier=(self._settings.barrier, self.number) if self._settings.barrier is not None else None,
            index=self._card.index,
            names=self.names,
            on_change=self._on_change,
            on_death=self._on_death,
        )
        self.phase = RankPhase.SERVING
        if self.kv_events is not None:
            self.kv_events.start_incarnation()
        LOG.info("rank_registered", extra={**self.names, "incarnation": self.incarnation})
        self._serving.apply(self.faults)
        self._notify()

    async def _stop_dialling(self) -> None:
        task = self._dial_task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            self._dial_task = None

    def _on_change(self) -> None:
        if self.kv_events is not None:
            self.kv_events.publish(self.engine.take_cache_events())
        if self.records.foreign is not None and not self.is_misfit:
            self.is_misfit = True
            LOG.error("protocol_mismatch", extra={**self.names, "reason": self.records.foreign})
            self._settings.on_misfit()
        self._notify()

    def _on_death(self) -> None:
        LOG.warning("rank_died", extra={**self.names, "incarnation": self.incarnation})
        self._bury()

    def _bury(self) -> None:
        """The sockets are closed: nothing is served any more."""
        self._serving = None
        self.phase = RankPhase.DEAD
        self._notify()

    def _notify(self) -> None:
        if not self._waiters:
            return
        waiting = []
        for predicate, future in self._waiters:
            if future.done():
                continue
            if predicate():
                future.set_result(None)
            else:
                waiting.append((predicate, future))
        self._waiters = waiting

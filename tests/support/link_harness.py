"""An EngineLink on loopback with everything it emitted, and the check that it leaves nothing behind."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import structlog

from gateway.config.schema import Config, Coordinator, Group, Listen, Model, Sockets
from gateway.core.events import BatchReceived, Event, RankJoined, RankLost, SendBlocked, SendFailed, SendUnblocked
from gateway.edges.engine_link import EngineLink
from gateway.edges.state_store import StateStore
from gateway.edges.ticks import Ticks
from gateway.types import EngineRequest, Sampling
from tests.support.raw_engine import RawEngine, until

ANY_PORT = "tcp://127.0.0.1:0"


def make_config(
    *,
    family: str = "tokenspeed",
    transport: str = "ipc",
    ranks: int = 2,
    handshake: str = ANY_PORT,
    start_index: int = 0,
    allow_wildcard: bool = False,
    coupled: bool = False,
    coordinator: bool = True,
    more_groups: tuple[Group, ...] = (),
    **sockets: object,
) -> Config:
    group = Group(
        name="main",
        protocol=family,
        handshake=handshake,
        ranks=ranks,
        start_index=start_index,
        coupled=coupled,
        coordinator=Coordinator(enabled=coordinator),
        sockets=Sockets(transport=transport, **sockets),
    )
    return Config(
        version=1,
        listen=Listen(allow_wildcard=allow_wildcard),
        model=Model(name="m", max_context_tokens=4096, vocab_size=1000),
        groups=(group, *more_groups),
    )


def request(wire_id: str, prompt_tokens: int = 3) -> EngineRequest:
    return EngineRequest(wire_id=wire_id, prompt_token_ids=list(range(prompt_tokens)), sampling=Sampling(max_tokens=8))


class LinkHarness:
    """The link, its events in order, and the engines that the test started."""

    def __init__(self, config: Config, store: StateStore | None = None) -> None:
        self.config = config
        self.events: list[Event] = []
        self.engines: list[RawEngine] = []
        self.loop_errors: list[BaseException | None] = []
        self.logs = structlog.testing.LogCapture()
        log = structlog.wrap_logger(None, processors=[self.logs], wrapper_class=structlog.BoundLogger)
        self.link = EngineLink(config, emit=self.on_event, log=log, store=store)
        self._ticks = Ticks(time.monotonic, lambda: False, self.loop_errors.append)
        self._ticks.every(0.0, self.link.look)

    async def start(self) -> None:
        await self.link.start()
        self._ticks.start()

    async def close(self) -> None:
        self._ticks.stop()
        await self.link.close()

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def engine(self, index: int = 0, *, group: int = 0, **options: object) -> RawEngine:
        engine = RawEngine(self.link.handshake_addresses[group], index, self.config.groups[group].protocol, **options)
        self.engines.append(engine)
        return engine

    async def joined_engine(self, index: int = 0, **options: object) -> RawEngine:
        engine = self.engine(index, **options)
        count = len(self.joins)
        await engine.join()
        await until(lambda: len(self.joins) > count, "the join")
        return engine

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def stop_ticks(self) -> None:
        """From now on only the descriptors tell."""
        for rank in self.link._ranks:
            rank.poke = lambda *, with_monitors: None

    @property
    def joins(self) -> list[RankJoined]:
        return self.of(RankJoined)

    @property
    def losses(self) -> list[RankLost]:
        return self.of(RankLost)

    @property
    def rows(self) -> list[str]:
        return [wire_id for event in self.of(BatchReceived) for wire_id in event.batch.ids]

    @property
    def send_events(self) -> list[Event]:
        return [event for event in self.events if isinstance(event, SendBlocked | SendUnblocked | SendFailed)]

    def logged(self, event: str) -> list:
        return [entry for entry in self.logs.entries if entry["event"] == event]


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No file descriptor, no task, no directory more than before."""
    fds = open_fds()
    yield
    # Only what is new counts, and what stays: threads of libraries that earlier tests used open and close their own.
    for _ in range(100):
        new = {number: target for number, target in open_fds().items() if fds.get(number) != target}
        if not new:
            break
        time.sleep(0.01)
    assert new == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}


def open_fds() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[entry.name] = str(entry.readlink())
    # The listing has a descriptor too.
    return {number: target for number, target in found.items() if not target.startswith("/proc/")}


@contextlib.asynccontextmanager
async def running_link(
    store_dir: Path | None = None, *, checks_leaks: bool = True, **settings: object
) -> AsyncIterator[LinkHarness]:
    with nothing_left_behind() if checks_leaks else contextlib.nullcontext():
        harness = LinkHarness(make_config(**settings), StateStore(store_dir) if store_dir is not None else None)
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: harness.loop_errors.append(context.get("exception"))
        )
        await harness.start()
        try:
            yield harness
        finally:
            for engine in harness.engines:
                engine.close()
            await harness.close()
        assert not harness.loop_errors

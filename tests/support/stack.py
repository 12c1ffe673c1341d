"""A whole gateway in this process, real stub ranks, real channels; and the check that nothing is left of a test.

`running_gateway` runs that check by itself on leaving, unless the test has failed already.
"""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import msgspec
import structlog

from engine_stub.config import Model, StubConfig
from engine_stub.group import StubGroup
from engine_stub.rank import RankPhase, StubRank
from engine_stub.tokens import expected_tokens
from gateway.app import Gateway
from gateway.config.checks import check
from gateway.config.schema import Config
from gateway.core.ranks import RankState
from gateway.core.request import Request, Sequence
from gateway.types import Protocol
from gateway.v1 import admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tests.support.engine_edge import STUBS
from tests.support.transport import TRANSPORT

VOCAB_SIZE = 32_000
MAX_CONTEXT_TOKENS = 16_384
PROTOCOLS: tuple[Protocol, ...] = ("vllm", "tokenspeed")
WAIT_S = 20.0
"""No healthy run comes near: what is waited for takes milliseconds."""
BODY_S = 40.0
"""Likewise for the body of a test, which ends in order then; pytest's own time-out would break off the loop."""
MAX_FAILED_CALLS_KEPT = 2

Condition = Callable[[], object]


def stub_config(**changes: Any) -> StubConfig:
    """Ranks that step as fast as they can, for the model of `gateway_config`. Top-level keys of `StubConfig`."""
    model = Model(vocab_size=VOCAB_SIZE, max_model_len=MAX_CONTEXT_TOKENS)
    return StubConfig(**({"model": model, "time_scale": 0.0} | changes))


def gateway_config(protocol: Protocol, ranks: int = 2, **sections: Any) -> Config:
    """One group on free loopback ports, metrics off. `sections` are merged into it; `group` into the group."""
    free = "127.0.0.1:0"
    values: dict[str, Any] = {
        "version": 1,
        "listen": {"grpc": free, "admin": free, "metrics": None, "transport": TRANSPORT},
        "model": {"name": "stub", "max_context_tokens": MAX_CONTEXT_TOKENS, "vocab_size": VOCAB_SIZE},
        "policy": {"preset": "lmetric", "seed": 20_261},
        "groups": [
            {"name": "g", "protocol": protocol, "handshake": f"tcp://{free}", "ranks": ranks, "min_ready": ranks}
            | sections.pop("group", {})
        ],
    }
    for key, value in sections.items():
        is_merged = isinstance(value, dict) and isinstance(values.get(key), dict)
        values[key] = values[key] | value if is_merged else value
    config = msgspec.convert(values, Config)
    assert not [problem for problem in check(config) if ":0" not in problem.message]
    return config


async def until(condition: Condition, what: str = "the condition") -> None:
    """Let the loop run until `condition()`; polls, since what is waited for may send no event to this task."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        await asyncio.sleep(0.002)


class Stack:
    """What a test sees: client stubs on one side, ranks on the other, the core in between.

    `group` is None when the test brings ranks of its own.
    """

    def __init__(self, gateway: Gateway, logs: structlog.testing.LogCapture) -> None:
        self.gateway = gateway
        self.router = gateway.router
        self.table = gateway.router.ranks
        self.logs = logs
        self.loop_errors: list[dict[str, Any]] = []
        self.group: StubGroup | None = None
        self.baseline: Counter[str] = Counter()
        self._channels: list[grpc.aio.Channel] = []

    @property
    def ranks(self) -> list[StubRank]:
        return self.group.ranks if self.group is not None else []

    def connect(self, *options: tuple[str, Any]) -> grpc.aio.Channel:
        """One more client, on a connection of its own."""
        unshared = ("grpc.use_local_subchannel_pool", 1)
        channel = grpc.aio.insecure_channel(self.gateway.servers.grpc_address, options=[unshared, *options])
        self._channels.append(channel)
        return channel

    def client(self, *options: tuple[str, Any]) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        """The gateway's own service on a new connection."""
        return gateway_pb2_grpc.GatewayServiceStub(self.connect(*options))

    def engine_client(self) -> Any:
        """The family's standard engine service on a new connection."""
        return STUBS[self.gateway.config.groups[0].protocol](self.connect())

    def admin(self) -> "admin_pb2_grpc.AdminServiceAsyncStub":
        channel = grpc.aio.insecure_channel(self.gateway.servers.admin_address)
        self._channels.append(channel)
        return admin_pb2_grpc.AdminServiceStub(channel)

    async def list_ranks(self) -> list[gateway_pb2.Rank]:
        return list((await self.client().ListRanks(gateway_pb2.ListRanksRequest())).ranks)

    def ready_ranks(self) -> list[int]:
        return [rank for rank, state in enumerate(self.table.state) if state is RankState.READY]

    async def all_ready(self) -> None:
        """Wait until the gateway says that it is ready and has told its clients so."""
        await until(lambda: len(self.ready_ranks()) == self.table.size, "all ranks to be READY")
        await until(lambda: self.gateway.is_ready, "readiness")

    def logged(self, event: str) -> list[Any]:
        return [entry for entry in self.logs.entries if entry["event"] == event]

    async def close_clients(self) -> None:
        channels, self._channels = self._channels, []
        await asyncio.gather(*(channel.close() for channel in channels))


def expected(prompt: Iterable[int], count: int, seed: int | None = None) -> list[int]:
    """What every rank of `stub_config` answers."""
    return expected_tokens(list(prompt), seed, count, VOCAB_SIZE)


@asynccontextmanager
async def running_gateway(
    protocol: Protocol,
    *,
    ranks: int = 2,
    stub: StubConfig | None = None,
    backend: str = "synthetic",
    auto_step: bool = True,
    wait_ready: bool = True,
    record_limit: int = 4096,
    **config: Any,
) -> AsyncIterator[Stack]:
    """Gateway and ranks, all joined. `config` are sections for `gateway_config`."""
    async with (
        running(gateway_config(protocol, ranks, **config)) as stack,
        StubGroup(
            protocol,
            stack.gateway.link.handshake_addresses[0],
            ranks=ranks,
            config=stub or stub_config(),
            backend=backend,
            auto_step=auto_step,
            record_limit=record_limit,
        ) as group,
    ):
        if wait_ready:
            await group.ready()
            await stack.all_ready()
        async with observed(stack, group):
            yield stack


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Stack]:
    """Only the gateway, with its log captured. For tests that bring their ranks and call `observed` themselves."""
    before = asyncio.all_tasks()
    logs = structlog.testing.LogCapture()
    async with AsyncExitStack() as cleanup:
        old = structlog.get_config()
        cleanup.callback(lambda: structlog.configure(**old))
        level = structlog.make_filtering_bound_logger("debug")
        structlog.configure(processors=[logs], wrapper_class=level, cache_logger_on_first_use=False)
        gateway = Gateway(config)
        stack = Stack(gateway, logs)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: stack.loop_errors.append(context))
        cleanup.callback(lambda: loop.set_exception_handler(None))
        await gateway.start()
        cleanup.push_async_callback(gateway.stop)
        cleanup.push_async_callback(stack.close_clients)
        yield stack
    await until(lambda: asyncio.all_tasks() <= before, "the gateway's tasks to end")
    assert not stack.loop_errors


@asynccontextmanager
async def observed(stack: Stack, group: StubGroup) -> AsyncIterator[None]:
    """The test's body: what it leaves behind is held against it. A body that failed is left alone."""
    stack.group = group
    stack.baseline = _tasks()
    gc.freeze()  # what is there already is not this test's, and it makes looking through the rest cheap
    try:
        async with asyncio.timeout(BODY_S):
            yield
        await assert_quiescent(stack)
        _assert_no_outbox(stack)
    finally:
        gc.unfreeze()


async def assert_quiescent(stack: Stack) -> None:
    """The global postcondition: charges, live sets, outcomes, log lines and tasks, after a bounded wait.

    Closes the test's channels: their tasks are part of what must be gone.
    """
    await stack.close_clients()
    deadline = time.monotonic() + WAIT_S
    while problems := _leftovers(stack):
        assert time.monotonic() < deadline, "\n".join(problems)
        await asyncio.sleep(0.005)
    stack.router.check()
    for rank in stack.ranks:
        rank.engine.scheduler.check()
    faults = [entry for entry in stack.logs.entries if entry["log_level"] in ("error", "critical")]
    assert not faults, faults
    assert not stack.loop_errors, stack.loop_errors


def _leftovers(stack: Stack) -> list[str]:
    """One line for everything that is not at rest."""
    router, table, driver = stack.router, stack.table, stack.gateway.driver
    counters, admission = router.counters, router._admission
    lines = Counter(entry["outcome"] for entry in stack.logged("request_ended"))
    outcomes = {outcome.replace("OK", "ok"): count for outcome, count in counters.ended.items() if count}
    checks = {
        "live requests": router.live_count,
        "charged attempts": router.in_flight,
        "in_flight": any(table.in_flight) and table.in_flight,
        "in_flight_prefill": any(table.in_flight_prefill) and table.in_flight_prefill,
        "in_flight_decode": any(table.in_flight_decode) and table.in_flight_decode,
        "queued_tokens": any(table.queued_tokens) and table.queued_tokens,
        "ctx_tokens": any(table.ctx_tokens) and table.ctx_tokens,
        "own_tokens": any(table.own_tokens) and table.own_tokens,
        "pending prefill": any(table.pending_us) and table.pending_us,
        "reserved KV": any(table.kv_reserved_tokens) and table.kv_reserved_tokens,
        "group sums": any((*table.group_in_flight, *table.group_prompt_tokens, *table.group_kv_tokens)),
        "budgets": (admission.sequences or admission.prompt_tokens or admission.kv_tokens) and vars(admission),
        "tenants": [account.name for account in admission.tenants.active() if account.is_busy],
        "queued": router.queue_depth,
        "batches in flight": router.batches and any(map(router.batches.count, range(table.size))),
        "places": router.ordering and (router.ordering.places or router.ordering.held_bytes),
        "unflushed": router.dirty or driver._waiting,
        "client ids": router._registry._by_client,
        "streams": stack.gateway.servers._gateway._many,
        "open calls": stack.gateway.servers.gate.streams,
        "watched streams": len(stack.gateway.servers.gate.watch),
        "accepted and ended differ": counters.accepted != sum(counters.ended.values())
        and (counters.accepted, counters.ended),
        "log lines and outcomes differ": lines != outcomes and (lines, outcomes),
        "tasks": _tasks() - stack.baseline,
        "unsent to ranks": [link.rank for link in stack.gateway.link._ranks if link._sender and link._sender._queue],
    }
    for rank in stack.ranks:
        checks[f"rank {rank.number} live"] = rank.live_ids
        if rank.phase is RankPhase.SERVING:
            checks[f"rank {rank.number} KV blocks"] = rank.engine.scheduler.pool.used
    return [f"{name}: {value}" for name, value in checks.items() if value]


def _assert_no_outbox(stack: Stack) -> None:
    """Nobody holds a sequence of this gateway.

    One exception: grpcio keeps up to two of the calls that failed or were refused, with all that their tracebacks
    lead to.
    """

    def kept() -> list[Request]:
        found = (item.request for item in gc.get_objects() if type(item) is Sequence)
        return list({request.handle: request for request in found}.values())

    if kept():
        gc.collect()
    requests = kept()
    names = [(request.arrived.request_id, str(request.error)) for request in requests]
    assert len(names) <= MAX_FAILED_CALLS_KEPT, names
    assert not [request for request in requests if request.is_ended and request.error is None], names


def _tasks() -> Counter[str]:
    """What runs, by kind: the gRPC server replaces its accepting task for each call."""
    return Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())

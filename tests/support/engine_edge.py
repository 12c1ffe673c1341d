"""The standard engine service over the real core, with ranks that do what the test says."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from smg_grpc_proto.generated import (
    tokenspeed_scheduler_pb2,
    tokenspeed_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from gateway.core.events import BatchReceived, RankJoined
from gateway.core.router import Router
from gateway.edges.driver import Driver
from gateway.edges.grpc_engine import engine_service
from gateway.edges.grpc_server import GrpcServers
from gateway.types import EngineBatch, EngineLoad, EngineRequest, FinishReason, RankInfo, TokenLogprob
from tests.support.core import make_config, make_info
from tests.support.transport import TRANSPORT

PROTOS: dict[str, Any] = {"vllm": vllm_engine_pb2, "tokenspeed": tokenspeed_scheduler_pb2}
STUBS: dict[str, Any] = {
    "vllm": vllm_engine_pb2_grpc.VllmEngineStub,
    "tokenspeed": tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub,
}
SERVICE_NAMES = {
    "vllm": "vllm.grpc.engine.VllmEngine",
    "tokenspeed": "tokenspeed.grpc.scheduler.TokenSpeedScheduler",
}


class ScriptedRanks:
    """A link that remembers what was sent; `step` is one output batch of a rank."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._changed = asyncio.Event()
        self.sent: list[tuple[int, EngineRequest]] = []
        self.aborted: list[tuple[int, str]] = []

    def send(self, rank: int, incarnation: int, request: EngineRequest) -> None:
        self.sent.append((rank, request))
        self._changed.set()

    async def wait_sent(self, count: int = 1) -> list[str]:
        """The wire ids of everything sent, once there are `count`."""
        while len(self.sent) < count:
            self._changed.clear()
            await self._changed.wait()
        return [request.wire_id for _, request in self.sent]

    async def wait_aborted(self, count: int = 1) -> list[tuple[int, str]]:
        while len(self.aborted) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.aborted

    def abort(self, rank: int, incarnation: int, wire_ids: list[str]) -> None:
        self.aborted += ((rank, wire_id) for wire_id in wire_ids)
        self._changed.set()

    def rank_of(self, wire_id: str) -> int:
        return next(rank for rank, request in self.sent if request.wire_id == wire_id)

    def step(
        self,
        wire_id: str,
        tokens: Sequence[int],
        finish: FinishReason = "",
        *,
        logprobs: Sequence[TokenLogprob] | None = None,
        cached: int = 0,
        load: EngineLoad | None = None,
    ) -> None:
        rank = self.rank_of(wire_id)
        batch = EngineBatch(
            ids=[wire_id],
            token_ids=[tuple(tokens)],
            finish=[finish],
            cached_tokens=[cached],
            logprobs=None if logprobs is None else [logprobs],
            load=load,
        )
        self._driver.emit(BatchReceived(rank, self._driver.router.ranks.incarnation[rank], batch))


class EngineEdge:
    """What a test of the service needs: the stub, its messages, the core and the ranks."""

    def __init__(
        self, family: str, ranks: int, info: RankInfo | None, join: Iterable[int] | None, **config: Any
    ) -> None:
        listen = {"grpc": "127.0.0.1:0", "admin": "127.0.0.1:0", "transport": TRANSPORT}
        self.family = family
        self.pb = PROTOS[family]
        self.config = make_config(ranks, family, listen=listen, **config)
        self.router = Router(self.config, nonce="0123456789abcdef", rng=random.Random(7).random)
        self.driver = Driver(self.router)
        self.ranks = ScriptedRanks(self.driver)
        self.driver.link = self.ranks
        for rank in range(ranks) if join is None else join:
            self.driver.emit(RankJoined(rank=rank, incarnation=1, info=info or make_info()))
        self.servers = GrpcServers(self.config, self.driver, [engine_service(self.config, self.driver)])
        self.channel: grpc.aio.Channel
        self.stub: Any

    def request(self, prompt: Sequence[int] = (5, 6, 7), *, max_tokens: int | None = 16, **fields: Any) -> Any:
        """A GenerateRequest; `sampling` are sampling fields under their own names."""
        pb = self.pb
        sampling = fields.pop("sampling", {})
        if max_tokens is not None:
            sampling |= {"max_tokens" if self.family == "vllm" else "max_new_tokens": max_tokens}
        fields.setdefault("request_id", "client-1")
        fields.setdefault("stream", True)
        return pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=pb.SamplingParams(**sampling), **fields
        )

    def abort_request(self, request_id: str) -> Any:
        if self.family == "vllm":
            return self.pb.AbortRequest(request_ids=[request_id])
        return self.pb.AbortRequest(request_id=request_id, reason="test")


@asynccontextmanager
async def serve_engine(
    family: str,
    ranks: int = 2,
    *,
    info: RankInfo | None = None,
    join: Iterable[int] | None = None,
    **config: Any,
) -> AsyncIterator[EngineEdge]:
    """Serve on free ports; the ranks `join` (all by default) are READY. When the test is done the core holds nothing."""
    edge = EngineEdge(family, ranks, info, join, **config)
    await edge.servers.start()
    try:
        async with grpc.aio.insecure_channel(edge.servers.grpc_address) as channel:
            edge.channel = channel
            edge.stub = STUBS[family](channel)
            yield edge
    finally:
        await edge.servers.stop(1.0)
    edge.router.check()
    assert edge.router.live_count == 0
    assert edge.router.in_flight == 0

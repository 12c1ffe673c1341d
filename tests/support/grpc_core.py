"""The gateway's own service over the real core, with ranks that answer at once."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.core.events import BatchReceived, RankJoined
from gateway.core.router import Router
from gateway.edges.driver import Driver
from gateway.types import EngineBatch, EngineRequest, RankInfo
from tests.support.grpc_edge import Edge, make_config, serve


class CountingRanks:
    """A link whose ranks give each request `max_tokens` tokens, one per loop turn, counting up from its last id.

    A request whose prompt begins with `HOLD` gets nothing: it stays until it is aborted.
    """

    HOLD = 9999

    def __init__(self, driver: Driver, *, tokens_per_turn: int = 1) -> None:
        self._driver = driver
        self._tokens_per_turn = tokens_per_turn
        self.sent: list[tuple[int, EngineRequest]] = []
        self.live: dict[str, tuple[int, int, EngineRequest, int]] = {}
        self.aborted: list[tuple[int, str]] = []

    def send(self, rank: int, incarnation: int, request: EngineRequest) -> None:
        self.sent.append((rank, request))
        self.live[request.wire_id] = (rank, incarnation, request, 0)
        if request.prompt_token_ids[0] != self.HOLD:
            asyncio.get_running_loop().call_soon(self._step, request.wire_id)

    def abort(self, rank: int, incarnation: int, wire_ids: list[str]) -> None:
        for wire_id in wire_ids:
            self.aborted.append((rank, wire_id))
            self.live.pop(wire_id, None)

    def _step(self, wire_id: str) -> None:
        state = self.live.get(wire_id)
        if state is None:
            return
        rank, incarnation, request, done = state
        count = min(self._tokens_per_turn, request.sampling.max_tokens - done)
        first = request.prompt_token_ids[-1] + 1 + done
        is_last = done + count == request.sampling.max_tokens
        if is_last:
            del self.live[wire_id]
        else:
            self.live[wire_id] = (rank, incarnation, request, done + count)
            asyncio.get_running_loop().call_soon(self._step, wire_id)
        batch = EngineBatch(
            ids=[wire_id], token_ids=[tuple(range(first, first + count))], finish=["length" if is_last else ""]
        )
        self._driver.emit(BatchReceived(rank, incarnation, batch))


class Core:
    """What a test sees besides the `Edge`."""

    def __init__(self, edge: Edge, driver: Driver, ranks: CountingRanks) -> None:
        self.edge = edge
        self.driver = driver
        self.router = driver.router
        self.ranks = ranks

    def assert_quiet(self) -> None:
        """The global postcondition: nothing charged, nothing live in the core or at a rank."""
        self.router.check()
        assert self.router.live_count == 0
        assert self.router.in_flight == 0
        assert self.router.ranks.in_flight == [0] * self.router.ranks.size
        assert not self.ranks.live


@asynccontextmanager
async def serve_core(*, ready: int | None = None, tokens_per_turn: int = 1, **config: Any) -> AsyncIterator[Core]:
    """Listeners, driver with ticks, and `ready` of the ranks joined (all, if None). Quiet at the end."""
    settings = make_config(**config)
    driver = Driver(Router(settings, nonce="0123456789abcdef", rng=random.Random(5).random))
    ranks = CountingRanks(driver, tokens_per_turn=tokens_per_turn)
    driver.link = ranks
    info = RankInfo(max_model_len=4096, kv_capacity_tokens=400_000, max_num_seqs=256)
    for rank in range(driver.router.ranks.size if ready is None else ready):
        driver.emit(RankJoined(rank=rank, incarnation=1, info=info))
    driver.ticks.start()
    try:
        async with serve(driver=driver, **config) as edge:
            core = Core(edge, driver, ranks)
            yield core
        core.assert_quiet()
    finally:
        driver.ticks.stop()

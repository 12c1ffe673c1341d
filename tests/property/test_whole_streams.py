"""Whole answers of the standard engine service, from the ranks' messages to the calls, while everything happens at once.

The parts have tests of their own. What these runs are for is what only their interplay can break: a joined batch meets
the short cut of a token, a stored answer, a client that stands still, a rank that is lost in between. Every token can be
foretold, so each message is checked for what it says.

A seed is a run: `pytest "tests/property/test_whole_streams.py::test_every_answer_is_whole_and_right[17]"`. Seeds beyond
those of the suite: `python -c "from tests.property.test_whole_streams import play; play(12345)"`.
"""

import asyncio
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from gateway.core.errors import Reason
from gateway.core.events import Tick
from gateway.core.request import Request
from gateway.core.router import Router
from gateway.edges.driver import Driver
from gateway.edges.grpc_engine.vllm import VllmService
from gateway.edges.grpc_gate import CallGate
from gateway.edges.grpc_gateway import ANYONE
from tests.support.core import NONCE, make_config
from tests.support.whole_streams import AskedCall, Ranks, SteppedLoop

SEEDS = range(60)
RANKS = 2
STEPS = 250
LAST_ARRIVAL = 180
TURNS_TO_END = 3000
"""What has no end by then has none: clients read, ranks work, and no time-out is that short."""

FAILURES = {"DEADLINE_EXCEEDED", "SLOW_READER", "RANK_LOST", "ENGINE_REJECTED", "ENGINE_ERROR"}
"""What these runs let calls fail for. INTERNAL is not among it: where a defect is answered, the driver hears nothing."""


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """Of what changes how output leaves, each on its own or not."""
    settings: dict[str, Any] = {"scheduling": {"mode": rng.choice(("direct", "direct", "queue", "batch"))}}
    limits: dict[str, Any] = {}
    if rng.random() < 0.5:
        interval, delay_ms = rng.choice((2, 4, 9)), rng.choice((1, 20))
        settings["listen"] = {"stream_interval_tokens": interval, "max_flush_delay_ms": delay_ms}
    if rng.random() < 0.4:
        settings["ordering"] = "preserve"
        settings["preserve"] = {"domain": rng.choice(("gateway", "tenant"))}
        limits["default_deadline_s"] = 3600
    if rng.random() < 0.5:
        settings["response_cache"] = {"max_entry_bytes": rng.choice((600, 5000)), "coalesce": rng.random() < 0.8}
    if rng.random() < 0.7:
        settings["failure"] = {"reroute": True, "resume": True, "max_attempts": 4}
    if rng.random() < 0.4:
        limits["max_stream_buffer_bytes"] = rng.choice((256, 1024))
    return settings | {"limits": limits}


class Run:
    """A gateway without its sockets, and everything that can happen to it, drawn from one seed."""

    def __init__(self, seed: int, loop: SteppedLoop) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        self.seen: Counter[str] = Counter()
        self.defects: list[tuple[str, Exception]] = []
        config = make_config(RANKS, **draw_settings(self.rng))
        self.router = Router(config, nonce=NONCE, rng=self.rng.random)
        self.driver = Driver(
            self.router,
            clock=loop.time,
            on_ended=self._note_end,
            on_defect=lambda *defect: self.defects.append(defect),
        )
        self.ranks = self.driver.link = Ranks(self.driver, self.rng, RANKS, self.seen)
        self.driver.configure(config)
        self.gate = CallGate(config, clock=loop.time)
        methods = VllmService(config, self.driver).service().methods
        (self._serve,) = (method.direct(self.gate) for method in methods if method.name == "Generate")
        self.calls: list[AskedCall] = []

    # ---- what can happen -----------------------------------------------------------------------------

    def arrive(self) -> None:
        call = AskedCall(len(self.calls), self.rng)
        self.calls.append(call)
        self._serve(call.request(), call)

    def work(self) -> None:
        self.ranks.step(self.rng.randrange(RANKS))

    def stand_still(self) -> None:
        """A client reads no more, for now."""
        self._pick().is_shutting = True

    def read_on(self) -> None:
        for call in self._open_calls():
            if self.rng.random() < 0.3:
                self._let_read(call)

    def cut_short(self) -> None:
        """By an Abort call, or by the request's deadline."""
        request = self.router.find(ANYONE, self._pick().request_id)
        if request is not None:
            self.driver.cancel(request, self.rng.choice((Reason.ABORTED, Reason.DEADLINE_EXCEEDED)))

    def leave(self) -> None:
        self._pick().leave()

    def lose_rank(self) -> None:
        self.ranks.lose(self.rng.randrange(RANKS))

    def tick(self) -> None:
        self.driver.emit(Tick())

    async def turn(self, seconds: float) -> None:
        self.loop.now += seconds
        await asyncio.sleep(0)

    # ---- the run -------------------------------------------------------------------------------------

    async def play(self) -> None:
        rng = self.rng
        by_clients = (self.stand_still, self.read_on, self.cut_short, self.leave)
        actions = {self.arrive: 200, self.work: 500, self.lose_rank: 15, self.tick: 10}
        actions |= dict(zip(by_clients, (60, 40, 20, 15), strict=True))
        for step in range(STEPS):
            (act,) = rng.choices(tuple(actions), tuple(actions.values()))
            is_possible = self._open_calls() if act in by_clients else act != self.arrive or step < LAST_ARRIVAL
            if is_possible:
                act()
            if rng.random() < 0.6:
                await self.turn(rng.choice((0, 0, 0, 0.0005, 0.005)))
            self.router.check()

    async def come_to_an_end(self) -> None:
        """Nobody asks or fails any more: what is open must end."""
        for _ in range(TURNS_TO_END):
            for call in self._open_calls():
                self._let_read(call)
            for rank in range(RANKS):
                self.ranks.step(rank)
            self.tick()
            await self.turn(0.005)
            if not self._open_calls():
                break
        hanging = [call.request_id for call in self._open_calls()]
        assert not hanging, "no end in sight"
        await self.turn(1.0)

    def check(self) -> None:
        """Every answer is right, and nothing is left of them."""
        assert self.defects == []
        for call in self.calls:
            call.check()
            assert call.end in {"OK", "left", *FAILURES}
            self.seen.update({call.end, *call.finishes})
        router, gate, ordering = self.router, self.gate, self.router.ordering
        router.check()
        assert (router.live_count, router.in_flight, router.queue_depth, router.dirty) == (0, 0, 0, [])
        assert (gate.streams, gate.connections, len(gate.watch)) == (0, 0, 0)
        assert ordering is None or (ordering.places, ordering.held_bytes, ordering.domains) == (0, 0, 0)
        assert self.ranks.is_idle, "a rank works for nobody"

    def _open_calls(self) -> list[AskedCall]:
        return [call for call in self.calls if call.is_open]

    def _pick(self) -> AskedCall:
        return self.rng.choice(self._open_calls())

    def _let_read(self, call: AskedCall) -> None:
        if call.is_shutting or not call.is_ready:
            call.open_up()

    def _note_end(self, request: Request) -> None:
        """An answer that was there already was stored, or else it came from a request that was live as well."""
        if request.is_cached:
            is_stored = request.accepted_at == request.settled_at
            self.seen["stored" if is_stored else "shared"] += 1


@cache
def play(seed: int) -> Counter[str]:
    """One whole run, checked. Returns how often it met what these runs are about."""

    async def whole(loop: SteppedLoop) -> Counter[str]:
        run = Run(seed, loop)
        await run.play()
        await run.come_to_an_end()
        run.check()
        return run.seen

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SteppedLoop)
        return runner.run(whole(loop))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_is_whole_and_right(seed):
    play(seed)


def test_the_runs_meet_what_they_are_about():
    seen = sum(map(play, SEEDS), Counter())
    causes = ("left", "DEADLINE_EXCEEDED", "SLOW_READER", "RANK_LOST")
    for what in ("joined", "resumed", "stored", "shared", "stop", "length", "abort", *causes):
        assert seen[what] >= 5, (what, seen)

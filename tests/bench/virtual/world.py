"""The real core and virtual ranks under one clock: every run of the same inputs is the same to the last bit.

Link model: a request reaches its rank `send_s` after the core's decision, a step's batch reaches the core `output_s`
after the step's end. What reaches an idle rank at one moment is in one step. The core gets a `Tick` as often as the
gateway's driver gives it one.
"""

import gc
from collections.abc import Callable
from functools import lru_cache
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

import msgspec

from engine_stub.backend.synthetic import StepTime
from engine_stub.scheduler import SchedulerConfig
from gateway.config.schema import Config
from gateway.core.effects import AbortOnRank, Dispatch, Effect, RequestEnded, RequestRefused
from gateway.core.events import BatchReceived, Event, RankJoined, RequestArrived, Tick
from gateway.core.request import Sequence
from gateway.core.router import Router
from gateway.edges.ticks import INTERVAL_S as TICK_INTERVAL_S
from gateway.types import EngineBatch, EngineRequest, Sampling
from tests.bench.virtual.engine import SCHEDULER, STEP_TIME, VirtualRank, rank_info
from tests.bench.virtual.workloads import Offer
from tests.support.core import NONCE, make_config

MAX_CONTEXT_TOKENS = 65_536
MIN_TIMER_S = 0.001
LAST = 1 << 60
TICK = Tick()


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks and the link to them. Times in seconds."""

    ranks: int = 4
    scheduler: SchedulerConfig = SCHEDULER
    time: StepTime = STEP_TIME
    send_s: float = 0.0
    output_s: float = 0.0005


class Record:
    """What became of one offer. Times in seconds; None: it didn't come to that. `error` is a reason, or empty."""

    __slots__ = ("ended_at", "error", "first_token_at", "offer", "sent_at")

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.sent_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.error = ""


def configured(engine: EngineModel, **settings: Any) -> Config:
    """A configuration for these ranks; `settings` are top-level keys of it."""
    model = {"name": "m", "max_context_tokens": MAX_CONTEXT_TOKENS, "vocab_size": 32000, "eos_token_ids": []}
    return make_config(engine.ranks, model=model, **settings)


@lru_cache(maxsize=8192)
def _prompt(tokens: int) -> tuple[int, ...]:
    """Token ids that nobody reads."""
    return (0,) * tokens


@lru_cache(maxsize=8192)
def _sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class World:
    """One run. `records` are parallel to the offers; `until_s` ends it early with whatever has happened by then."""

    def __init__(self, config: Config, offers: tuple[Offer, ...], engine: EngineModel, seed: int = 0) -> None:
        self.now = 0.0
        self.router = Router(config, nonce=NONCE, rng=Random(f"router-{seed}").random)
        self.ranks = [VirtualRank(engine.scheduler, engine.time) for _ in range(engine.ranks)]
        self.records = [Record(offer) for offer in offers]
        self.events = 0
        self._engine = engine
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._pushed = 0
        self._early_at = inf
        self._arrived = 0
        for rank in range(engine.ranks):
            self._handle(RankJoined(rank=rank, incarnation=1, info=rank_info(engine.scheduler, MAX_CONTEXT_TOKENS)))

    def run(self, until_s: float = inf) -> "World":
        """Everything that was offered, to its end or to `until_s`. The core's invariants hold when it returns."""
        self._plan_arrival()
        self._push(TICK_INTERVAL_S, self._tick, None)
        heap = self._heap
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            while heap and heap[0][0] <= until_s:
                self.now, _, act, argument = heappop(heap)
                act(argument)
        finally:
            if was_enabled:
                gc.enable()
        self.router.check()
        return self

    # ---- events ------------------------------------------------------------------------------

    def _push(self, at: float, act: Callable[[Any], None], argument: object, *, order: int = 0) -> None:
        """`order` LAST: after all else that happens at that moment."""
        self._pushed += 1
        heappush(self._heap, (at, order + self._pushed, act, argument))

    def _plan_arrival(self) -> None:
        if self._arrived < len(self.records):
            record = self.records[self._arrived]
            self._push(record.offer.at_s, self._arrive, record)

    def _arrive(self, record: Record) -> None:
        offer = record.offer
        self._arrived += 1
        arrived = RequestArrived(
            client_key="c",
            request_id=str(self._arrived),
            prompt_token_ids=_prompt(offer.prompt_tokens),
            sampling=_sampling(offer.output_tokens),
            tenant=offer.tenant,
            sink=record,
        )
        effects = self._handle(arrived)
        first = effects[0]
        if isinstance(first, RequestRefused):
            record.error = first.error.reason.value
            record.ended_at = self.now
        self._plan_arrival()

    def _tick(self, _: object) -> None:
        self._handle(TICK)
        if self._arrived < len(self.records) or self.router.live_count:
            self._push(self.now + TICK_INTERVAL_S, self._tick, None)

    def _early_tick(self, _: object) -> None:
        self._early_at = inf
        self._handle(TICK)

    def _deliver(self, output: tuple[int, EngineBatch]) -> None:
        rank, batch = output
        self._handle(BatchReceived(rank, 1, batch))
        for item in self.router.take_dirty():
            if isinstance(item, Sequence):
                item.take()

    def _step(self, rank: int) -> None:
        duration_s = self.ranks[rank].begin()
        if duration_s is None:
            self.ranks[rank].is_awake = False
        else:
            self._push(self.now + duration_s, self._stepped, rank)

    def _stepped(self, rank: int) -> None:
        self._push(self.now + self._engine.output_s, self._deliver, (rank, self.ranks[rank].finish()))
        self._step(rank)

    # ---- effects -----------------------------------------------------------------------------

    def _handle(self, event: Event) -> list[Effect]:
        self.events += 1
        effects = self.router.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Dispatch):
                self._push(self.now + self._engine.send_s, self._receive, (effect.rank, effect.request))
            elif isinstance(effect, AbortOnRank):
                self._push(self.now + self._engine.send_s, self._abort, (effect.rank, effect.wire_ids))
            elif isinstance(effect, RequestEnded):
                self._note_end(effect)
        due = self.router.next_due()
        if due is not None and self.now < due < self._early_at:
            # As the driver: no timer is shorter than a millisecond, and one is enough.
            self._early_at = max(due, self.now + MIN_TIMER_S)
            self._push(self._early_at, self._early_tick, None)
        return effects

    def _receive(self, message: tuple[int, EngineRequest]) -> None:
        rank = self.ranks[message[0]]
        rank.receive(message[1])
        if not rank.is_awake:
            rank.is_awake = True
            self._push(self.now, self._step, message[0], order=LAST)

    def _abort(self, message: tuple[int, tuple[str, ...]]) -> None:
        for wire_id in message[1]:
            self.ranks[message[0]].abort(wire_id)

    def _note_end(self, effect: RequestEnded) -> None:
        request = effect.request
        record: Record = request.sink
        record.first_token_at = request.first_token_at
        record.ended_at = self.now
        if request.error is not None:
            record.error = request.error.reason.value
        attempt = request.sequences[0].attempt if request.sequences else None
        if attempt is not None:
            record.sent_at = attempt.sent_at

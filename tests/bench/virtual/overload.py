"""Ten times what the ranks can do: what is refused, what the admitted get, and how two tenants share.

The offers last `DURATION_S`; throughput and shares are counted from `SETTLED_S` until then, while they last.
"""

from collections import Counter
from typing import Any

import msgspec

from tests.bench.virtual.metrics import mean, percentile, ttft
from tests.bench.virtual.policies import LMETRIC, POLICIES
from tests.bench.virtual.workloads import Workload, two_tenants
from tests.bench.virtual.world import EngineModel, Record, World, configured

FACTOR = 10.0
DURATION_S = 30.0
SETTLED_S = 10.0
LIGHT_SHARE = 1 / 11
"""The light tenant offers a tenth of what the heavy one does."""

OVERLOADED: dict[str, dict[str, Any]] = {
    "direct lmetric": LMETRIC,
    "queue": POLICIES["queue"],
    "queue, timeout 2 s": POLICIES["queue"] | {"scheduling": {"mode": "queue", "queue": {"timeout_s": 2.0}}},
    "queue, slo 2 s": POLICIES["queue"] | {"slo": {"mode": "enforce", "ttft": [{"ttft_ms": 2000.0}]}},
    "batch": POLICIES["batch"],
}


class Overload(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `throughput` is finished requests a second, `capacity` that of the saturated ranks."""

    policy: str
    offered: int
    refused: dict[str, int]
    finished: int
    throughput: float
    capacity: float
    ttft_mean: float
    ttft_p99: float
    good_per_s: float
    """Finished requests a second with a first token within 2 s."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """How two tenants shared the ranks: served tokens (prompt + output) of requests finished in the window."""

    policy: str
    heavy_weight: float
    light_weight: float
    light_share: float
    fair_share: float
    light_offered: float
    light_ttft_mean: float
    heavy_ttft_mean: float
    light_refused: int
    heavy_refused: int


def overload(policy: str, workload: Workload, capacity: float, engine: EngineModel) -> Overload:
    """One policy under `FACTOR` times the capacity, run to the end of all that was admitted."""
    world = _world(workload, capacity, engine, OVERLOADED[policy]).run()
    done = _finished(world)
    window = [record for record in done if SETTLED_S < _end(record) <= DURATION_S]
    seconds = DURATION_S - SETTLED_S
    ttfts = [ttft(record) for record in done]
    return Overload(
        policy=policy,
        offered=len(world.records),
        refused=dict(Counter(record.error for record in world.records if record.error)),
        finished=len(done),
        throughput=len(window) / seconds,
        capacity=capacity,
        ttft_mean=mean(ttfts),
        ttft_p99=percentile(ttfts, 0.99),
        good_per_s=sum(1 for record in window if ttft(record) <= 2.0) / seconds,
    )


def share(policy: str, weights: tuple[float, float], workload: Workload, capacity: float, engine: EngineModel) -> Share:
    """Two tenants of the given (heavy, light) weights; stops with the offers."""
    heavy, light = weights
    tenants = {"named": {"heavy": {"weight": heavy}, "light": {"weight": light}}}
    settings = OVERLOADED[policy] | {"admission": {"tenants": tenants}}
    offered = two_tenants(workload, workload.seed, LIGHT_SHARE)
    world = _world(offered, capacity, engine, settings).run(DURATION_S)
    window = [record for record in _finished(world) if _end(record) > SETTLED_S]
    tokens = {name: sum(map(_tokens, _of(window, name))) for name in ("heavy", "light")}
    refused = Counter(record.offer.tenant for record in world.records if record.error)
    return Share(
        policy=policy,
        heavy_weight=heavy,
        light_weight=light,
        light_share=tokens["light"] / max(1, sum(tokens.values())),
        fair_share=light / (heavy + light),
        light_offered=FACTOR * LIGHT_SHARE,
        light_ttft_mean=mean([ttft(record) for record in _of(window, "light")]),
        heavy_ttft_mean=mean([ttft(record) for record in _of(window, "heavy")]),
        light_refused=refused["light"],
        heavy_refused=refused["heavy"],
    )


def offers_for(capacity: float) -> int:
    """How many offers last `DURATION_S` at `FACTOR` times the capacity."""
    return int(FACTOR * capacity * DURATION_S)


def _world(workload: Workload, capacity: float, engine: EngineModel, settings: dict[str, Any]) -> World:
    fast = workload.at_rate(FACTOR * capacity)
    return World(configured(engine, **settings), fast.offers, engine, workload.seed)


def _finished(world: World) -> list[Record]:
    return [record for record in world.records if record.ended_at is not None and not record.error]


def _end(record: Record) -> float:
    assert record.ended_at is not None
    return record.ended_at


def _of(records: list[Record], tenant: str) -> list[Record]:
    return [record for record in records if record.offer.tenant == tenant]


def _tokens(record: Record) -> int:
    return record.offer.prompt_tokens + record.offer.output_tokens

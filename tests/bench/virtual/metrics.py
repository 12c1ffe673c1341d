"""What a run was like: one number per question, over the requests that arrived after the warm-up.

`slowdown` is TTFT / the TTFT of the same prompt on an empty rank; `goodput` the share of what was offered that had
its first token within max(0.2 s, 5 x unloaded); `long` the tenth of the finished requests with the longest prompts.
Refused and failed requests count in `goodput` (as misses) and in `refused`, nowhere else.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, exp, log

import msgspec

from tests.bench.virtual.engine import unloaded_prefill_s
from tests.bench.virtual.world import EngineModel, Record, World

WARM_UP = 0.15
"""Share of the offers that only fill the ranks."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in seconds; `refused` counts by reason; `wait` is the time in the gateway."""

    offered: int
    finished: int
    refused: dict[str, int]
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    ttft_max: float
    slowdown_p99: float
    tpot_mean: float
    e2e_mean: float
    goodput: float
    long_ttft_mean: float
    wait_mean: float


SMALLER_IS_BETTER = (
    "ttft_mean",
    "ttft_p50",
    "ttft_p99",
    "ttft_max",
    "slowdown_p99",
    "tpot_mean",
    "e2e_mean",
    "long_ttft_mean",
)


def mean(values: Sequence[float]) -> float:
    """Their mean; nan of none."""
    return sum(values) / len(values) if values else float("nan")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them don't exceed; nan of none."""
    if not values:
        return float("nan")
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values."""
    return exp(mean([log(value) for value in values])) if values else float("nan")


def unloaded_ttft(engine: EngineModel) -> Callable[[int], float]:
    """TTFT of a prompt when nothing else is there, in seconds."""

    @cache
    def of(prompt_tokens: int) -> float:
        return engine.send_s + unloaded_prefill_s(prompt_tokens, engine.scheduler, engine.time) + engine.output_s

    return of


def ttft(record: Record) -> float:
    """Seconds from arrival to first token of a record that has one."""
    assert record.first_token_at is not None
    return record.first_token_at - record.offer.at_s


def e2e(record: Record) -> float:
    """Seconds from arrival to end of a record that ended."""
    assert record.ended_at is not None
    return record.ended_at - record.offer.at_s


def summarise(world: World, engine: EngineModel, warm_up: float = WARM_UP) -> Summary:
    """The figures of a run that has ended."""
    unloaded = unloaded_ttft(engine)
    records = world.records[int(warm_up * len(world.records)) :]
    done = [record for record in records if record.ended_at is not None and not record.error]
    ttfts = [ttft(record) for record in done]
    plain = [unloaded(record.offer.prompt_tokens) for record in done]
    slowdowns = [each / alone for each, alone in zip(ttfts, plain, strict=True)]
    good = sum(1 for each, alone in zip(ttfts, plain, strict=True) if each <= max(0.2, 5 * alone))
    tpots = [
        (e2e(record) - ttft(record)) / (record.offer.output_tokens - 1)
        for record in done
        if record.offer.output_tokens > 1
    ]
    by_length = sorted(done, key=lambda record: record.offer.prompt_tokens)
    longest = by_length[len(by_length) - max(1, len(by_length) // 10) :]
    return Summary(
        offered=len(records),
        finished=len(done),
        refused=dict(Counter(record.error for record in records if record.error)),
        ttft_mean=mean(ttfts),
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p99=percentile(ttfts, 0.99),
        ttft_max=max(ttfts, default=float("nan")),
        slowdown_p99=percentile(slowdowns, 0.99),
        tpot_mean=mean(tpots),
        e2e_mean=mean([e2e(record) for record in done]),
        goodput=good / len(records),
        long_ttft_mean=mean([ttft(record) for record in longest]),
        wait_mean=mean([record.sent_at - record.offer.at_s for record in done if record.sent_at is not None]),
    )


class Ratio(msgspec.Struct, frozen=True):
    """Baseline / this over paired seeds: above 1 this is better (for `goodput` the difference in points)."""

    middle: float
    least: float
    most: float


def compare(baseline: Sequence[Summary], ours: Sequence[Summary]) -> dict[str, Ratio]:
    """Seed by seed against the baseline; geometric mean and range, for goodput mean and range in percentage points."""
    result = {}
    for name in SMALLER_IS_BETTER:
        ratios = [getattr(b, name) / getattr(o, name) for b, o in zip(baseline, ours, strict=True)]
        result[name] = Ratio(geometric_mean(ratios), min(ratios), max(ratios))
    points = [100 * (o.goodput - b.goodput) for b, o in zip(baseline, ours, strict=True)]
    result["goodput"] = Ratio(mean(points), min(points), max(points))
    return result

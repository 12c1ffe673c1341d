"""Results as a table for people; the same numbers go out as JSON."""

from collections.abc import Sequence

import msgspec

from tests.bench.virtual.metrics import Ratio, Summary, compare, mean
from tests.bench.virtual.overload import DURATION_S, FACTOR, Overload, Share
from tests.bench.virtual.policies import BASELINE

COLUMNS = (
    ("ttft_mean", "TTFT mean s", 3),
    ("ttft_p50", "p50", 3),
    ("ttft_p99", "p99", 2),
    ("ttft_max", "max", 1),
    ("slowdown_p99", "slow p99", 1),
    ("long_ttft_mean", "long mean", 3),
    ("tpot_mean", "TPOT s", 4),
    ("e2e_mean", "E2E s", 2),
    ("goodput", "goodput", 3),
)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one cell: a summary per seed and the ratios against the baseline."""

    workload: str
    rho: float
    policy: str
    summaries: tuple[Summary, ...]
    ratios: dict[str, Ratio]


def results_of(workload: str, rho: float, by_policy: dict[str, list[Summary]]) -> list[Result]:
    """The cell's results, each compared with the baseline of the same seeds."""
    baseline = by_policy[BASELINE]
    return [
        Result(workload=workload, rho=rho, policy=name, summaries=tuple(summaries), ratios=compare(baseline, summaries))
        for name, summaries in by_policy.items()
    ]


def table(results: Sequence[Result]) -> str:
    """Per policy a line of means over the seeds, and one of ratios against the baseline with their range."""
    width = max(len(result.policy) for result in results) + 2
    first = results[0]
    title = f"{first.workload}, rho {first.rho:g}, {len(first.summaries)} seeds"
    lines = [
        f"{title}. Second lines: {BASELINE} / this, above 1 is better (goodput: points), with the range over the seeds.",
        " " * width + "".join(f"{title:>19}" for _, title, _ in COLUMNS) + f"{'refused':>9}",
    ]
    for result in results:
        cells = [
            f"{mean([getattr(summary, name) for summary in result.summaries]):.{digits}f}"
            for name, _, digits in COLUMNS
        ]
        refused = sum(sum(summary.refused.values()) for summary in result.summaries)
        lines.append(f"{result.policy:<{width}}" + "".join(f"{cell:>19}" for cell in cells) + f"{refused:>9}")
        if result.policy != BASELINE:
            lines.append(" " * width + "".join(f"{_ratio(result.ratios[name], name):>19}" for name, _, _ in COLUMNS))
    return "\n".join(lines)


def _ratio(ratio: Ratio, name: str) -> str:
    if name == "goodput":
        return f"{ratio.middle:+.1f} [{ratio.least:+.0f}..{ratio.most:+.0f}]"
    return f"{ratio.middle:.2f} [{ratio.least:.2f}-{ratio.most:.2f}]"


def overload_table(rows: Sequence[Overload]) -> str:
    """What each policy made of ten times the capacity."""
    lines = [
        f"offered: {FACTOR:g} x capacity for {DURATION_S:g} s",
        f"{'':<22}{'finished/s':>11}{'of capacity':>12}{'in 2 s /s':>11}{'TTFT mean':>11}{'p99':>8}  refused",
    ]
    for row in rows:
        refused = ", ".join(f"{reason} {count}" for reason, count in sorted(row.refused.items())) or "none"
        lines.append(
            f"{row.policy:<22}{row.throughput:>11.1f}{row.throughput / row.capacity:>12.2f}{row.good_per_s:>11.1f}"
            f"{row.ttft_mean:>11.2f}{row.ttft_p99:>8.2f}  {refused} of {row.offered}"
        )
    return "\n".join(lines)


def share_table(rows: Sequence[Share]) -> str:
    """Served tokens of the light tenant beside what its weight entitles it to."""
    lines = [
        f"two tenants, offered 10:1, together {FACTOR:g} x capacity (light alone: {FACTOR / 11:.2f} x)",
        f"{'':<22}{'weights h:l':>12}{'light share':>12}{'entitled':>10}{'TTFT light':>12}{'heavy':>8}{'refused':>15}{'heavy':>8}",
    ]
    lines += [
        f"{row.policy:<22}{f'{row.heavy_weight:g}:{row.light_weight:g}':>12}{row.light_share:>12.3f}"
        f"{row.fair_share:>10.3f}{row.light_ttft_mean:>12.2f}{row.heavy_ttft_mean:>8.2f}{row.light_refused:>15}"
        f"{row.heavy_refused:>8}"
        for row in rows
    ]
    return "\n".join(lines)

"""A run's result: for people on stdout, for programs as JSON."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.faults import Done

SHOWN = 20


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median, p99 and maximum; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 1), "p99": round(p99, 1), "max": round(ordered[-1], 1)}


def fault_counts(done: Sequence[Done]) -> dict[str, int]:
    """How often each kind was carried out."""
    return dict(Counter(each.fault.kind.value for each in done).most_common())


def text(result: dict[str, Any]) -> str:
    """What a person reads."""
    lines = [
        f"chaos      seed {result['seed']}, {result['protocol']}, mode {result['mode']}, {result['transport']}, {result['ranks']} ranks",
        f"time       {result['load_s']:.0f} s of load, {result['wall_s']:.0f} s in all",
        f"requests   {result['requests']} ({result['requests'] / result['load_s']:.0f} per s), {result['tokens']} tokens",
        f"           {result['retried']} finished on another rank than their first",
        f"outcomes   {_counts(result['outcomes'])}",
        f"faults     {sum(result['faults'].values())}: {_counts(result['faults'])}",
    ]
    for name in ("first_ms", "total_ms", "gaps_ms"):
        figures = result["latency"][name]
        if figures is not None:
            shown = ", ".join(f"{key} {value:g}" for key, value in figures.items())
            lines.append(f"{name:10} {shown}")
    growth = result["memory_growth"]
    lines.append(f"memory     {'not measured: too short' if growth is None else f'{growth:+.1%} after the warm-up'}")
    lines.append(f"gateway    {_counts(result['gateway'])}")
    violations = result["violations"]
    if violations:
        lines.append(f"FAILED     {result['violation_count']} violations")
        lines += [f"  {violation}" for violation in violations[:SHOWN]]
        lines.append(f"replay     {result['replay']}")
    else:
        lines.append("passed     no violation")
    return "\n".join(lines)


def _counts(counts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in counts.items()) or "none"

"""Time of one routing decision beside a hand-written argmin over the same columns.

Run `python -m tests.bench.bench_decision` from the repository root. One line per preset, rank count
and state: `spread` (costs differ), `idle` (all ranks tie) and `filtered` (as `spread`, with one rank
over its KV usage, so that every rank goes through every filter). Both sides run in turns and the
fastest turn of each counts, in CPU time, so that other load on the machine cancels out; only the ratio is worth
comparing between machines. The decision side includes filters, tie-break and its record.
"""
# ruff: noqa: B905 - the baseline is what one would write for speed

import argparse
import json
from collections.abc import Callable
from random import Random
from time import process_time
from timeit import timeit

from gateway.config.schema import Policy as PolicySettings
from gateway.core.ranks import RankTable
from tests.support.policies import make_policy, make_table, randomise, report

RANKS = (4, 64, 1024)
STATES = ("spread", "idle", "filtered")
NEW_TOKENS = 500
TURNS = 60


def _lmetric(table: RankTable) -> Callable[[], int]:
    def decide() -> int:
        costs = [(q + NEW_TOKENS) * (f + 1) for q, f in zip(table.queued_tokens, table.in_flight)]
        return costs.index(min(costs))

    return decide


def _smg(table: RankTable) -> Callable[[], int]:
    def decide() -> int:
        costs = [
            max(own, w + r) + (w * 6 * max(0, kv - 0.5) if w > 0 else 0)
            for own, w, r, kv in zip(table.in_flight, table.reported_waiting, table.reported_running, table.kv_usage)
        ]
        return costs.index(min(costs))

    return decide


def _vllm(table: RankTable) -> Callable[[], int]:
    gateways = 1

    def decide() -> int:
        costs = [
            max(gateways * own, w + r) + (w * 6 * max(0, kv - 0.5) if w > 0 else 0)
            for own, w, r, kv in zip(table.in_flight, table.reported_waiting, table.reported_running, table.kv_usage)
        ]
        return costs.index(min(costs))

    return decide


HAND_WRITTEN = {"lmetric": _lmetric, "smg": _smg, "vllm": _vllm}


def measure(preset: str, ranks: int, state: str) -> dict[str, object]:
    """Microseconds per decision of both sides, and their ratio."""
    table = make_table(ranks)
    if state != "idle":
        randomise(table, Random(1))
    if state == "filtered":
        report(table, 0, running=5, kv=0.99)
    policy = make_policy(table, PolicySettings(preset=preset))  # type: ignore[arg-type]
    sides: list[Callable[[], object]] = [
        HAND_WRITTEN[preset](table),
        lambda: policy.decide(1.0, prompt_tokens=NEW_TOKENS, max_tokens=100, label="bench"),
    ]
    number = max(20, 2000 // ranks)
    best = [float("inf"), float("inf")]
    for _ in range(TURNS):
        for side, run in enumerate(sides):
            best[side] = min(best[side], timeit(run, timer=process_time, number=number) / number * 1e6)
    hand_us, decision_us = best
    return {
        "preset": preset,
        "ranks": ranks,
        "state": state,
        "hand_us": round(hand_us, 2),
        "decision_us": round(decision_us, 2),
        "ratio": round(decision_us / hand_us, 2),
        "decisions_per_s": round(1e6 / decision_us),
    }


def main() -> None:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    is_json = parser.parse_args().json
    if not is_json:
        print(
            f"{'preset':<10}{'ranks':>6} {'state':<9}{'hand µs':>9}{'decision µs':>13}{'ratio':>7}{'decisions/s':>13}"
        )
    for preset in HAND_WRITTEN:
        for ranks in RANKS:
            for state in STATES:
                row = measure(preset, ranks, state)
                if is_json:
                    print(json.dumps(row))
                else:
                    print(
                        f"{row['preset']:<10}{row['ranks']:>6} {row['state']:<9}{row['hand_us']:>9}"
                        f"{row['decision_us']:>13}{row['ratio']:>7}{row['decisions_per_s']:>13}"
                    )


if __name__ == "__main__":
    main()

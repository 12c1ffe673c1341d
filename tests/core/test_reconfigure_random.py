"""Any change of the configuration at any time, among everything else that happens."""

import random

import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RankDrained, RankUndrained
from gateway.core.ranks import RankState
from tests.support.core import Bench, load, make_config
from tests.support.reconfigure import groups, reconfigure

ABSENT, LOST = RankState.ABSENT, RankState.LOST


ORDERED = {"ordering": "preserve", "limits": {"default_deadline_s": 60.0}, "response_cache": {"coalesce": True}}


def some_config(draw, mode):
    """A configuration that the running one can become: the mode stays."""
    queue = {
        "order": draw.choice(["fcfs", "aging", "hrrn", "spf", "edf"]),
        "fair": draw.random() < 0.5,
        "max_in_flight_per_rank": draw.choice([1, 2, 8]),
        "timeout_s": draw.choice([None, 0.5, 3.0]),
        "timeout_action": draw.choice(["reject", "delay"]),
        "levels": draw.choice([[], [{"priority": 1, "max_depth": 3}]]),
    }
    batch = {"max_in_flight_batches": draw.choice([1, 2]), "release_at": draw.choice(["first_token", "finish"])}
    return {
        "policy": {"preset": draw.choice(["lmetric", "p2c", "round_robin", "smg", "least_in_flight"])},
        "groups": groups(*draw.choice([(2,), (3,), (2, 2), (2, 1)]), coupled=draw.random() < 0.3)
        if draw.random() < 0.5
        else groups(2, budget=draw.choice([{}, {"max_kv_tokens": 300}, {"max_requests": 4}])),
        "predictor": draw.choice([None, {"prefill_ms": "total_new_tokens"}]),
        "filters": {"max_kv_usage": draw.choice([None, 0.5])},
        "gateways": draw.choice([1, 2]),
        "failure": {"reroute": draw.random() < 0.5, "resume": draw.random() < 0.5},
        "admission": {
            "max_in_flight": draw.choice([4, 100]),
            "max_prompt_tokens": draw.choice([None, 60]),
            "tenants": {"named": draw.choice([{}, {"a": {"weight": 3.0}}, {"b": {"max_in_flight": 2}}])},
        },
        "scheduling": {"mode": mode} | ({} if mode == "direct" else {"queue": queue, "batch": batch}),
    }


def fits(bench, wanted):
    """What `gateway.config.changes` would let through: here, only the end of the list of ranks changes."""
    old = [(group.name, index) for group in bench.router.layout.groups for index in range(group.ranks)]
    new = [(group.name, index) for group in wanted.groups for index in range(group.ranks)]
    shorter = min(len(old), len(new))
    return old[:shorter] == new[:shorter]


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
@pytest.mark.parametrize("seed", range(8))
def test_any_change_at_any_time_keeps_every_charge(mode, seed):
    draw = random.Random(f"{mode}-{seed}")
    fixed = ORDERED if seed % 2 else {}
    bench = Bench(groups=groups(2), scheduling={"mode": mode}, **fixed)
    live, changes = [], 0
    for _ in range(150):
        live = [request for request in live if not request.is_settled]
        table = bench.router.ranks
        step = draw.random()
        if step < 0.45:
            pin = draw.choice([None, None, draw.randrange(table.size)])
            found = bench.offer(
                [5] * draw.randint(1, 30), n=draw.choice([1, 2]), tenant=draw.choice("abc"), pinned_rank=pin,
                priority=draw.choice([0, 1]),
            )  # fmt: skip
            if not isinstance(found, GatewayError):
                live.append(found)
        elif step < 0.65 and live:
            for sequence in draw.choice(live).sequences:
                attempt = sequence.attempt
                if attempt is not None and not attempt.released:
                    bench.batch(attempt.rank, [(attempt.wire_id, [9], "length")])
        elif step < 0.72 and live:
            request = draw.choice(live)
            attempt = request.sequences[0].attempt
            if attempt is not None and not attempt.released:
                bench.batch(attempt.rank, [(attempt.wire_id, [7])], load(1, 0, draw.random()))
        elif step < 0.75 and live:
            bench.cancel(draw.choice(live), Reason.CANCELLED)
        elif step < 0.80:
            rank = draw.randrange(table.size)
            bench.send(draw.choice([RankDrained(rank), RankUndrained(rank)]))
        elif step < 0.85:
            rank = draw.randrange(table.size)
            if table.state[rank] in (ABSENT, LOST):
                bench.join(rank)
            elif draw.random() < 0.3:
                bench.lose(rank)
        elif step < 0.95:
            wanted = some_config(draw, mode) | fixed
            if fits(bench, make_config(**wanted)):
                changes += 1
                reconfigure(bench, **wanted)
        else:
            bench.tick(draw.choice([0.05, 0.7]))
    assert changes > 3
    for request in live:
        if not request.is_settled:
            bench.cancel(request, Reason.CANCELLED)
    bench.tick(0.1)
    bench.assert_quiet()

"""What the objective for the first token is compared with: the least wait of a rank, and a share of the queue."""

import pytest

from gateway.core.errors import GatewayError, Reason
from tests.support.core import Bench


def make(ranks=1, *, mode="queue", objective_ms=150, **more):
    slo = {"mode": "enforce", "ttft": [{"ttft_ms": objective_ms}]} | more.pop("slo", {})
    scheduling = {"mode": mode} | ({"queue": {"order": "fcfs"}} if mode == "queue" else {})
    return Bench(ranks, predictor={"prefill_ms": "100"}, slo=slo, scheduling=scheduling, **more)


def accepted(bench, count=50, **ask):
    return sum(not isinstance(bench.offer(**ask), GatewayError) for _ in range(count))


def test_ranks_at_their_limit_count_while_no_other_is_open():
    bench = make(admission={"max_in_flight_per_rank": 1})
    assert accepted(bench) == 1, "the next one's first token is predicted after 200 ms"


def test_the_queue_alone_counts_while_no_rank_is_ready():
    bench = make()
    bench.lose(0)
    assert accepted(bench) == 1
    longer = make(objective_ms=450)
    longer.lose(0)
    assert accepted(longer) == 4


def test_a_pin_to_a_rank_at_its_limit_waits_for_that_one():
    bench = make(2, admission={"max_in_flight_per_rank": 1})
    assert accepted(bench, pinned_rank=0) == 1
    assert accepted(bench, pinned_rank=1) == 1


def test_the_queue_is_shared_by_the_ranks_at_their_limit():
    bench = make(2, objective_ms=250, admission={"max_in_flight_per_rank": 1})
    assert accepted(bench) == 4, "each rank has one, and each gets one more of the queue"


def test_an_open_rank_counts_before_those_at_their_limit():
    bench = make(2, mode="direct", admission={"max_in_flight_per_rank": 1})
    bench.request(pinned_rank=0)
    assert bench.request().last_rank == 1


@pytest.mark.parametrize(("margin_ms", "is_said"), [(20, True), (0, False)])
def test_the_message_says_what_was_compared(margin_ms, is_said):
    bench = make(objective_ms=100 if margin_ms else 90, slo={"margin_ms": margin_ms})
    error = bench.offer()
    assert error.reason is Reason.SLO_UNATTAINABLE
    assert ("less the margin of 20 ms" in error.message) is is_said
    assert error.facts["margin_ms"] == margin_ms


def test_shadow_counts_requests_that_were_admitted():
    bench = make(mode="direct", objective_ms=50, slo={"mode": "shadow"}, admission={"max_in_flight_per_rank": 1})
    for _ in range(3):
        bench.offer()
    assert (bench.router.counters.accepted, bench.router.counters.slo_shadow_rejects) == (1, 1)

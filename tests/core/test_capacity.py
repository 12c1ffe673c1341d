"""What ranks could ever take: obstacles, lanes, and what an idle fleet holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.capacity import LanesOf, OpenLanes, Reach, most_in_flight, obstacle
from gateway.core.entry import Narrow
from tests.support.core import Bench, make_info


def make_bench(*infos, budgets=({},), **config):
    """Ranks with these infos, None for one that never joined, spread over as many groups as there are budgets."""
    ranks = len(infos) // len(budgets)
    groups = [
        {"name": f"g{number}", "protocol": "vllm", "handshake": f"ipc:///{number}", "ranks": ranks, "budget": budget}
        | {"start_index": number * ranks}
        for number, budget in enumerate(budgets)
    ]
    bench = Bench(join=False, groups=groups, **config)
    for rank, info in enumerate(infos):
        if info is not None:
            bench.join(rank, info=make_info(**info))
    return bench


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"),
    [
        (99, 1, [None, None, None]),
        (100, 1, ["kv_capacity", None, None]),
        (150, 1, ["kv_capacity", "context_length", None]),
        (200, 1, ["group_budget", "context_length", "group_budget"]),
        (10, 241, ["group_budget", "group_budget", "group_budget"]),
    ],
)
def test_what_stands_in_the_way_of_each_rank(prompt, max_tokens, expected):
    infos = [{"kv_capacity_tokens": 100}, {"max_model_len": 150}, {}]
    table = make_bench(*infos, budgets=[{"max_prompt_tokens": 199, "max_kv_tokens": 250}]).router.ranks
    assert [obstacle(table, rank, prompt, max_tokens) for rank in range(3)] == expected


def test_a_rank_that_is_away_is_as_large_as_it_was_and_one_that_never_came_may_be_of_any_size():
    bench = make_bench({"kv_capacity_tokens": 100}, None)
    bench.lose(0)
    table = bench.router.ranks
    assert [obstacle(table, rank, 100, 1) for rank in (0, 1)] == ["kv_capacity", None]


@pytest.mark.parametrize(
    ("budget", "pinned", "checks_fit", "most"),
    [
        ({}, None, True, 3 + 1),  # 200 // 60, and 100 // 60
        ({}, None, False, 8 + 8),
        ({}, 1, True, 1),
        ({"max_requests": 2}, None, True, 2),
        ({"max_prompt_tokens": 179}, None, True, 2),
        ({"max_kv_tokens": 150}, None, True, 2),
        ({"max_kv_tokens": 69}, None, True, 0),
    ],
)
def test_how_many_sequences_an_idle_fleet_holds(budget, pinned, checks_fit, most):
    infos = [{"kv_capacity_tokens": 200}, {"kv_capacity_tokens": 100}]
    table = make_bench(*infos, budgets=[budget], admission={"max_in_flight_per_rank": 8}).router.ranks
    assert most_in_flight(table, 60, 10, pinned, checks_fit=checks_fit) == most


def test_groups_add_up():
    infos = [{"kv_capacity_tokens": None}] * 2
    admission = {"max_in_flight_per_rank": 8}
    table = make_bench(*infos, budgets=[{"max_requests": 3}, {}], admission=admission).router.ranks
    assert most_in_flight(table, 60, 10, None, checks_fit=True) == 11


def test_ranks_of_one_size_share_a_lane_with_all():
    table = make_bench({}, {}).router.ranks
    reach = Reach(table)
    assert [reach.lane(10, 10, pin) for pin in (None, 0, 1)] == [None, 0, 1]
    assert reach.lane(4096, 1, None) == Narrow(0), "no rank could ever take it"


def test_what_changes_lanes_is_noticed():
    bench = make_bench({}, {})
    reach = Reach(bench.router.ranks)
    assert reach.is_current
    assert reach.lane(100, 1, None) is None
    bench.lose(1)
    assert reach.is_current, "it is away, and as large as it was"
    bench.join(1, info=make_info(max_model_len=60))
    assert not reach.is_current
    reach.refresh()
    assert (reach.is_current, reach.lane(100, 1, None)) == (True, Narrow(0b01))


SIZES = st.sampled_from([10, 40, 100])
INFOS = st.none() | st.fixed_dictionaries({"max_model_len": SIZES, "kv_capacity_tokens": SIZES | st.none()})
BUDGETS = st.fixed_dictionaries({}, optional={"max_prompt_tokens": SIZES, "max_kv_tokens": SIZES})


@given(st.lists(INFOS, min_size=4, max_size=4), BUDGETS, BUDGETS, st.integers(1, 110), st.integers(1, 50), st.data())
@settings(max_examples=200, deadline=None)
def test_a_lane_is_asked_for_where_and_only_where_an_open_rank_could_take_it(infos, first, second, prompt, out, data):
    bench = make_bench(*infos, budgets=[first, second])
    table = bench.router.ranks
    lane = Reach(table).lane(prompt, out, None)
    could = [obstacle(table, rank, prompt, out) is None for rank in range(4)]
    gate = bytes(data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4)))
    if 0 in gate:
        assert (lane in OpenLanes(gate)) is any(fits and not state for fits, state in zip(could, gate, strict=True))
    assert [lane in LanesOf(rank) for rank in range(4)] == could
    for rank in range(4):
        assert (rank in OpenLanes(gate)) is (gate[rank] == 0)
        assert [other for other in range(4) if other in LanesOf(rank)] == [rank]


def test_since_when_nobody_is_there_who_could_take_it():
    bench = make_bench({}, {"max_model_len": 60}, None)
    table, reach = bench.router.ranks, Reach(bench.router.ranks)
    large = reach.lane(100, 1, None)
    assert large == Narrow(0b101)
    assert (reach.away_since(large), reach.away_since(None), reach.away_since(1)) == (None, None, None)
    bench.now = 150.0
    bench.lose(0)
    assert (reach.away_since(large), reach.away_since(None), reach.away_since(1)) == (150.0, None, None)
    bench.now = 160.0
    bench.lose(1)
    assert (reach.away_since(large), reach.away_since(None), reach.away_since(1)) == (150.0, 160.0, 160.0)
    bench.join(0, info=make_info())
    assert (reach.away_since(large), table.away_since) == (None, [None, 160.0, 0.0])

"""The rank table: numbering, lifecycle, derived columns, and states that were written down."""

from math import inf
from typing import get_args, get_type_hints

import pytest

from gateway.core.rank_row import RankRow
from gateway.core.ranks import DEFAULT_MAX_IN_FLIGHT, SLOTS_FACTOR, TRANSITIONS, RankState, RankTable
from gateway.types import RankInfo
from tests.support.core import Bench, load, make_config, make_info, wire_id

NOW = 1000.0


def make_table(ranks=2, protocol="vllm", **sections):
    return RankTable(make_config(ranks, protocol, **sections))


def group(name, ranks, **more):
    return {"name": name, "protocol": "vllm", "handshake": f"ipc:///{name}", "ranks": ranks, **more}


def test_numbers_run_through_the_groups():
    table = make_table(groups=[group("a", 2, start_index=4), group("b", 3)])
    assert table.size == 5
    assert [table.group_names[number] for number in table.group_of] == ["a", "a", "b", "b", "b"]
    assert table.group_rank == [0, 1, 0, 1, 2]
    assert table.engine_index == [4, 5, 0, 1, 2]


@pytest.mark.parametrize(("protocol", "is_resident", "counts"), [("tokenspeed", True, True), ("vllm", False, False)])
def test_the_family_says_what_its_numbers_mean(protocol, is_resident, counts):
    table = make_table(1, protocol)
    assert (table.is_resident, table.counts_tokens) == ([is_resident], [counts])


def test_nothing_leads_back_to_absent_and_only_ready_ranks_are_lost():
    assert {to for edges in TRANSITIONS.values() for to in edges.values()} == {RankState.READY, RankState.LOST}
    assert [state for state, edges in TRANSITIONS.items() if "lost" in edges] == [RankState.READY]
    assert all(edges["joined"] is RankState.READY for edges in TRANSITIONS.values())


@pytest.mark.parametrize(
    ("info", "capacity"),
    [
        ({"kv_capacity_tokens": 1000}, 1000),
        ({"num_gpu_blocks": 10, "block_size": 16}, 160),
        ({"kv_capacity_tokens": 7, "num_gpu_blocks": 10, "block_size": 16}, 7),
        ({"num_gpu_blocks": 10}, inf),
        ({}, inf),
    ],
)
def test_the_capacity_is_what_the_rank_said_or_computed_or_unknown(info, capacity):
    table = make_table(1)
    table.join(0, 1, RankInfo(max_model_len=4096, **info))
    assert table.kv_capacity_tokens == table.free_kv_tokens == [capacity]
    assert table.has_kv_limit is (capacity != inf)
    assert table.kv_floor_tokens == capacity


@pytest.mark.parametrize(
    ("setting", "slots", "limit"),
    [(None, 8, 8 * SLOTS_FACTOR), (None, None, DEFAULT_MAX_IN_FLIGHT), (5, 8, 5), (5, None, 5)],
)
def test_the_in_flight_limit(setting, slots, limit):
    table = make_table(1, admission={"max_in_flight_per_rank": setting})
    table.join(0, 1, RankInfo(max_model_len=4096, max_num_seqs=slots))
    assert table.max_in_flight == [limit]


def test_a_new_incarnation_starts_from_nothing():
    table = make_table(1)
    table.restore(RankRow(rank=0, in_flight=3, queued_tokens=9, running=5, kv_usage=0.5, head_age_ms=1), NOW, 4096)
    table.is_blocked[0] = True
    table.join(0, 2, make_info())
    assert (table.incarnation, table.is_blocked, table.head_since, table.snapshot_at) == ([2], [False], [None], [None])
    own = (table.in_flight, table.in_flight_prefill, table.in_flight_decode, table.queued_tokens)
    reported = (table.running, table.waiting, table.reported_running, table.reported_waiting, table.foreign)
    assert all(column == [0] for column in (*own, table.ctx_tokens, table.own_tokens, *reported))


def test_the_derived_columns_follow_every_change():
    bench = Bench(2, filters={"max_kv_usage": 0.9}, admission={"max_in_flight_per_rank": 1})
    table = bench.router.ranks
    assert (table.open_count, table.over_kv_count) == (2, 0)
    request = bench.request(pinned_rank=0)
    assert (table.is_open, table.open_count) == ([False, True], 1)
    bench.batch(0, [(wire_id(request), [9])], load(1, 0, 0.95))
    assert (table.is_over_kv, table.over_kv_count) == ([True, False], 1)
    assert table.free_kv_tokens[0] == pytest.approx(0.05 * 400_000)
    bench.finish(request)
    assert (table.open_count, table.over_kv_count) == (2, 0), "an idle rank is not over its limit"
    assert table.free_kv_tokens[0] == 400_000


def test_the_floor_is_a_bound_until_it_is_made_exact():
    bench = Bench(2)
    table = bench.router.ranks
    request = bench.request([1] * 1000, pinned_rank=0)
    assert table.kv_floor_tokens == 399_000
    bench.finish(request)
    assert table.kv_floor_tokens <= min(table.free_kv_tokens)
    assert table.raise_kv_floor() == table.kv_floor_tokens == 400_000


# --- states that were written down -----------------------------------------------------------------


def restored(protocol="vllm", **columns):
    table = make_table(1, protocol)
    table.restore(RankRow(rank=0, **columns), NOW, 4096)
    return table


def test_a_row_has_the_states_of_the_table():
    assert set(get_args(get_type_hints(RankRow)["state"])) == {state.value for state in RankState}


def test_an_empty_row_is_an_idle_rank_that_never_reported():
    table = restored()
    assert (table.state, table.incarnation, table.max_model_len) == ([RankState.READY], [1], [4096])
    assert (table.is_open, table.snapshot_at, table.head_since) == ([True], [None], [None])
    assert table.kv_capacity_tokens == [inf]


def test_every_column_is_restored():
    table = restored(
        state="LOST",
        incarnation=7,
        in_flight=5,
        in_flight_prefill=2,
        in_flight_decode=3,
        queued_tokens=40,
        ctx_tokens=50,
        own_tokens=120,
        sent_since_snapshot=1,
        head_age_ms=1500.0,
        reported_running=9,
        reported_waiting=8,
        running=3,
        waiting=4,
        kv_usage=0.5,
        snapshot_age_ms=250.0,
        kv_capacity_tokens=1000,
        max_in_flight=6,
        max_model_len=2048,
    )
    assert (table.state, table.incarnation, table.is_open) == ([RankState.LOST], [7], [False])
    assert (table.in_flight, table.in_flight_prefill, table.in_flight_decode) == ([5], [2], [3])
    assert (table.queued_tokens, table.ctx_tokens, table.own_tokens) == ([40], [50], [120])
    assert (table.sent_since_snapshot, table.head_since) == ([1], [NOW - 1.5])
    assert (table.reported_running, table.reported_waiting, table.running, table.waiting) == ([9], [8], [3], [4])
    assert (table.kv_usage, table.snapshot_at, table.foreign) == ([0.5], [NOW - 0.25], [2])
    assert (table.max_in_flight, table.max_model_len, table.free_kv_tokens) == ([6], [2048], [500.0])


@pytest.mark.parametrize(
    ("columns", "prefill", "decode"),
    [
        ({}, 0, 5),
        ({"in_flight_prefill": 2}, 2, 3),
        ({"in_flight_decode": 2}, 3, 2),
        ({"in_flight_decode": 9}, 0, 9),
        ({"in_flight_prefill": 9}, 9, 0),
    ],
)
def test_a_missing_phase_is_what_the_other_leaves(columns, prefill, decode):
    table = restored(in_flight=5, **columns)
    assert (table.in_flight_prefill, table.in_flight_decode) == ([prefill], [decode])


def test_own_tokens_are_the_queued_and_the_context_tokens_unless_given():
    assert restored(queued_tokens=4, ctx_tokens=6).own_tokens == [10]
    assert restored(queued_tokens=4, ctx_tokens=6, own_tokens=0).own_tokens == [0]


@pytest.mark.parametrize(
    ("protocol", "columns", "expected"),
    [
        ("vllm", {"running": 3, "waiting": 2}, (3, 2, 3, 2)),
        ("tokenspeed", {"running": 3, "waiting": 2}, (3, 2, 5, 2)),
        ("vllm", {"reported_running": 5, "reported_waiting": 2}, (5, 2, 5, 2)),
        ("tokenspeed", {"reported_running": 5, "reported_waiting": 2}, (3, 2, 5, 2)),
        ("tokenspeed", {"reported_running": 1, "reported_waiting": 2}, (0, 2, 1, 2)),
        ("vllm", {"kv_usage": 0.5}, (0, 0, 0, 0)),
    ],
)
def test_raw_and_normalised_counts_follow_from_each_other(protocol, columns, expected):
    table = restored(protocol, **columns)
    got = (table.running, table.waiting, table.reported_running, table.reported_waiting)
    assert tuple(column[0] for column in got) == expected
    assert table.snapshot_at == [NOW]


def test_an_age_alone_is_a_report_of_an_idle_rank():
    assert restored(snapshot_age_ms=0.0).snapshot_at == [NOW]


def test_a_restored_state_is_the_one_that_the_router_had():
    bench = Bench(1, info=make_info(max_num_seqs=None))
    first = bench.request([1] * 10)
    bench.request([1] * 20)
    bench.now += 2
    bench.batch(0, [(wire_id(first), [9, 9])], load(2, 1, 0.25))
    bench.now += 3
    was = bench.router.ranks
    row = RankRow(
        rank=0,
        in_flight=2,
        in_flight_prefill=1,
        queued_tokens=20,
        ctx_tokens=12,
        own_tokens=32,
        head_age_ms=3000,
        running=2,
        waiting=1,
        kv_usage=0.25,
        snapshot_age_ms=3000,
        kv_capacity_tokens=400_000,
    )
    table = RankTable(bench.config)
    table.restore(row, bench.now, 4096)
    names = [name for name, value in vars(was).items() if isinstance(value, list) and name != "info"]
    assert {name: getattr(table, name) for name in names} == {name: getattr(was, name) for name in names}

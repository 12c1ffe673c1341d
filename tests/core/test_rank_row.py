"""States that were written down, and the table that they are restored to."""

from math import inf, nan
from typing import get_args, get_type_hints

import msgspec
import pytest

from gateway.core.rank_row import RankRow
from gateway.core.ranks import RankState, RankTable
from tests.support.core import Bench, load, make_config, make_info, wire_id

NOW = 1000.0


def restored(protocol="vllm", **columns):
    table = RankTable(make_config(1, protocol))
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
        prompt_tokens_in_flight=90,
        kv_reserved_tokens=300,
        sent_since_snapshot=1,
        pending_ms=12.5,
        head_ms=5.0,
        step_ms=8.25,
        mean_out_tokens=40.5,
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
    assert (table.prompt_tokens_in_flight, table.kv_reserved_tokens) == ([90], [300])
    assert (table.group_in_flight, table.group_prompt_tokens, table.group_kv_tokens) == ([5], [90], [300])
    assert (table.sent_since_snapshot, table.head_since) == ([1], [NOW - 1.5])
    assert (table.pending_us, table.head_us, table.head_credit_us) == ([12_500], [5000], [5000])
    assert (table.step_us, table.mean_out_tokens) == ([8250], [40.5])
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


def test_reserved_tokens_are_at_least_the_own_tokens_unless_given():
    table = restored(queued_tokens=4, ctx_tokens=6)
    assert (table.prompt_tokens_in_flight, table.kv_reserved_tokens) == ([10], [10])
    assert restored(queued_tokens=4, kv_reserved_tokens=0).kv_reserved_tokens == [0]


@pytest.mark.parametrize(
    ("columns", "pending", "head", "since"),
    [
        ({"pending_ms": 3.0}, 3000, 0, NOW),
        ({"pending_ms": 3.0, "head_ms": 1.0}, 3000, 1000, NOW),
        ({"head_ms": 2.0}, 2000, 2000, NOW),
        ({"pending_ms": 1.0, "head_ms": 2.0}, 2000, 2000, NOW),
        ({"pending_ms": 3.0, "head_age_ms": 4.0}, 3000, 0, NOW - 0.004),
        ({}, 0, 0, None),
    ],
)
def test_predicted_prefill_needs_no_head_and_holds_the_heads_part(columns, pending, head, since):
    table = restored(**columns)
    assert (table.pending_us, table.head_us, table.head_since) == ([pending], [head], [since])


@pytest.mark.parametrize("name", ["pending_ms", "head_ms", "step_ms", "mean_out_tokens"])
@pytest.mark.parametrize("value", [-1.0, inf, nan, 1e300])
def test_what_is_no_time_is_refused(name, value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"rank": 0, name: value}, RankRow)


def test_a_second_restore_replaces_the_first_in_its_group():
    table = restored(in_flight=5, prompt_tokens_in_flight=50, kv_reserved_tokens=90)
    table.restore(RankRow(rank=0, in_flight=2, prompt_tokens_in_flight=20, kv_reserved_tokens=30), NOW, 4096)
    assert (table.group_in_flight, table.group_prompt_tokens, table.group_kv_tokens) == ([2], [20], [30])


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
    group = {"name": "g", "protocol": "vllm", "handshake": "ipc:///g", "ranks": 1, "budget": {"max_requests": 9}}
    bench = Bench(1, info=make_info(max_num_seqs=None), groups=[group])
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
        prompt_tokens_in_flight=30,
        kv_reserved_tokens=62,
        head_age_ms=3000,
        pending_ms=was.pending_us[0] / 1e3,
        head_ms=was.head_us[0] / 1e3,
        running=2,
        waiting=1,
        kv_usage=0.25,
        snapshot_age_ms=3000,
        kv_capacity_tokens=400_000,
    )
    table = RankTable(bench.config)
    table.restore(row, bench.now, 4096)
    assert was.pending_us[0] > 0
    names = [name for name, value in vars(was).items() if isinstance(value, list) and name != "info"]
    assert {name: getattr(table, name) for name in names} == {name: getattr(was, name) for name in names}

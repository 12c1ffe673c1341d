"""The rank table: numbering, lifecycle, derived columns, and what a rank has shown."""

from math import inf

import pytest

from gateway.core.rank_row import RankRow
from gateway.core.ranks import (
    DEFAULT_MAX_IN_FLIGHT,
    DEFAULT_MEAN_OUT_TOKENS,
    MAX_STEP_US,
    SERVING,
    SLOTS_FACTOR,
    TRANSITIONS,
    RankState,
    RankTable,
)
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


def test_the_lifecycle_table():
    """What each event means where; the rest means nothing."""
    states = {state.value: state for state in RankState}
    edges = {(at.value, event, to.value) for at, steps in TRANSITIONS.items() for event, to in steps.items()}
    assert set(TRANSITIONS) == set(RankState)
    leaving = {(at, to) for at, event, to in edges if event == "removed"}
    assert {at for at, _ in leaving} == {"JOINING", "DRAINING", "LOST"}
    assert {to for _, to in leaving} == {"ABSENT"}
    assert {at for at, event, _ in edges if event == "lost"} == {"JOINING", *SERVING}
    assert {at for at, event, _ in edges if event == "drained"} == {*SERVING} - {"DRAINING"}
    assert {at for at, event, to in edges if event == "joined" and to == "READY"} == {"ABSENT", "JOINING", "LOST"}
    others = {edge for edge in edges if edge[1] not in {"removed", "lost", "drained", "joined"}}
    assert others == {
        ("JOINING", "settled", "READY"),
        ("READY", "silent", "SUSPECT"),
        ("READY", "ejected", "EJECTED"),
        ("SUSPECT", "heard", "READY"),
        ("DRAINING", "undrained", "READY"),
        ("EJECTED", "returned", "READY"),
        ("EJECTED", "undrained", "READY"),
        ("LOST", "heard", "JOINING"),
        ("ABSENT", "held", "DRAINING"),
        ("JOINING", "held", "DRAINING"),
        ("LOST", "held", "DRAINING"),
    }
    assert all(hash(state) == hash(name) for name, state in states.items())


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
    row = RankRow(rank=0, in_flight=3, queued_tokens=9, running=5, kv_usage=0.5, head_age_ms=1, pending_ms=5, head_ms=2)
    table.restore(row, NOW, 4096)
    table.is_blocked[0] = True
    table.observe_step(0, 1000)
    table.observe_finished(0, 8)
    mean = table.mean_out_tokens[0]
    table.join(0, 2, make_info())
    assert (table.incarnation, table.is_blocked, table.head_since, table.snapshot_at) == ([2], [False], [None], [None])
    own = (table.in_flight, table.in_flight_prefill, table.in_flight_decode, table.queued_tokens)
    reported = (table.running, table.waiting, table.reported_running, table.reported_waiting, table.foreign)
    assert all(column == [0] for column in (*own, table.ctx_tokens, table.own_tokens, *reported))
    times = (table.pending_us, table.head_us, table.head_credit_us, table.step_us)
    reserved = (table.prompt_tokens_in_flight, table.kv_reserved_tokens)
    groups = (table.group_in_flight, table.group_prompt_tokens, table.group_kv_tokens)
    assert all(column == [0] for column in (*times, *reserved, *groups))
    assert table.mean_out_tokens == [mean] != [DEFAULT_MEAN_OUT_TOKENS], "callers stay who they are"


# --- what a rank has shown ------------------------------------------------------------------------


def test_the_first_step_counts_in_full_and_later_ones_move_the_mean():
    table = make_table(2)
    assert table.step_us == [0, 0], "unknown"
    table.observe_step(1, 20_000)
    assert table.step_us == [0, 20_000]
    table.observe_step(1, 10_000)
    assert table.step_us[1] == 19_000
    for _ in range(100):
        table.observe_step(1, 10_000)
    assert table.step_us[1] == pytest.approx(10_000, abs=10)


@pytest.mark.parametrize("gap", [0, -5, MAX_STEP_US + 1, 10**30])
def test_a_pause_is_no_step(gap):
    table = make_table(1)
    table.observe_step(0, gap)
    assert table.step_us == [0]
    table.observe_step(0, 1)
    table.observe_step(0, gap)
    assert table.step_us == [1]


def test_a_known_step_never_becomes_unknown_again():
    table = make_table(1)
    table.observe_step(0, 3)
    for _ in range(50):
        table.observe_step(0, 1)
    assert table.step_us[0] >= 1


def test_the_output_length_starts_at_the_setting_and_follows_each_rank():
    assert make_table(1).mean_out_tokens == [DEFAULT_MEAN_OUT_TOKENS]
    table = make_table(2, predictor={"prefill_ms": "1", "mean_out_tokens": 40})
    assert table.mean_out_tokens == [40.0, 40.0]
    table.observe_finished(1, 80)
    assert table.mean_out_tokens == [40.0, 42.0]
    for _ in range(300):
        table.observe_finished(1, 7)
    assert table.mean_out_tokens[1] == pytest.approx(7, abs=0.01)


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

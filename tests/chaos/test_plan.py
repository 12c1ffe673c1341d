"""A run can be repeated: plan and traffic follow from the seed."""

from collections import Counter

import pytest

from tests.chaos.plan import HEAD_S, MAX_DISTURBED, TAIL_S, Kind, Settings, choose, make_plan
from tests.chaos.run import MODES, PROTOCOLS, TRANSPORTS
from tests.chaos.traffic import Traffic

FIVE_MINUTES = Settings(duration_s=300.0, protocol="tokenspeed")


def requests(seed, name, count=50):
    traffic = Traffic(seed, name, ranks=6, most_logprobs=2)
    return [traffic.next() for _ in range(count)]


def test_equal_seeds_give_equal_plans_and_others_do_not():
    assert make_plan(7, FIVE_MINUTES) == make_plan(7, FIVE_MINUTES)
    assert make_plan(7, FIVE_MINUTES) != make_plan(8, FIVE_MINUTES)


def test_equal_seeds_and_names_give_equal_requests_and_others_do_not():
    assert requests(7, "a") == requests(7, "a")
    assert requests(7, "a") != requests(8, "a")
    assert requests(7, "a") != requests(7, "b")
    assert len({job.request.request_id for job in requests(7, "a") + requests(7, "b")}) == 100


def test_seeds_choose_every_wire_and_mode():
    chosen = {choose(seed, PROTOCOLS, MODES, TRANSPORTS) for seed in range(120)}
    assert len(chosen) == 12


@pytest.mark.parametrize("seed", range(1, 6))
def test_five_minutes_have_a_hundred_faults_of_every_kind(seed):
    plan = make_plan(seed, FIVE_MINUTES)
    assert len(plan) >= 100
    assert [fault.number for fault in plan] == list(range(len(plan)))
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
    assert plan[0].at_s >= HEAD_S
    assert plan[-1].at_s <= FIVE_MINUTES.duration_s - TAIL_S


def test_every_kind_is_drawn():
    counts = Counter(fault.kind for seed in range(5) for fault in make_plan(seed, FIVE_MINUTES))
    assert set(counts) == set(Kind)


def test_a_rank_has_one_fault_at_a_time_and_some_have_none():
    plan = make_plan(3, Settings(duration_s=300.0, protocol="vllm", mean_gap_s=0.2))
    busy = dict.fromkeys(range(6), 0.0)
    for fault in plan:
        if fault.ranks:
            others = sum(until > fault.at_s for until in busy.values())
            assert others < MAX_DISTURBED
        for rank in fault.ranks:
            assert busy[rank] <= fault.at_s
            busy[rank] = fault.at_s + fault.duration_s


def test_miscounts_are_only_for_the_wire_that_counts():
    plan = make_plan(1, Settings(duration_s=300.0, protocol="vllm", mean_gap_s=0.3))
    assert Kind.MISCOUNT not in {fault.kind for fault in plan}


def test_only_the_kinds_that_were_asked_for():
    plan = make_plan(1, Settings(duration_s=60.0, protocol="vllm", kinds=frozenset({Kind.KILL, Kind.BURST})))
    assert {fault.kind for fault in plan} == {Kind.KILL, Kind.BURST}
    assert not make_plan(1, Settings(duration_s=60.0, protocol="vllm", kinds=frozenset()))

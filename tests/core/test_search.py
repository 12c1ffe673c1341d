"""How far the queue is searched for what a rank can take: few looks, and no idle rank beside a request that it can take."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.search import MAX_SKIPPED
from tests.support.core import Bench, make_info, wire_id

INFOS = ({}, {"max_model_len": 60}, {"kv_capacity_tokens": 30})


def make_bench(*infos, mode="queue", **queue):
    queue = {"order": "fcfs", "max_in_flight_per_rank": 1} | queue
    bench = Bench(len(infos), join=False, scheduling={"mode": mode, "queue": queue})
    for rank, info in enumerate(infos):
        bench.join(rank, info=make_info(**info))
    return bench


@pytest.fixture
def looks(monkeypatch):
    """How many decisions were made over all."""
    counts = [0]

    def count_in(bench):
        decide = bench.router._parts.policy.decide_gated

        def decide_gated(*args, **more):
            counts[0] += 1
            return decide(*args, **more)

        monkeypatch.setattr(bench.router._parts.policy, "decide_gated", decide_gated)
        return counts

    return count_in


@pytest.mark.parametrize("mode", ["queue", "batch"])
@pytest.mark.parametrize("depth", [10, 300])
def test_an_event_costs_the_same_however_much_an_idle_rank_cannot_take(looks, mode, depth):
    bench = make_bench({}, *[{"max_model_len": 60}] * 3, mode=mode)
    running = bench.request([1] * 200)
    for _ in range(depth):
        bench.router.handle(bench.arrived([1] * 200), bench.now)
    count = looks(bench)
    bench.batch(0, [(wire_id(running), [1])])
    assert count == [0], "nothing is queued that an open rank could ever take"


def test_nor_does_it_depend_on_how_deep_the_first_lies_that_has_to_wait(looks):
    """The small rank is busy and has no room now; what it could take stands behind everything else."""
    bench = make_bench({}, {"kv_capacity_tokens": 100}, max_in_flight_per_rank=2, kv_limit=0.95)
    running = [bench.request([1] * 200, pinned_rank=0) for _ in range(2)]
    bench.request([1] * 60, pinned_rank=1)
    for _ in range(200):
        bench.router.handle(bench.arrived([1] * 200), bench.now)
    waiting = [bench.request([1] * 60) for _ in range(20)]
    count = looks(bench)
    bench.batch(0, [(wire_id(running[0]), [1])])
    assert count[0] <= 2
    assert all(request.last_rank is None for request in waiting)


def test_an_idle_rank_takes_the_one_request_that_it_can_from_the_very_end():
    bench = make_bench({}, {"max_model_len": 60})
    bench.request([1] * 200)
    for _ in range(100):
        bench.request([1] * 200)
    assert bench.request([1] * 10).last_rank == 1


def test_what_waits_for_room_keeps_it_on_the_ranks_that_could_take_it_only():
    bench = make_bench({"kv_capacity_tokens": 300}, {"kv_capacity_tokens": 100}, max_in_flight_per_rank=4)
    bench.request([1] * 200)
    large, small = bench.request([1] * 150), bench.request([1] * 20)
    assert (large.last_rank, small.last_rank) == (None, 1)


@pytest.mark.parametrize("held", [MAX_SKIPPED, MAX_SKIPPED + 2, 100])
def test_an_idle_rank_takes_what_it_can_however_many_are_kept_back_for_a_better_one(looks, held):
    queue = {"order": "fcfs", "gate_tokens": 1, "hold_ratio": 0.5, "max_hold_s": 60}
    bench = Bench(3, join=False, policy={"cost": "in_flight_decode + 1"}, scheduling={"mode": "queue", "queue": queue})
    bench.join(0, info=make_info(max_model_len=60))
    bench.join(1)
    bench.join(2)
    for _ in range(5):
        bench.batch(1, [(wire_id(bench.request([1] * 5, pinned_rank=1)), [1])])
    bench.request([1] * 5, pinned_rank=2)
    for _ in range(held):
        bench.request([1] * 100)  # rank 1 could take it now, rank 2 is cheaper and shut
    assert bench.router.queue_depth == held
    count = looks(bench)
    assert bench.request([1] * 10).last_rank == 0
    assert count[0] <= 2 * (MAX_SKIPPED + 2)


requests = st.lists(st.tuples(st.sampled_from([5, 20, 45, 100]), st.none() | st.integers(0, 2)), max_size=30)


@given(requests, st.sampled_from(["queue", "batch"]), st.sampled_from([None, 0.7]), st.permutations(range(3)))
@settings(max_examples=150, deadline=None)
def test_no_rank_is_idle_beside_a_request_that_it_can_take(asked, mode, hold_ratio, order):
    bench = make_bench(*(INFOS[number] for number in order), mode=mode, hold_ratio=hold_ratio)
    largest = [
        min(INFOS[number].get("max_model_len", 999), INFOS[number].get("kv_capacity_tokens", 999)) for number in order
    ]
    live = []
    for length, pin in asked:
        found = bench.offer([1] * length, pinned_rank=pin)
        live += [found] if hasattr(found, "sequences") else []
        if len(live) % 4 == 3:
            sent = next((request for request in live if request.last_rank is not None and not request.is_ended), None)
            if sent is not None:
                bench.finish(sent)
        for rank in range(3):
            if not bench.router.ranks.in_flight[rank]:
                waiting = [r for r in live if not r.is_ended and r.last_rank is None]
                lengths = [len(r.arrived.prompt_token_ids) for r in waiting if r.arrived.pinned_rank in (None, rank)]
                assert all(length >= largest[rank] for length in lengths), f"rank {rank} is idle"

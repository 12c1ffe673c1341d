"""Mode batch, through the whole router: what goes together, when, and what no batch may exceed."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import SendBlocked, SendUnblocked
from tests.support.core import Bench, make_info, wire_id

WINDOW_S = 0.02


def batching(ranks=1, *, slots=8, info=None, queue=None, **settings):
    """A router in mode batch; batches of up to 4, collected for 20 ms on a busy rank."""
    batch = {"max_requests": 4, "window_ms": WINDOW_S * 1e3, "max_in_flight_batches": 2}
    batch |= settings.pop("batch", {})
    queue = {"max_in_flight_per_rank": slots, "order": "fcfs", "fair": False} | (queue or {})
    return Bench(ranks, info=info, scheduling={"mode": "batch", "queue": queue, "batch": batch}, **settings)


def together(bench):
    """The sizes of the batches that went, in order."""
    sizes = {}
    for decision in bench.router.decisions.latest(1000):
        if decision.batch is not None:
            sizes[decision.batch[0]] = decision.batch[1:]
    return [sizes[number] for number in sorted(sizes)]


def drain(bench):
    while bench.router.live_count:
        for attempt in list(bench.router._attempts.ledger.live.values()):
            bench.batch(attempt.rank, [(attempt.wire_id, [9], "stop")])
        bench.tick(WINDOW_S)
    bench.assert_quiet()


def test_an_idle_rank_gets_what_is_there_at_once():
    bench = batching()
    bench.request()
    assert together(bench) == [(1, "idle_rank")]
    assert bench.router.next_due() is None
    drain(bench)


def test_a_busy_rank_collects_for_the_window_and_not_a_tick_longer():
    bench = batching()
    bench.request()
    bench.now += 0.001
    first = bench.now
    bench.request()
    bench.now += 0.01
    bench.request()
    assert together(bench) == [(1, "idle_rank")]
    assert bench.router.next_due() == first + WINDOW_S, "the window of the oldest one"
    bench.now = bench.router.next_due()
    bench.tick()
    assert together(bench) == [(1, "idle_rank"), (2, "window")]
    assert bench.router.next_due() is None
    drain(bench)


def test_a_batch_that_is_full_waits_for_nothing():
    bench = batching()
    for _ in range(5):
        bench.request()
    assert together(bench) == [(1, "idle_rank"), (4, "batch_full")]
    drain(bench)


def test_a_collecting_rank_does_not_keep_an_idle_one_waiting():
    bench = batching(2)
    bench.request(pinned_rank=0)
    waiting = bench.request(pinned_rank=0)
    other = bench.request()
    assert (waiting.last_rank, other.last_rank) == (None, 1)
    drain(bench)


@pytest.mark.parametrize(("release_at", "tokens"), [("first_token", "token"), ("finish", "end")])
def test_as_many_batches_as_the_setting_says_are_on_a_rank(release_at, tokens):
    bench = batching(batch={"max_in_flight_batches": 1, "release_at": release_at, "window_ms": 0})
    first = bench.request()
    second = bench.request()
    assert second.last_rank is None
    if tokens == "token":
        bench.batch(0, [(wire_id(first), [9])])
        assert not first.is_ended
    else:
        bench.batch(0, [(wire_id(first), [9])])
        assert second.last_rank is None
        bench.finish(first)
    assert second.last_rank == 0
    drain(bench)


def held_until(count, **settings):
    """Nothing goes before `count` are queued: what then goes first is one batch for an idle rank."""
    return batching(queue={"hold_until_queued": count} | settings.pop("queue", {}), **settings)


GROUP = {"name": "g", "protocol": "vllm", "handshake": "ipc:///g", "ranks": 1}


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 4),
        ({"slots": 3}, 3),
        ({"admission": {"max_in_flight_per_rank": 2}}, 2),
        # 40 prompt tokens each.
        ({"info": make_info(kv_capacity_tokens=100)}, 2),
        ({"info": make_info(kv_capacity_tokens=100), "queue": {"kv_limit": 0.7}}, 1),
        ({"info": make_info(kv_capacity_tokens=121), "queue": {"kv_limit": 1.0}}, 3),
        ({"info": make_info(kv_capacity_tokens=121), "queue": {"kv_limit": 1.0}, "filters": {"kv_fit": "off"}}, 3),
        ({"groups": [GROUP | {"budget": {"max_requests": 3}}]}, 3),
        ({"groups": [GROUP | {"budget": {"max_prompt_tokens": 80}}]}, 2),
        ({"groups": [GROUP | {"budget": {"max_kv_tokens": 3 * 45}}]}, 3),
        ({"groups": [GROUP | {"budget": {"max_kv_tokens": 3 * 45 - 1}}]}, 2),
        ({"batch": {"max_tokens": 119}}, 2),
        ({"batch": {"max_padded_tokens": 120}}, 3),
    ],
)
def test_no_member_of_a_batch_exceeds_what_its_rank_may_take(settings, size):
    """Nothing is charged before the whole batch is formed: each member counts on those before it."""
    bench = held_until(4, **settings)
    for _ in range(4):
        bench.request([1] * 40, max_tokens=5)
    assert together(bench)[0][0] == size
    drain(bench)


def test_a_prompt_that_is_too_long_for_the_rank_is_no_member_of_its_batch():
    bench = batching(2, queue={"hold_until_queued": 2})
    bench.send(SendBlocked(1, 1))
    bench.router.ranks.max_model_len[0] = 60
    bench.router.ranks.min_model_len = 60
    short, long = bench.request([1] * 10), bench.request([1] * 60)
    assert (short.last_rank, long.last_rank) == (0, None)
    bench.send(SendUnblocked(1, 1))
    assert long.last_rank == 1
    drain(bench)


def test_a_head_alone_on_an_idle_rank_may_exceed_the_limit_that_is_for_busy_ranks():
    bench = batching(info=make_info(kv_capacity_tokens=100))
    assert bench.request([1] * 99, max_tokens=1).last_rank == 0
    drain(bench)


def test_a_rank_with_no_slot_for_the_next_one_does_not_wait_for_the_window():
    bench = batching(slots=2)
    bench.request()
    bench.request()
    assert together(bench) == [(1, "idle_rank")]
    bench.request()
    assert together(bench) == [(1, "idle_rank"), (1, "closed")]
    drain(bench)


def test_a_preferred_size_goes_before_the_window_ends():
    bench = batching(batch={"preferred_sizes": [2]})
    bench.request()
    bench.request()
    assert len(together(bench)) == 1
    bench.request()
    assert together(bench) == [(1, "idle_rank"), (2, "preferred_size")]
    drain(bench)


def test_a_pin_joins_the_batch_of_its_own_rank_only():
    bench = held_until(3, ranks=2)
    here, there, anywhere = bench.request(pinned_rank=0), bench.request(pinned_rank=1), bench.request()
    assert (here.last_rank, there.last_rank) == (0, 1)
    assert together(bench) == [(2, "idle_rank"), (1, "idle_rank")]
    assert anywhere.last_rank == 0
    drain(bench)


def test_members_that_are_late_or_gone_are_not_in_the_batch():
    bench = batching()
    bench.request()
    gone, late, kept = bench.request(), bench.request(deadline_at=bench.now + WINDOW_S), bench.request()
    bench.cancel(gone, Reason.CANCELLED)
    bench.now += WINDOW_S
    bench.send(bench.arrived())
    assert late.error.reason is Reason.DEADLINE_EXCEEDED
    assert kept.last_rank == 0
    assert together(bench) == [(1, "idle_rank"), (2, "window")]
    assert len(bench.dispatched) == 3
    drain(bench)


def test_each_sequence_of_a_request_is_a_member_of_its_own():
    bench = held_until(3, batch={"max_requests": 2})
    request = bench.request(n=3)
    assert together(bench) == [(2, "batch_full")]
    bench.batch(0, [(wire_id(request, 0), [9])])
    bench.tick(WINDOW_S)
    assert together(bench) == [(2, "batch_full"), (1, "window")]
    drain(bench)
    assert bench.ended == [request]


def test_the_bound_on_predicted_time_is_for_batches_not_for_single_requests():
    bench = held_until(
        4,
        batch={"max_predicted_ms": 10.0},
        predictor={"prefill_ms": "0.1 * total_new_tokens"},
    )
    for length in (200, 40, 40, 40):
        bench.request([1] * length)
    # 20 ms alone; then 4 + 4 ms, and 12 would be too many.
    assert together(bench) == [(1, "predicted_cap"), (2, "predicted_cap")]
    drain(bench)
    assert [size for size, _ in together(bench)] == [1, 2, 1]

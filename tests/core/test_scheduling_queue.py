"""Mode queue, through the whole router: who goes next, who waits, and that nobody waits for ever."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import SendBlocked, SendUnblocked
from tests.support.core import Bench, make_info, wire_id


def queueing(ranks=1, slots=1, *, info=None, join=True, **settings):
    """Ranks that take `slots` sequences each. `queue` overrides settings of the queue."""
    queue = {"max_in_flight_per_rank": slots, "order": "fcfs", "fair": False} | settings.pop("queue", {})
    return Bench(ranks, scheduling={"mode": "queue", "queue": queue}, info=info, join=join, **settings)


def served(bench):
    """The ids of the requests in the order in which they went to ranks."""
    return [decision.label for decision in reversed(bench.router.decisions.latest(1000)) if decision.rank is not None]


def drain(bench):
    """Let the ranks finish one sequence after the other until nothing is left."""
    while bench.router.live_count:
        attempt = next(iter(bench.router._attempts.ledger.live.values()))
        bench.now += 0.1
        bench.batch(attempt.rank, [(attempt.wire_id, [9], "stop")])
    bench.assert_quiet()


# ---- a rank is bound late ------------------------------------------------------------------------


def test_what_has_no_slot_waits_and_goes_in_the_step_that_frees_one():
    bench = queueing(2, slots=1)
    running = [bench.request(), bench.request()]
    waiting = bench.request()
    assert (sorted(bench.sent), bench.router.queue_depth) == ([0, 1], 1)
    bench.finish(running[1])
    assert waiting.last_rank == running[1].last_rank
    assert bench.router.queue_depth == 0
    drain(bench)


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fcfs", "long short mid"), ("spf", "short mid long"), ("aging", "short mid long"), ("hrrn", "short mid long")],
)
def test_the_order_decides_when_the_gate_opens_not_when_they_arrive(order, expected):
    bench = queueing(queue={"order": order})
    bench.request(request_id="running")
    for name, length in (("long", 3000), ("short", 10), ("mid", 300)):
        bench.request([1] * length, request_id=name)
        bench.now += 0.001
    drain(bench)
    assert served(bench) == ["running", *expected.split()]


def test_a_more_urgent_priority_goes_first():
    bench = queueing()
    bench.request(request_id="running")
    for priority in (5, 0, -1, 0):
        bench.request(request_id=f"{priority} {bench._ids}", priority=priority)
    drain(bench)
    assert [name.split()[0] for name in served(bench)[1:]] == ["-1", "0", "0", "5"]


def test_sequences_of_one_request_queue_by_themselves_and_end_together():
    bench = queueing(2, slots=1)
    request = bench.request(n=3)
    assert bench.router.queue_depth == 1
    bench.batch(0, [(wire_id(request, 0), [9], "stop")])
    assert bench.router.queue_depth == 0
    assert not request.is_ended
    drain(bench)
    assert bench.ended == [request]


def test_nothing_goes_before_as_many_are_queued_as_the_hook_for_tests_says():
    bench = queueing(slots=8, queue={"hold_until_queued": 3})
    bench.request()
    bench.request()
    assert bench.sent == []
    bench.request()
    assert bench.sent == [0, 0, 0]
    bench.request()
    assert len(bench.sent) == 4, "only the first time"
    drain(bench)


# ---- starvation ------------------------------------------------------------------------------------


def test_no_later_arrival_passes_what_is_overdue():
    bench = queueing(queue={"order": "spf", "max_wait_s": 1.0})
    bench.request(request_id="running")
    bench.request([1] * 3000, request_id="long")
    for number in range(30):
        bench.now += 0.1
        bench.request([1], request_id=f"short {number}")
        bench.finish(next(iter(bench.router._attempts.ledger.live.values())).sequence.request)
    # Ten services of 0.1 s, then it is overdue.
    assert served(bench).index("long") in (10, 11)
    drain(bench)


def test_without_a_bound_short_ones_pass_it_for_ever():
    bench = queueing(queue={"order": "spf", "max_wait_s": None})
    bench.request(request_id="running")
    bench.request([1] * 3000, request_id="long")
    for number in range(30):
        bench.now += 0.1
        bench.request([1], request_id=f"short {number}")
        bench.finish(next(iter(bench.router._attempts.ledger.live.values())).sequence.request)
    assert "long" not in served(bench)
    drain(bench)


def tight():
    """A rank with room for 1,000 tokens, 600 of them taken."""
    bench = queueing(slots=8, info=make_info(kv_capacity_tokens=1000), queue={"kv_limit": 1.0})
    bench.request([1] * 600, request_id="running")
    return bench


@pytest.mark.parametrize("head_pin", [None, 0])
@pytest.mark.parametrize("pin", [None, 0])
def test_what_is_behind_does_not_take_the_room_that_the_head_waits_for(head_pin, pin):
    bench = tight()
    head = bench.request([1] * 500, request_id="head", pinned_rank=head_pin)
    for number in range(3):
        bench.request([1] * 50, request_id=f"small {number}", pinned_rank=pin)
    assert served(bench) == ["running"]
    bench.finish(bench.router._attempts.ledger.of_rank(0)[0].sequence.request)
    assert served(bench)[:2] == ["running", "head"]
    assert head.last_rank == 0
    drain(bench)


def test_a_pinned_one_that_waits_for_room_does_not_unblock_those_behind_the_head():
    bench = tight()
    bench.request([1] * 500, request_id="head")
    bench.request([1] * 450, request_id="pinned", pinned_rank=0)
    bench.request([1] * 50, request_id="small")
    assert served(bench) == ["running"]
    drain(bench)
    assert served(bench) == ["running", "head", "pinned", "small"]


def test_a_head_that_waits_for_one_rank_leaves_the_others_to_those_behind():
    """Only rank 1 can ever hold the head: what is behind may use rank 0, and may not fill rank 1."""
    bench = queueing(2, slots=8, join=False, queue={"kv_limit": 1.0})
    bench.join(0, info=make_info(kv_capacity_tokens=100))
    bench.join(1, info=make_info(kv_capacity_tokens=1000))
    bench.request([1] * 600, request_id="running")
    bench.request([1] * 500, request_id="head")
    small = bench.request([1] * 50, request_id="small")
    assert (bench.sent, small.last_rank) == ([1, 0], 0)
    bench.request([1] * 80, request_id="second")
    assert bench.sent == [1, 0]
    drain(bench)


def test_a_pin_that_waits_for_room_keeps_only_its_own_rank():
    bench = queueing(2, slots=8, info=make_info(kv_capacity_tokens=1000), queue={"kv_limit": 1.0})
    bench.request([1] * 600, pinned_rank=0)
    bench.request([1] * 500, request_id="head", pinned_rank=0)
    others = [bench.request([1] * 50) for _ in range(3)]
    assert [other.last_rank for other in others] == [1, 1, 1]
    drain(bench)


# ---- tenants ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fair", "expected"), [(True, (9, 3)), (False, (12, 0))])
def test_tenants_with_a_backlog_are_served_by_weight(fair, expected):
    tenants = {"named": {"gold": {"weight": 3.0}, "flood": {"weight": 1.0}}}
    bench = queueing(queue={"fair": fair}, admission={"tenants": tenants})
    bench.request(request_id="running")
    for _ in range(40):
        # Whoever asks first with no fairness has everything first.
        bench.request(tenant="flood" if fair else "gold", request_id=f"x {bench._ids}")
    for _ in range(40):
        bench.request(tenant="gold" if fair else "flood", request_id=f"y {bench._ids}")
    first, second = ("y", "x") if fair else ("x", "y")
    while len(bench.dispatched) < 13:
        bench.finish(next(iter(bench.router._attempts.ledger.live.values())).sequence.request)
    names = [name.split()[0] for name in served(bench)[1:]]
    assert (names.count(first), names.count(second)) == expected
    drain(bench)


# ---- time that is over -------------------------------------------------------------------------------


@pytest.mark.parametrize("shut", ["slots", "blocked", "lost"])
def test_a_deadline_ends_what_is_queued_although_every_gate_is_shut(shut):
    bench = queueing(queue={"no_rank_wait_s": 60})
    running = bench.request(deadline_at=bench.now + 50)
    if shut == "blocked":
        bench.send(SendBlocked(0, 1))
    waiting = bench.request(deadline_at=bench.now + 1)
    if shut == "lost":
        bench.lose(0)
    bench.tick(0.9)
    assert not waiting.is_ended
    bench.tick(0.1)
    assert waiting.error.reason is Reason.DEADLINE_EXCEEDED
    assert len(bench.dispatched) == 1
    if shut != "lost":
        bench.finish(running)
    bench.assert_quiet()


def test_a_request_reaches_its_age_in_the_queue_too():
    bench = queueing(limits={"max_request_age_s": 2.0})
    bench.request()
    waiting = bench.request()
    bench.tick(2.0)
    assert waiting.error.reason is Reason.MAX_AGE_EXCEEDED
    bench.assert_quiet()


def test_what_is_late_when_the_gate_opens_is_not_sent():
    """The clock moved since the last tick: the next in order goes in its place."""
    bench = queueing()
    running = bench.request()
    late = bench.request(deadline_at=bench.now + 1)
    next_one = bench.request(deadline_at=bench.now + 5)
    bench.now += 1
    bench.finish(running)
    assert late.error.reason is Reason.DEADLINE_EXCEEDED
    assert next_one.last_rank == 0
    assert len(bench.dispatched) == 2
    drain(bench)


def test_a_queue_time_out_is_prompt_although_no_gate_opens():
    bench = queueing(queue={"timeout_s": 1.0})
    running = bench.request()
    waiting = bench.request(n=2)
    bench.tick(1.0)
    error = waiting.error
    assert (error.reason, error.retryable, error.facts["waited_ms"]) == (Reason.QUEUE_TIMEOUT, True, 1000.0)
    assert not running.is_ended
    assert bench.router.counters.queue_timeouts == 1, "requests, not their sequences"
    drain(bench)


@pytest.mark.parametrize(("asked_s", "ends_at"), [(0.25, 0.25), (9.0, 1.0), (None, 1.0)])
def test_a_call_may_shorten_its_time_in_the_queue_and_not_lengthen_it(asked_s, ends_at):
    bench = queueing(queue={"timeout_s": 1.0})
    bench.request()
    waiting = bench.request(queue_timeout_s=asked_s)
    bench.tick(ends_at - 0.01)
    assert not waiting.is_ended
    bench.tick(0.01)
    error = waiting.error
    assert error.reason is Reason.QUEUE_TIMEOUT
    whose = "call" if ends_at < 1 else "queue"
    assert (error.facts["timeout_of"], error.facts["timeout_s"]) == (whose, ends_at)
    named = "the call's own time-out" if ends_at < 1 else "the queue's time-out"
    assert error.message == f"no rank had room for {ends_at:.3f} s, and {named} is {ends_at:g} s; retry later"
    drain(bench)


@pytest.mark.parametrize(
    ("queue", "asked_s", "waited_s", "expected"),
    [
        ({"timeout_s": 1.0, "timeout_action": "delay"}, 3.0, 3.0, ("call", 3.0)),
        ({"timeout_s": 1.0, "timeout_action": "delay"}, 1.0, 1.0, ("call", 1.0)),
        ({"timeout_s": 1.0, "timeout_action": "delay"}, 1.5, 9.0, ("call", 1.5)),  # both between two ticks
        ({}, 0.5, 0.5, ("call", 0.5)),
        ({"timeout_s": 1.0}, 1.0, 1.0, ("call", 1.0)),
        ({"timeout_s": 1.0, "allow_timeout_override": False}, 0.5, 1.0, ("queue", 1.0)),
        ({"timeout_s": 9.0, "levels": [{"priority": 0, "timeout_s": 2.0}]}, 5.0, 2.0, ("queue", 2.0)),
    ],
)
def test_a_time_out_says_whose_it_was_and_how_long(queue, asked_s, waited_s, expected):
    bench = queueing(queue=queue)
    bench.request()
    waiting = bench.request(queue_timeout_s=asked_s)
    bench.tick(waited_s)
    facts = waiting.error.facts
    assert (facts["timeout_of"], facts["timeout_s"], facts["waited_ms"]) == (*expected, waited_s * 1e3)
    drain(bench)


def test_with_the_action_delay_it_goes_behind_all_that_are_in_time():
    bench = queueing(queue={"timeout_s": 1.0, "timeout_action": "delay", "max_wait_s": None})
    bench.request(request_id="running")
    bench.request(request_id="delayed")
    bench.tick(1.0)
    bench.request(request_id="in time")
    assert bench.router.queue_depth == 2
    drain(bench)
    assert served(bench) == ["running", "in time", "delayed"]
    assert bench.router._dispatcher.queue.timeouts_delayed == 1


def test_levels_have_time_outs_of_their_own():
    level = {"priority": 1, "timeout_s": 0.5, "timeout_action": "reject"}
    bench = queueing(queue={"timeout_s": 1.0, "timeout_action": "delay", "levels": [level]})
    bench.request()
    batch, other = bench.request(priority=1), bench.request(priority=0)
    bench.tick(0.5)
    assert batch.error.reason is Reason.QUEUE_TIMEOUT
    bench.tick(10.0)
    assert not other.is_ended
    drain(bench)


def test_a_time_out_of_one_sequence_ends_its_request_and_aborts_the_others():
    bench = queueing(queue={"timeout_s": 1.0})
    request = bench.request(n=2)
    bench.tick(1.0)
    assert request.error.reason is Reason.QUEUE_TIMEOUT
    assert [effect.wire_ids for effect in bench.aborted] == [(wire_id(request, 0),)]
    bench.send(SendUnblocked(0, 1))
    bench.assert_quiet()

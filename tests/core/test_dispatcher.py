"""The dispatcher by itself: what it counts of the queue, what it offers next, and when it wants to be asked again."""

import pytest

from gateway.core.dispatcher import Impossible, Placement
from gateway.core.errors import Reason
from tests.support.core import Bench, make_info, wire_id

WINDOW_S = 0.02


class Desk:
    """A dispatcher whose pump is off: requests are queued and nothing goes by itself."""

    def __init__(self, ranks=1, mode="queue", *, slots=8, info=None, batch=None, **settings):
        scheduling = {"mode": mode, "queue": {"max_in_flight_per_rank": slots, "order": "fcfs", "fair": False}}
        scheduling["queue"] |= settings.pop("queue", {})
        if mode == "batch":
            scheduling["batch"] = {"window_ms": WINDOW_S * 1e3} | (batch or {})
        self.bench = Bench(ranks, scheduling=scheduling, info=info, **settings)
        self.pump, self.bench.router._pump = self.bench.router._pump, None
        self.dispatcher = self.bench.router._dispatcher

    def queue(self, length=3, **more):
        return self.bench.request([1] * length, **more)

    def next(self):
        return self.dispatcher.next(self.bench.now)

    def send(self):
        """What the pump does with everything that may go now; the requests that went."""
        effects = []
        self.pump.run(self.bench.now, effects)
        self.bench.router.check()
        return effects


def requests(placement):
    assert isinstance(placement, Placement)
    return [entry.sequence.request for entry in placement.entries]


def test_the_queue_is_counted_by_tenant_and_by_predicted_time():
    desk = Desk(predictor={"prefill_ms": "total_new_tokens"})
    first, second = desk.queue(10, tenant="a"), desk.queue(20, tenant="b")
    dispatcher = desk.dispatcher
    assert (len(dispatcher), dispatcher.backlog_us) == (2, 30_000)
    assert (first.account.queued, second.account.queued) == (1, 1)
    dispatcher.forget(first.sequences[0])
    assert (len(dispatcher), dispatcher.backlog_us, first.account.queued) == (1, 20_000, 0)
    dispatcher.forget(first.sequences[0])
    assert (len(dispatcher), dispatcher.backlog_us, first.account.queued) == (1, 20_000, 0), "once"
    dispatcher.taken(second.sequences[0].entry)
    assert (len(dispatcher), dispatcher.backlog_us, second.account.queued) == (0, 0, 0)


def test_what_expires_is_out_and_counted_out():
    desk = Desk(queue={"timeout_s": 1.0})
    request = desk.queue()
    entry = request.sequences[0].entry
    assert desk.dispatcher.expired(desk.bench.now + 0.9) == []
    assert desk.dispatcher.expired(desk.bench.now + 1.0) == [entry]
    assert (len(desk.dispatcher), desk.dispatcher.backlog_us, request.account.queued) == (0, 0, 0)
    assert request.sequences[0].entry is None


def test_looking_takes_nothing():
    desk = Desk()
    request = desk.queue()
    assert requests(desk.next()) == requests(desk.next()) == [request]
    assert len(desk.dispatcher) == 1
    assert desk.bench.router.ranks.in_flight == [0]
    desk.bench.router.check()


def test_with_an_empty_queue_there_is_nothing_next():
    desk = Desk()
    assert desk.next() is None
    assert desk.dispatcher.next_due() is None


def test_a_placement_names_rank_reason_and_predicted_time():
    desk = Desk(2, predictor={"prefill_ms": "total_new_tokens"}, queue={"gate_ms": 7.0})
    desk.queue(7, pinned_rank=1)
    placement = desk.next()
    assert (placement.rank, placement.reason) == (1, "idle_rank")
    assert [decision.rank for decision in placement.decisions] == [1]
    desk.send()
    desk.queue(7, pinned_rank=1)
    assert desk.next() is None, "as much as it should have un-started"


def test_a_batch_is_offered_whole():
    desk = Desk(mode="batch", batch={"max_requests": 2})
    queued = [desk.queue() for _ in range(3)]
    placement = desk.next()
    assert requests(placement) == queued[:2]
    assert placement.reason == "batch_full"
    assert len(placement.decisions) == 2


def test_what_no_rank_can_ever_take_is_handed_back_not_dropped():
    desk = Desk(2)
    request = desk.queue(500)
    for rank in (0, 1):
        desk.bench.join(rank, info=make_info(kv_capacity_tokens=100))
    found = desk.next()
    assert isinstance(found, Impossible)
    assert (found.entry.sequence.request, found.decision.refusal) == (request, Reason.KV_TOO_SMALL)
    assert len(desk.dispatcher) == 1, "to end it is the router's"
    desk.send()
    assert request.error.reason is Reason.KV_TOO_SMALL


def test_too_many_batches_shut_a_gate_and_are_a_state_of_it():
    desk = Desk(2, mode="batch", batch={"max_in_flight_batches": 1, "release_at": "finish"})
    request = desk.queue(pinned_rank=0)
    assert list(desk.dispatcher.gate_states(desk.bench.now)) == [0, 0]
    desk.send()
    desk.queue(pinned_rank=0)
    assert list(desk.dispatcher.gate_states(desk.bench.now)) == [4, 0]
    assert desk.next() is None
    desk.bench.batch(0, [(wire_id(request), [9], "stop")])
    assert list(desk.dispatcher.gate_states(desk.bench.now)) == [0, 0]


def test_it_wants_to_be_asked_when_the_first_of_the_collecting_ranks_is_due():
    desk = Desk(2, mode="batch")
    for rank in (0, 1):
        desk.queue(pinned_rank=rank)
    desk.send()
    desk.bench.now += 0.001
    first = desk.bench.now
    desk.queue(pinned_rank=1)
    desk.bench.now += 0.001
    desk.queue(pinned_rank=0)
    assert desk.next() is None
    assert desk.dispatcher.next_due() == first + WINDOW_S
    desk.bench.now = first + WINDOW_S
    assert desk.next().rank == 1
    desk.send()
    assert desk.dispatcher.next_due() == first + 0.001 + WINDOW_S
    desk.bench.now += 0.001
    desk.send()
    assert desk.dispatcher.next_due() is None


def test_without_anything_to_collect_it_waits_for_events_only():
    desk = Desk(slots=1)
    desk.queue()
    desk.send()
    desk.queue()
    assert desk.next() is None
    assert desk.dispatcher.next_due() is None


@pytest.mark.parametrize("damage", ["backlog", "account", "entry", "flag"])
def test_the_check_sees_books_that_are_wrong(damage):
    desk = Desk()
    sequence = desk.queue().sequences[0]
    desk.dispatcher.check([sequence])
    if damage == "backlog":
        desk.dispatcher.backlog_us += 1
    elif damage == "account":
        sequence.entry.account.queued += 1
    elif damage == "entry":
        sequence.entry = None
    else:
        sequence.entry.is_queued = False
    with pytest.raises(AssertionError):
        desk.dispatcher.check([sequence])

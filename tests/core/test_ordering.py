"""Preserved order, rule by rule: whose output may leave, what is charged for it, and what each exit lets go."""

import gc
import weakref

import pytest

from gateway.config.scheduling import Preserve
from gateway.core.ordering import Ordering, worst_case_bytes
from gateway.core.request import Request
from gateway.types import TokenLogprob
from tests.support.ordering import END, World, bytes_of, make_arrived


def make_world(**settings):
    return World(Preserve(**settings))


class Sink:
    """Something that an ended request lets go of, and that can be watched."""


def left(world):
    """What left, without the domains and as counts: (request number, sequence index or END, tokens)."""
    return [(number, index, len(tokens)) for _, number, index, tokens in world.log]


def is_quiet(ordering):
    ordering.check()
    return (ordering.places, ordering.held_bytes, ordering.domains) == (0, 0, 0)


def test_the_head_streams_live_and_the_next_one_waits():
    world = make_world()
    first, second = world.accept(), world.accept()
    world.batch([(second.sequences[0], 2)])
    world.batch([(first.sequences[0], 1)])
    world.batch([(second.sequences[0], 1), (first.sequences[0], 2)])
    assert left(world) == [(0, 0, 1), (0, 0, 2)]
    world.batch([(first.sequences[0], 1)], [first])
    # The second streams live from now on, and begins with all that waited.
    assert left(world)[2:] == [(0, 0, 1), (0, END, 0), (1, 0, 3)]
    world.batch([(second.sequences[0], 1)], [second])
    assert left(world)[5:] == [(1, 0, 1), (1, END, 0)]
    assert is_quiet(world.ordering)


def test_a_successor_listed_first_in_its_batch_does_not_overtake():
    world = make_world()
    first, second = world.accept(), world.accept()
    world.batch([(second.sequences[0], 2), (first.sequences[0], 1)], [second, first])
    assert left(world) == [(0, 0, 1), (0, END, 0), (1, 0, 2), (1, END, 0)]


def test_settled_successors_leave_together_down_to_the_new_head():
    world = make_world()
    requests = [world.accept(n=2) for _ in range(4)]
    for request in requests[1:]:
        world.batch([(sequence, 1) for sequence in reversed(request.sequences)])
    world.settle(requests[2])
    world.settle(requests[1])
    assert left(world) == []
    world.settle(requests[0])
    assert left(world) == [
        (0, END, 0),
        *[(1, 1, 1), (1, 0, 1), (1, END, 0)],
        *[(2, 1, 1), (2, 0, 1), (2, END, 0)],
        *[(3, 1, 1), (3, 0, 1)],
    ]
    assert world.ordering.places == 1


def test_a_hit_waits_for_the_miss_before_it_and_a_hit_at_the_head_leaves_at_once():
    world = make_world()
    world.hit(tokens=3)
    assert left(world) == [(0, 0, 3), (0, END, 0)]
    assert is_quiet(world.ordering)
    miss = world.accept()
    world.hit(tokens=2)
    assert len(world.log) == 2
    world.settle(miss)
    assert left(world)[2:] == [(1, END, 0), (2, 0, 2), (2, END, 0)]
    assert is_quiet(world.ordering)


def test_a_final_without_tokens_and_an_error_keep_their_place():
    world = make_world()
    first, failed, last = (world.accept() for _ in range(3))
    world.settle(failed)
    world.batch([(last.sequences[0], 1)], [last])
    assert left(world) == []
    world.settle(first)
    assert left(world) == [(0, END, 0), (1, END, 0), (2, 0, 1), (2, END, 0)]


def test_domains_do_not_wait_for_each_other():
    world = make_world()
    world.accept("slow")
    other = world.accept("fast")
    world.batch([(other.sequences[0], 1)], [other])
    assert left(world) == [(1, 0, 1), (1, END, 0)]
    assert (world.ordering.places, world.ordering.domains) == (1, 1)


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_cancelled_request_drops_what_it_held_and_nobody_moves(tokens):
    world = make_world()
    head, gone = world.accept(), world.accept(max_tokens=10)
    world.batch([(gone.sequences[0], tokens)])
    assert world.ordering.held_bytes == bytes_of(10)
    world.cancel(gone)
    assert left(world) == []
    assert (world.ordering.held_bytes, world.ordering.places) == (0, 1)
    world.ordering.check()
    world.batch([(head.sequences[0], 1)], [head])
    assert left(world) == [(0, 0, 1), (0, END, 0)]
    assert is_quiet(world.ordering)


def test_a_cancelled_head_lets_its_successors_go_without_an_end_of_its_own():
    world = make_world()
    head, second, third = (world.accept() for _ in range(3))
    world.batch([(head.sequences[0], 1), (second.sequences[0], 2), (third.sequences[0], 3)], [second])
    world.cancel(head)
    assert left(world) == [(0, 0, 1), (1, 0, 2), (1, END, 0), (2, 0, 3)]
    world.ordering.check()


def test_a_settled_request_that_waits_can_still_be_cancelled():
    world = make_world()
    head, gone = world.accept(), world.accept()
    world.batch([(gone.sequences[0], 2)], [gone])
    world.cancel(gone)
    world.settle(head)
    assert left(world) == [(0, END, 0)]
    assert is_quiet(world.ordering)


def test_what_comes_after_the_end_of_a_place_changes_nothing():
    world = make_world()
    gone, done, head = (world.accept() for _ in range(3))
    world.cancel(gone)
    world.settle(done)
    late = world.accept()
    world.batch([(late.sequences[0], 3)], [late])
    before = (world.ordering.places, world.ordering.held_bytes)
    for request in (gone, done):
        assert world.ordering.settle(request.place, 10**9) == []
        assert world.ordering.cancel(request.place) == []
    assert world.ordering.settle(late.place, 0) == []
    assert (world.ordering.places, world.ordering.held_bytes) == before
    # A row in the very batch that ended it may still be dirty: it may go, unless nobody wants it.
    assert world.ordering.may_flush(done.sequences[0])
    assert not world.ordering.may_flush(gone.sequences[0])
    assert (len(gone.place.held), gone.place.is_settled, done.place.is_settled) == (0, False, True)
    world.settle(head)
    assert left(world) == [(1, END, 0), (2, END, 0), (3, 0, 3), (3, END, 0)]
    assert is_quiet(world.ordering)


def test_a_held_sequence_is_returned_once():
    world = make_world()
    head, second = world.accept(), world.accept()
    (sequence,) = second.sequences
    assert [world.ordering.may_flush(sequence) for _ in range(3)] == [False] * 3
    assert world.ordering.settle(head.place, 0) == [head, sequence]
    assert world.ordering.settle(second.place, 0) == [second]


def test_a_settled_sequence_that_asks_late_still_waits_and_precedes_its_end():
    world = make_world()
    head, second = world.accept(), world.accept()
    (sequence,) = second.sequences
    assert world.ordering.settle(second.place, 0) == []
    assert not world.ordering.may_flush(sequence)
    assert world.ordering.settle(head.place, 0) == [head, sequence, second]


def test_a_request_without_a_place_is_not_held():
    assert Ordering(Preserve()).may_flush(Request(1, make_arrived(), 0.0).sequences[0])


def test_only_who_waits_is_charged_and_pays_back_what_it_does_not_need():
    world = make_world()
    ordering = world.ordering
    head = world.accept(max_tokens=1000)
    assert (head.place.charged_bytes, ordering.held_bytes) == (0, 0)
    second, third = world.accept(max_tokens=20, n=2), world.accept(max_tokens=7)
    assert ordering.held_bytes == bytes_of(47)
    world.batch([(second.sequences[0], 3), (second.sequences[1], 2)], [second])
    assert (second.place.charged_bytes, ordering.held_bytes) == (bytes_of(5), bytes_of(12))
    world.settle(head)
    # The third is the head now: it streams live and needs no room.
    assert (third.place.charged_bytes, ordering.held_bytes) == (0, 0)
    assert ordering.places == 1


def test_a_settled_request_is_never_charged_more_than_at_its_acceptance():
    world = make_world()
    world.accept()
    second = world.accept(max_tokens=10)
    world.ordering.settle(second.place, 10**9)
    assert world.ordering.held_bytes == second.place.charged_bytes == bytes_of(10)


def test_places_are_bounded_over_all_domains():
    world = make_world(max_places=2)
    world.accept("a")
    head = world.accept("b")
    assert world.accept("c") == world.accept("a") == "places"
    assert world.ordering.places == 2
    world.settle(head)
    assert isinstance(world.accept("c"), Request)


def test_bytes_are_bounded_but_never_refuse_a_head():
    world = make_world(max_held_bytes=bytes_of(10))
    world.accept("a", max_tokens=10**6)
    assert isinstance(world.accept("a", max_tokens=10), Request)
    assert world.accept("a", max_tokens=1) == "bytes"
    assert isinstance(world.accept("b", max_tokens=10**6), Request)
    world.ordering.check()


def test_a_refusal_leaves_the_order_as_it_was():
    world = make_world(max_places=3, max_held_bytes=bytes_of(10))
    world.accept("a"), world.accept("a")
    before = (world.ordering.places, world.ordering.held_bytes, world.ordering.domains)
    assert world.accept("a", max_tokens=1) == "bytes"
    world.accept("b")
    assert world.accept("c") == "places"
    assert (world.ordering.places - 1, world.ordering.held_bytes, world.ordering.domains - 1) == before


def test_ended_requests_need_no_garbage_collector():
    world = make_world()
    head, settled, gone = (world.accept() for _ in range(3))
    world.batch([(gone.sequences[0], 1), (settled.sequences[0], 1)], [settled])
    world.cancel(gone)
    world.settle(head)
    watched = []
    for request in (head, settled, gone):
        request.sink = Sink()
        watched.append(weakref.ref(request.sink))
    gc.disable()
    try:
        for request in (head, settled, gone):
            request.unlink()
        world.accepted.clear()
        del head, settled, gone, request
        assert [alive() for alive in watched] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("n", "max_tokens", "logprobs", "expected"),
    [(1, 1, None, 4), (3, 10, None, 120), (1, 10, 0, 680), (2, 5, 3, 1160)],
)
def test_the_worst_case_is_what_full_outboxes_count(n, max_tokens, logprobs, expected):
    arrived = make_arrived(n=n, max_tokens=max_tokens, logprobs=logprobs)
    request = Request(1, arrived, 0.0)
    for sequence in request.sequences:
        row = None if logprobs is None else [TokenLogprob(-1.0, ((1, -1.0),) * logprobs)] * max_tokens
        sequence.append(range(max_tokens), row)
    assert worst_case_bytes(arrived) == expected == sum(sequence.backlog_bytes for sequence in request.sequences)


def test_check_sees_what_is_wrong():
    def fails(spoil):
        world = make_world()
        world.accept(), world.accept()
        spoil(world.ordering, world.accepted)
        with pytest.raises(AssertionError):
            world.ordering.check()

    def spoil(place, name, value):
        return lambda _, accepted: setattr(accepted[place].place, name, value)

    fails(lambda ordering, _: setattr(ordering, "places", 1))
    fails(lambda ordering, _: setattr(ordering, "held_bytes", 0))
    fails(spoil(0, "is_settled", True))
    fails(spoil(0, "is_live", False))
    fails(spoil(1, "is_live", True))
    fails(spoil(1, "request", None))
    fails(lambda _, accepted: accepted[0].place.held.setdefault(accepted[0].sequences[0]))
    fails(lambda ordering, _: ordering._domains.setdefault("", {}).clear())
    fails(lambda ordering, _: ordering._domains.setdefault("empty", {}))

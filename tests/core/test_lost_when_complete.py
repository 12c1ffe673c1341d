"""A rank is lost that had sent all tokens of a sequence, but not the row that says that it has ended."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import RankDrained
from gateway.types import Sampling
from tests.support.core import Bench, make_info, wire_id

MODES = ["direct", "queue", "batch"]


def make(mode="direct", failure=None, **more):
    return Bench(2, scheduling={"mode": mode}, failure={"reroute": True, "resume": True} | (failure or {}), **more)


def greedy(max_tokens=4, **more):
    return Sampling(max_tokens=max_tokens, temperature=0.0, **more)


def lose_after(bench, request, tokens, index=0):
    attempt = request.sequences[index].attempt
    bench.batch(attempt.rank, [(attempt.wire_id, tokens)])
    bench.lose(attempt.rank)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [greedy(), Sampling(max_tokens=4, temperature=1.0)])
def test_one_with_all_its_tokens_is_a_success(mode, sampling):
    bench = make(mode)
    request = bench.request(sampling=sampling)
    lose_after(bench, request, [11, 12, 13, 14])
    assert (request.error, request.sequences[0].finish) == (None, "length")
    assert len(bench.dispatched) == 1
    assert bench.flush() == [(request, (11, 12, 13, 14)), (request, None)]
    bench.assert_quiet()


@pytest.mark.parametrize("settings", [{"resume": False, "reroute": False}, {"max_attempts": 1}])
def test_also_where_no_other_rank_may_go_on(settings):
    bench = make(failure=settings)
    request = bench.request(sampling=greedy(), pinned_rank=0)
    lose_after(bench, request, [11, 12, 13, 14])
    assert request.error is None


def test_its_end_is_told_even_if_its_tokens_have_left():
    bench = make()
    request = bench.request(sampling=greedy())
    bench.batch(request.last_rank, [(wire_id(request), [11, 12, 13, 14])])
    bench.flush()
    bench.lose(request.last_rank)
    assert bench.flush() == [(request, ()), (request, None)], "the sequence with its finish, then the end"


@pytest.mark.parametrize("mode", MODES)
def test_one_that_fills_its_ranks_context_is_a_success(mode):
    bench = make(mode, info=make_info(max_model_len=40))
    request = bench.request([5] * 36, sampling=greedy(50))
    lose_after(bench, request, [11, 12, 13, 14])
    assert (request.error, request.sequences[0].finish) == (None, "length")
    assert len(bench.dispatched) == 1


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        (greedy(9), "stop"),
        (greedy(9, min_tokens=4), ""),
        (greedy(9, ignore_eos=True), ""),
        (greedy(9, ignore_eos=True, stop_token_ids=(2,)), "stop"),
        (greedy(9, stop_token_ids=(7,)), "stop"),
    ],
)
def test_one_whose_last_token_ends_it_is_a_success(sampling, finish):
    bench = make()
    request = bench.request(sampling=sampling)
    lose_after(bench, request, [11, 12, 2])
    assert request.sequences[0].finish == finish
    assert request.is_settled is bool(finish)
    assert request.error is None


def test_one_of_several_leaves_the_others_alone():
    bench = make()
    request = bench.request(sampling=greedy(), n=2)
    first, second = (sequence.attempt for sequence in request.sequences)
    assert first.rank != second.rank
    lose_after(bench, request, [11, 12, 13, 14])
    assert (request.sequences[0].finish, request.is_settled) == ("length", False)
    assert bench.router._admission.sequences == 1
    bench.flush()
    bench.batch(second.rank, [(second.wire_id, [9], "stop")])
    assert request.error is None
    bench.assert_quiet()


def test_a_complete_one_that_waits_for_its_turn_leaves_when_it_has_come():
    bench = make(ordering="preserve")
    head = bench.request(sampling=greedy(9), pinned_rank=0)
    request = bench.request(sampling=greedy(), pinned_rank=1)
    lose_after(bench, request, [11, 12, 13, 14])
    assert not bench.flush()
    bench.finish(head)
    assert bench.flush() == [(head, (9,)), (head, None), (request, (11, 12, 13, 14)), (request, None)]
    bench.assert_quiet()


@pytest.mark.parametrize("mode", MODES)
def test_a_drain_moves_no_complete_one(mode):
    bench = make(mode)
    request = bench.request(sampling=greedy())
    rank = request.last_rank
    bench.batch(rank, [(wire_id(request), [11, 12, 13, 14])])
    bench.send(RankDrained(rank, migrate=True))
    assert not bench.aborted
    bench.batch(rank, [(wire_id(request), [], "length")])
    assert request.error is None


def test_an_incomplete_one_is_none():
    bench = make(failure={"resume": False})
    request = bench.request(sampling=greedy())
    lose_after(bench, request, [11, 12, 13])
    assert request.error.reason is Reason.RANK_LOST

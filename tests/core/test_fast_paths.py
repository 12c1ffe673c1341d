"""Short ways through the core beside the general ones: both come to the same."""

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.limits import Limits
from gateway.config.schema import Policy as PolicySettings
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import BatchReceived, Event, RequestArrived
from gateway.core.request import Sequence
from gateway.core.validation import MAX_KNOWN_SAMPLINGS, Validator
from gateway.types import EngineBatch, Sampling, TokenLogprob
from tests.support.core import Bench, make_config, wire_id
from tests.support.policies import charge, make_policy, make_table, report

CONFIG = make_config(2)
SAMPLINGS = [
    Sampling(max_tokens=16),
    Sampling(max_tokens=4000, min_tokens=3),
    Sampling(max_tokens=16, temperature=-1.0),
    Sampling(max_tokens=0),
    Sampling(max_tokens=8, min_tokens=9),
    Sampling(max_tokens=8, stop_token_ids=(32000,)),
    Sampling(max_tokens=8, logprobs=2),
]


def validator() -> Validator:
    return Validator(CONFIG.model, Limits(max_request_id_bytes=8, max_n=4), "vllm", 2)


def verdict(rules: Validator, arrived: RequestArrived) -> object:
    try:
        rules.check(arrived)
    except GatewayError as error:
        return error.reason, error.message
    return None


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"request_id": "12345678"},
        {"request_id": "123456789"},
        {"request_id": "äöüßä"},
        *({"prompt_token_ids": ids} for ids in ([], [1] * 96, [1] * 97, [1] * 4095, [1] * 4096, [1, 32000], [-1])),
        *({"n": n} for n in (0, 4, 5)),
        {"model": "m"},
        {"model": "other"},
        *({"pinned_rank": rank} for rank in (0, 2, -1)),
        *({"priority": priority} for priority in (-(2**31), 2**31)),
    ],
)
def test_parameters_that_are_known_excuse_nothing_else(sampling, other):
    values = {"client_key": "c", "request_id": "a", "prompt_token_ids": [1], "sampling": sampling}
    warm, fresh = validator(), validator()
    verdict(warm, RequestArrived(**values))
    arrived = RequestArrived(**values | other)
    assert verdict(warm, arrived) == verdict(fresh, arrived)


def test_only_parameters_that_passed_are_known_and_no_more_than_so_many():
    rules = validator()
    for number in range(2 * MAX_KNOWN_SAMPLINGS):
        arrived = RequestArrived(
            client_key="c", request_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=1 + number)
        )
        assert verdict(rules, arrived) is None
        assert rules._valid[id(arrived.sampling)] is arrived.sampling
        assert len(rules._valid) <= MAX_KNOWN_SAMPLINGS
        bad = RequestArrived(
            client_key="c", request_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=1, top_p=0.0)
        )
        assert verdict(rules, bad) is not None
        assert rules._valid.get(id(bad.sampling)) is not bad.sampling


def test_every_event_has_its_handler():
    assert set(get_args(Event)) == set(Bench(1).router._handlers)


@settings(deadline=None)
@given(
    queued=st.lists(st.sampled_from([0, 0, 5, 7]), min_size=1, max_size=6),
    seed=st.integers(0, 9),
    tie_break=st.sampled_from(["random", "first", "rotate"]),
    objective=st.sampled_from(["min", "max"]),
)
def test_a_pick_of_all_is_the_best_of_all(queued, seed, tie_break, objective):
    table = make_table(len(queued))
    table.queued_tokens[:] = queued
    wanted = PolicySettings(cost="queued_tokens", tie_break=tie_break, objective=objective)
    request = (1.0, 10, 0, 10, 5, 0, 0.0)
    short, long = (make_policy(table, wanted, seed=seed)._picker for _ in range(2))
    assert short.pick(request, None) == long.best(queued[:], None)


def test_columns_that_only_some_batches_have_are_read_for_their_own_rows():
    bench = Bench(1, "tokenspeed")
    first, second = (bench.request(sampling=Sampling(max_tokens=8, logprobs=0)) for _ in range(2))
    ids = [wire_id(request) for request in (first, second)]

    def send(**columns):
        rows = {"ids": ids, "token_ids": [[7], [8]], "finish": ["", ""]}
        bench.send(BatchReceived(0, 1, EngineBatch(**rows | columns)))

    send(completion_tokens=[1, 1], cached_tokens=[2, None], logprobs=[None, [TokenLogprob(-1.0)]])
    assert [request.sequences[0].cached_tokens for request in (first, second)] == [2, 0]
    assert [request.sequences[0].take()[1] for request in (first, second)] == [None, [TokenLogprob(-1.0)]]
    send()
    assert [request.sequences[0].take() for request in (first, second)] == [([7], None), ([8], None)]
    send(completion_tokens=[3, 9])
    assert first.error is None
    assert second.error.reason is Reason.DATA_LOSS


def test_a_long_backlog_is_packed_and_keeps_its_order():
    bench = Bench(1)
    request = bench.request(max_tokens=1000)
    for number in range(300):
        bench.batch(0, [(wire_id(request), [number])])
    sequence = request.sequences[0]
    assert len(sequence.pending) < 128
    assert list(sequence.take()[0]) == list(range(300))
    assert sequence.completion_tokens == 300


def test_a_batch_that_ends_nothing_leaves_no_result_behind():
    bench = Bench(1)
    request = bench.request(max_tokens=4)
    bench.batch(0, [(wire_id(request), [1])])
    assert bench.router._intake._result is None
    bench.batch(0, [(wire_id(request), [1], "stop")])
    assert bench.router._intake._result is None
    assert [type(item) for item in bench.router.take_dirty()] == [Sequence, type(request)]


@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_without_a_queue_nothing_is_due(mode):
    batch = {"max_requests": 8, "window_ms": 5.0}
    bench = Bench(1, scheduling={"mode": mode, "batch": batch if mode == "batch" else {}})
    rng = random.Random(1)
    first = bench.request()
    second = bench.request([rng.randrange(100)])
    if mode == "batch":
        assert bench.router.next_due() is not None
    bench.cancel(second, Reason.CANCELLED)
    assert bench.router.next_due() is None
    bench.finish(first)
    bench.flush()
    bench.assert_quiet()


@settings(deadline=None)
@given(
    queued=st.lists(st.sampled_from([0, 5, 7]), min_size=1, max_size=6),
    over=st.lists(st.integers(0, 5), max_size=4),
    then=st.lists(st.integers(0, 5), max_size=4),
    cost=st.sampled_from(["queued_tokens", "queued_tokens / 3", "1 / queued_tokens"]),
    tie_break=st.sampled_from(["random", "first", "rotate"]),
)
def test_ranks_that_fail_again_are_left_out_as_at_first(queued, over, then, cost, tie_break):
    table = make_table(len(queued))
    table.queued_tokens[:] = queued
    for rank in range(table.size):
        charge(table, rank, 0)
    wanted = PolicySettings(cost=cost, tie_break=tie_break)
    seasoned = make_policy(table, wanted, seed=3)
    for failing in (over, over, over, then, then, over):
        for rank in range(table.size):
            report(table, rank, kv=0.99 if rank in failing else 0.1)
        fresh = make_policy(table, wanted, seed=3)
        fresh._state.cursor = seasoned._state.cursor
        fresh._state.rng = seasoned._state.rng = lambda: 0.7
        mine, other = (policy.decide(1.0, 10, 5) for policy in (seasoned, fresh))
        assert (mine.rank, mine.ties, mine.codes, mine.eligible) == (
            other.rank,
            other.ties,
            other.codes,
            other.eligible,
        )
        assert (mine.relaxed, mine.refusal, mine.costs) == (other.relaxed, other.refusal, other.costs)


def test_what_was_relaxed_once_is_not_remembered_as_eligible():
    table = make_table(2)
    table.is_blocked[1] = True
    table.refresh(1)
    policy = make_policy(table, PolicySettings(preset="lmetric"))
    charge(table, 0)
    for usage, relaxed in ((0.99, ("kv_usage",)), (0.1, ()), (0.99, ("kv_usage",))):
        report(table, 0, kv=usage)
        assert policy.decide(1.0, 10, 5).relaxed == relaxed

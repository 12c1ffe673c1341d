"""Ranks that die, stall, talk nonsense or register oddly: only their own requests may notice."""

import asyncio

import grpc
import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.faults import Faults
from engine_stub.rank import RankPhase
from gateway.core.errors import Reason
from gateway.core.ranks import RankState
from tests.support.by_hand import held
from tests.support.calls import Generation, generate, make_prompt, make_request, many_stream
from tests.support.stack import expected, running_gateway, stub_config, until

TICKING = {"time_scale": 1.0, "step_time": StepTime(fixed_ms=1.0)}
"""Ranks that take a millisecond a token, so that there is a middle for faults to come in."""


def start(client, rank, count, max_tokens=60, **options):
    """Generate calls that are pinned to a rank."""
    return [
        Generation(client, make_request(make_prompt(4, number), max_tokens, data_parallel_rank=rank), **options)
        for number in range(count)
    ]


async def all_complete(generations):
    for generation in generations:
        (await generation.done()).assert_complete(generation.request)


async def all_lost(generations):
    """Every one ended UNAVAILABLE with an exact prefix. Returns how many tokens they got."""
    outcomes = [await generation.done() for generation in generations]
    for generation, outcome in zip(generations, outcomes, strict=True):
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.RANK_LOST)
        assert outcome.facts["retryable"] == "true"
        assert outcome.retry_after_s > 0
        outcome.assert_prefix(generation.request)
    return sum(len(outcome.text) for outcome in outcomes)


async def test_a_killed_rank_fails_its_own_requests_and_rejoins_as_a_new_incarnation(protocol):
    async with running_gateway(protocol, ranks=4, stub=stub_config(**TICKING)) as stack:
        client = stack.client()
        hit = start(client, 1, 6, max_tokens=5_000)
        fine = [generation for rank in (0, 2, 3) for generation in start(client, rank, 6)]
        await asyncio.gather(*(generation.first_token() for generation in hit))
        await stack.ranks[1].kill()
        assert await all_lost(hit) > 0
        await all_complete(fine)
        assert stack.table.state[1] is RankState.LOST

        # Nothing goes there while it is away.
        others = [Generation(client, make_request(make_prompt(4, number), 5)) for number in range(12)]
        await all_complete(others)
        assert {generation.outcome.finish.rank for generation in others} == {0, 2, 3}
        pinned = await generate(client, make_request(data_parallel_rank=1))
        assert (pinned.code, pinned.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            Reason.PINNED_RANK_UNAVAILABLE,
        )

        await stack.ranks[1].restart()
        await stack.all_ready()
        assert (stack.table.incarnation[1], stack.ranks[1].incarnation) == (2, 2)
        assert not (await stack.list_ranks())[1].HasField("kv_usage"), "a new incarnation has reported nothing"
        await all_complete(start(client, 1, 3))


@pytest.mark.parametrize("with_sentinel", [True, False], ids=["announced", "silently"])
async def test_what_a_dying_rank_has_sent_is_delivered_before_its_requests_fail(protocol, with_sentinel):
    async with running_gateway(protocol, stub=stub_config(**TICKING)) as stack:
        client = stack.client()
        hit, fine = start(client, 0, 8, max_tokens=1_000), start(client, 1, 8)
        await asyncio.gather(*(generation.first_token() for generation in hit))
        stack.ranks[0].set_faults(die_at_token=200, die_with_sentinel=with_sentinel)
        delivered = await all_lost(hit)
        await all_complete(fine)
        assert stack.ranks[0].phase is RankPhase.DEAD
        assert delivered == stack.ranks[0].records.tokens >= 200


@pytest.mark.parametrize("with_sentinel", [True, False], ids=["announced", "silently"])
async def test_a_backlog_of_batches_of_a_dead_rank_is_read_to_its_end(protocol, with_sentinel):
    """More of them than are read at one go: the loss is seen before the last one."""
    async with running_gateway(protocol, auto_step=False) as stack:
        generation, wire_id = await held(stack, 0, max_tokens=1_000)
        for token in expected(generation.request.prompt_token_ids, 300):
            stack.ranks[0].send_rows([(wire_id, [token], "")])
        stack.ranks[0]._serving._die(with_sentinel=with_sentinel)
        assert await all_lost([generation]) == 300


async def test_a_lost_rank_fails_all_sequences_of_its_requests_and_they_are_aborted_elsewhere(protocol):
    async with running_gateway(protocol, stub=stub_config(**TICKING)) as stack:
        generation = Generation(stack.client(), make_request(max_tokens=5_000, sampling={"n": 2}))
        await until(lambda: len(generation.outcome.tokens) == 2, "both sequences to start")
        await stack.ranks[0].kill()
        outcome = await generation.done()
        assert outcome.reason == Reason.RANK_LOST
        outcome.assert_prefix(generation.request)
        await stack.ranks[1].wait_until(lambda: stack.ranks[1].received_aborts)


async def test_a_rank_that_stalls_holds_up_nobody_else(protocol):
    async with running_gateway(protocol, stub=stub_config(**TICKING)) as stack:
        client = stack.client()
        stack.ranks[0].set_faults(stall=True)
        stuck = start(client, 0, 4, timeout=0.3)
        await all_complete(start(client, 1, 16))
        for generation in stuck:
            outcome = await generation.done()
            assert (outcome.code, outcome.messages) == (grpc.StatusCode.DEADLINE_EXCEEDED, 0)
        # Its aborts wait behind their requests.
        stack.ranks[0].set_faults(stall=False)
        await stack.ranks[0].wait_until(lambda: len(stack.ranks[0].received_aborts) == 4)
        await all_complete(start(client, 0, 2))


async def test_the_gateways_own_deadline_ends_a_request_and_aborts_it_at_the_rank(protocol):
    stub = stub_config(**TICKING, faults=Faults(silent=True))
    async with running_gateway(protocol, stub=stub, limits={"default_deadline_s": 0.1}) as stack:
        outcome = await generate(stack.client(), make_request())
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED)
        await until(lambda: sum(rank.records.aborts for rank in stack.ranks) == 1, "the abort")
        async with many_stream(stack.client()) as many:
            outcome = await many.start(make_request())
            assert outcome.reason == Reason.DEADLINE_EXCEEDED


async def test_the_default_deadline_of_a_request_begins_with_the_request_and_not_with_its_stream():
    limits = {"default_deadline_s": 0.5}
    async with running_gateway("vllm", limits=limits) as stack, many_stream(stack.client()) as many:
        request = make_request()
        (await many.start(request)).assert_complete(request)
        opened = stack.gateway.driver.clock()
        await until(lambda: stack.gateway.driver.clock() > opened + 0.6, "the default deadline to pass")
        request = make_request()
        (await many.start(request)).assert_complete(request)


async def test_a_deadline_in_mid_stream_delivers_what_came_before_it(protocol):
    async with running_gateway(protocol, stub=stub_config(**TICKING)) as stack:
        client = stack.client()
        late, fine = start(client, 0, 4, max_tokens=10_000, timeout=1.0), start(client, 0, 4)
        await all_complete(fine)
        for generation in late:
            outcome = await generation.done()
            assert outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED
            outcome.assert_prefix(generation.request)
            assert outcome.messages > 0
        await stack.ranks[0].wait_until(lambda: len(stack.ranks[0].received_aborts) == 4)


@pytest.mark.parametrize("kind", ["noise", "foreign_tag", "empty"])
async def test_noise_between_batches_costs_nothing(protocol, kind):
    faults = {0: Faults(garbage_every=3, garbage_kind=kind)}
    async with running_gateway(protocol, stub=stub_config(rank_faults=faults)) as stack:
        client = stack.client()
        await all_complete([*start(client, 0, 6), *start(client, 1, 6)])
        assert sum(stack.gateway.link.counters.noise.values()) > 0


@pytest.mark.parametrize("kind", ["truncate", "ragged"])
async def test_a_spoilt_batch_fails_what_it_hit_and_the_rank_serves_on(protocol, kind):
    async with running_gateway(protocol, stub=stub_config(**TICKING)) as stack:
        client = stack.client()
        # Many, so that half of a batch is less than all of its rows.
        hit, fine = start(client, 0, 24, max_tokens=1_000), start(client, 1, 6)
        await asyncio.gather(*(generation.first_token() for generation in hit))
        stack.ranks[0].set_faults(garbage_every=50, garbage_kind=kind)
        await all_complete(fine)
        outcomes = [await generation.done() for generation in hit]
        for generation, outcome in zip(hit, outcomes, strict=True):
            if outcome.status is None:
                outcome.assert_complete(generation.request)
            else:
                assert (outcome.code, outcome.reason) == (grpc.StatusCode.DATA_LOSS, Reason.DATA_LOSS)
                outcome.assert_prefix(generation.request)
        assert any(outcome.status is not None for outcome in outcomes)
        stack.ranks[0].set_faults(garbage_every=None)
        await all_complete(start(client, 0, 4))
        assert stack.table.incarnation == [1, 1]


async def test_a_replaced_batch_is_missed_by_the_counts_of_the_next_one():
    """TokenSpeed only: vLLM's rows carry no counts."""
    async with running_gateway("tokenspeed", stub=stub_config(**TICKING)) as stack:
        client = stack.client()
        hit = start(client, 0, 8, max_tokens=200)
        await asyncio.gather(*(generation.first_token() for generation in hit))
        stack.ranks[0].set_faults(garbage_every=20, garbage_kind="replace")
        for generation in hit:
            outcome = await generation.done()
            assert (outcome.code, outcome.reason) == (grpc.StatusCode.DATA_LOSS, Reason.DATA_LOSS)
            outcome.assert_prefix(generation.request)
        assert stack.router.counters.lost_tokens >= 8


async def test_a_claimed_engine_index_is_counted_and_never_believed(protocol):
    faults = {0: Faults(engine_index=1), 1: Faults(engine_index=77)}
    async with running_gateway(protocol, stub=stub_config(rank_faults=faults)) as stack:
        client = stack.client()
        await all_complete([*start(client, 0, 6), *start(client, 1, 6)])
        assert stack.router.counters.misattributed_rows == 0
        assert stack.gateway.link.counters.index_mismatch == sum(stack.router.counters.batches)
        assert stack.router.counters.tokens == [rank.records.tokens for rank in stack.ranks]


@pytest.mark.parametrize(
    "faults",
    [
        Faults(duplicate_hello=True),
        Faults(ready_first=True),
        Faults(swap_ready=True),
        Faults(slow_handshake_s=0.05, duplicate_hello=True, swap_ready=True, ready_first=True),
    ],
    ids=["duplicate-hello", "ready-first", "other-order", "all-and-slow"],
)
async def test_odd_handshakes_join_and_disturb_nobody(protocol, faults):
    stub = stub_config(**TICKING, rank_faults={1: faults})
    async with running_gateway(protocol, stub=stub, wait_ready=False, group={"min_ready": 1}) as stack:
        await until(lambda: 0 in stack.ready_ranks(), "rank 0")
        client = stack.client()
        before = start(client, 0, 4)
        await stack.all_ready()
        await all_complete([*before, *start(client, 1, 4)])
        assert stack.table.incarnation == [1, 1]


async def test_a_rank_that_comes_late_joins_live(protocol):
    stub = stub_config(**TICKING, rank_faults={1: Faults(slow_handshake_s=3600.0)})
    async with running_gateway(protocol, stub=stub, wait_ready=False, group={"min_ready": 1}) as stack:
        await until(lambda: stack.gateway.is_ready, "readiness")
        client = stack.client()
        refused = await generate(client, make_request(data_parallel_rank=1))
        assert refused.code is grpc.StatusCode.FAILED_PRECONDITION
        early = [Generation(client, make_request(make_prompt(4, number), 9)) for number in range(6)]
        await all_complete(early)
        assert {generation.outcome.finish.rank for generation in early} == {0}
        await stack.ranks[1].restart()
        await stack.all_ready()
        await all_complete(start(client, 1, 2))


async def test_without_a_rank_a_request_is_refused_and_told_to_retry(protocol):
    async with running_gateway(protocol, ranks=1, stub=stub_config(**TICKING)) as stack:
        await stack.ranks[0].kill()
        await until(lambda: not stack.ready_ranks(), "the loss")
        outcome = await generate(stack.client(), make_request())
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NO_ELIGIBLE_RANK)
        assert outcome.retry_after_s


async def test_a_drain_refuses_the_new_and_lets_the_live_end(protocol):
    async with running_gateway(protocol, stub=stub_config(**TICKING)) as stack:
        client = stack.client()
        live = [*start(client, 0, 3, max_tokens=200), *start(client, 1, 3, max_tokens=200)]
        await asyncio.gather(*(generation.first_token() for generation in live))
        drain = asyncio.create_task(stack.gateway.drain(asyncio.Event()))
        await until(lambda: stack.router.is_draining, "the drain to begin")
        refused = await generate(client, make_request())
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.DRAINING)
        await all_complete(live)
        await drain


async def test_a_drain_that_runs_out_of_time_aborts_the_rest_with_a_reason(protocol):
    async with running_gateway(protocol, stub=stub_config(**TICKING), drain={"grace_s": 0.05}) as stack:
        live = start(stack.client(), 0, 3, max_tokens=10_000)
        await asyncio.gather(*(generation.first_token() for generation in live))
        await stack.gateway.drain(asyncio.Event())
        for generation in live:
            outcome = await generation.done()
            assert outcome.reason == Reason.DRAINING
            outcome.assert_prefix(generation.request)
        await stack.ranks[0].wait_until(lambda: len(stack.ranks[0].received_aborts) == 3)

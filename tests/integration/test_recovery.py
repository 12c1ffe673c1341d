"""A rank goes away with requests on it: re-routed, resumed, or ended with an exact prefix; and ranks that are drained."""

import asyncio

import grpc
import pytest

from gateway.core.errors import Reason
from gateway.v1 import admin_pb2, gateway_pb2
from tests.support.calls import Generation, generate, make_prompt, make_request
from tests.support.stack import running_gateway, until

GREEDY = {"temperature": 0.0}
MODES = [{}, {"scheduling": {"mode": "queue"}}, {"scheduling": {"mode": "batch"}}]
NAMES = ["direct", "queue", "batch"]


async def step(stack, *numbers):
    for number in numbers:
        await stack.ranks[number].step()
    await asyncio.sleep(0)


async def step_until(stack, condition, *numbers):
    for _ in range(20_000):
        if condition():
            return
        await step(stack, *numbers)
    raise AssertionError("not within 20,000 steps")


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
async def test_greedy_streams_of_a_killed_rank_end_as_if_nothing_had_happened(protocol, mode):
    async with running_gateway(protocol, ranks=3, auto_step=False, **mode) as stack:
        client = stack.client()
        requests = [make_request(make_prompt(6, n), 500, sampling=GREEDY | {"min_tokens": 20}) for n in range(9)]
        running = [Generation(client, request) for request in requests]
        await step_until(stack, lambda: all(len(each.outcome.tokens.get(0, ())) >= 5 for each in running), 0, 1, 2)

        on_rank = len(stack.ranks[1].live_ids)
        assert on_rank
        await stack.ranks[1].kill()
        await until(lambda: len(stack.ready_ranks()) == 2)
        await step_until(stack, lambda: all(each.task.done() for each in running), 0, 2)
        attempts = []
        for request, each in zip(requests, running, strict=True):
            outcome = await each.done()
            outcome.assert_complete(request)
            attempts.append(outcome.finish.attempts)
        assert sorted(attempts) == [1] * (9 - on_rank) + [2] * on_rank
        assert stack.router.counters.resumes == on_rank


async def test_requests_without_a_token_go_to_another_rank_whatever_they_sample(protocol):
    async with running_gateway(protocol, ranks=2, auto_step=False) as stack:
        client = stack.client()
        requests = [make_request(make_prompt(6, n), 5, sampling={"seed": n}) for n in range(6)]
        running = [Generation(client, request) for request in requests]
        await until(lambda: sum(len(rank.live_ids) for rank in stack.ranks) == 6)
        moved = len(stack.ranks[0].live_ids)
        await stack.ranks[0].kill()
        await until(lambda: stack.ready_ranks() == [1])
        await step_until(stack, lambda: all(each.task.done() for each in running), 1)
        for request, each in zip(requests, running, strict=True):
            (await each.done()).assert_complete(request)
        assert (stack.router.counters.reroutes, stack.router.counters.resumes) == (moved, 0)


@pytest.mark.parametrize(
    ("sampling", "fields", "failure"),
    [
        ({"seed": 3}, {}, {}),
        (GREEDY | {"frequency_penalty": 0.5}, {}, {}),
        (GREEDY, {"allow_resume": False}, {}),
        (GREEDY, {}, {"resume": False}),
        (GREEDY, {}, {"max_attempts": 1}),
        (GREEDY, {"data_parallel_rank": 0}, {}),
    ],
)
async def test_what_cannot_be_resumed_ends_with_its_exact_prefix(protocol, sampling, fields, failure):
    async with running_gateway(protocol, ranks=2, auto_step=False, failure=failure) as stack:
        request = make_request(make_prompt(6), 2000, sampling=sampling, **fields)
        running = Generation(stack.client(), request)
        await step_until(stack, lambda: len(running.outcome.tokens.get(0, ())) >= 5, 0, 1)
        number = 0 if stack.ranks[0].live_ids else 1
        await stack.ranks[number].kill()
        outcome = await running.done()
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.RANK_LOST)
        assert int(outcome.facts["delivered_tokens"]) == len(outcome.text) >= 5
        assert len(outcome.text) == len(running.outcome.text)


async def test_a_request_gives_up_after_max_attempts(protocol):
    async with running_gateway(protocol, ranks=3, auto_step=False, failure={"max_attempts": 2}) as stack:
        running = Generation(stack.client(), make_request(make_prompt(6), 2000, sampling=GREEDY))
        live = stack.router._attempts.ledger.live
        for number in (1, 2):
            await until(lambda number=number: [each.number for each in live.values()] == [number])
            (attempt,) = live.values()
            await step_until(stack, lambda attempt=attempt: attempt.tokens_out >= 2, attempt.rank)
            await stack.ranks[attempt.rank].kill()
            await until(lambda attempt=attempt: attempt.rank not in stack.ready_ranks())
        outcome = await running.done()
        assert outcome.reason is Reason.RANK_LOST
        assert outcome.facts["attempts"] == "2"


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
async def test_a_drained_rank_ends_what_it_has_and_gets_nothing_new(protocol, mode):
    async with running_gateway(protocol, ranks=2, auto_step=False, **mode) as stack:
        client, admin = stack.client(), stack.admin()
        running = Generation(client, make_request(make_prompt(6), 10, data_parallel_rank=0))
        await until(lambda: stack.ranks[0].live_ids)
        rank = (await admin.DrainRank(admin_pb2.DrainRankRequest(rank=0))).rank
        assert (rank.state, rank.in_flight) == (gateway_pb2.RANK_STATE_DRAINING, 1)
        others = [Generation(client, make_request(make_prompt(6, n), 2)) for n in range(4)]
        await step_until(stack, lambda: all(each.task.done() for each in (running, *others)), 0, 1)
        (await running.done()).assert_complete(running.request)
        assert {(await each.done()).finish.rank for each in others} == {1}
        refused = await generate(client, make_request(make_prompt(6), 2, data_parallel_rank=0))
        assert refused.reason is Reason.PINNED_RANK_UNAVAILABLE
        rank = (await admin.UndrainRank(admin_pb2.UndrainRankRequest(rank=0))).rank
        assert rank.state == gateway_pb2.RANK_STATE_READY
        again = Generation(client, make_request(make_prompt(6), 2, data_parallel_rank=0))
        await step_until(stack, again.task.done, 0)
        (await again.done()).assert_complete(again.request)


async def test_migrating_moves_what_can_go_on_elsewhere(protocol):
    async with running_gateway(protocol, ranks=2, auto_step=False) as stack:
        client, admin = stack.client(), stack.admin()
        greedy = Generation(client, make_request(make_prompt(6), 2000, sampling=GREEDY))
        await step_until(stack, lambda: greedy.outcome.tokens.get(0), 0, 1)
        number = 0 if stack.ranks[0].live_ids else 1
        pinned = Generation(client, make_request(make_prompt(7), 20, data_parallel_rank=number))
        await until(lambda: len(stack.ranks[number].live_ids) == 2)
        await admin.DrainRank(admin_pb2.DrainRankRequest(rank=number, migrate=True))
        await step_until(stack, lambda: len(stack.ranks[number].live_ids) == 1, 0, 1)
        await step_until(stack, lambda: greedy.task.done() and pinned.task.done(), 0, 1)
        outcome = await greedy.done()
        outcome.assert_complete(greedy.request)
        assert (outcome.finish.rank, outcome.finish.attempts) == (1 - number, 2)
        (await pinned.done()).assert_complete(pinned.request)


async def test_draining_names_a_rank_that_exists(protocol):
    async with running_gateway(protocol, ranks=2) as stack:
        for request in (admin_pb2.DrainRankRequest(), admin_pb2.DrainRankRequest(rank=2)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stack.admin().DrainRank(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_coupled_group_is_lost_as_one(protocol):
    async with running_gateway(protocol, ranks=3, auto_step=False, group={"coupled": True}) as stack:
        running = [Generation(stack.client(), make_request(make_prompt(6, n), 5)) for n in range(3)]
        await until(lambda: all(rank.live_ids for rank in stack.ranks))
        await stack.ranks[1].kill()
        outcomes = [await each.done() for each in running]
        assert {outcome.reason for outcome in outcomes} == {Reason.RANK_LOST}
        assert stack.ready_ranks() == []
        # The others were asked whether they live, and come back when they answer.
        await step_until(stack, lambda: not any(rank.live_ids for rank in stack.ranks), 0, 2)
        await until(lambda: stack.ready_ranks() == [0, 2], "the others")

"""Ranks that say nothing, take nothing or fail again and again, over real sockets: found, left alone, and back."""

import asyncio

import grpc
import pytest

from engine_stub.backend.synthetic import StepTime
from gateway.core.errors import Reason
from gateway.core.ranks import RankState
from gateway.v1 import gateway_pb2
from tests.support.by_hand import held
from tests.support.calls import Generation, generate, make_prompt, make_request
from tests.support.stack import running_gateway, stub_config, until

TICKING = {"time_scale": 1.0, "step_time": StepTime(fixed_ms=1.0)}
GREEDY = {"temperature": 0.0}
SILENCE = {"after_s": 0.8, "quiet_s": 0.2}
MODES = [{}, {"scheduling": {"mode": "queue"}}, {"scheduling": {"mode": "batch"}}]
NAMES = ["direct", "queue", "batch"]


def on_rank(stack, rank):
    return stack.table.in_flight[rank]


async def started(stack, count, max_tokens, sampling=GREEDY, **fields):
    """Requests that all have their first tokens."""
    client = stack.client()
    requests = [make_request(make_prompt(6, n), max_tokens, sampling=sampling, **fields) for n in range(count)]
    generations = [Generation(client, request) for request in requests]
    await asyncio.gather(*(generation.first_token() for generation in generations))
    return generations


async def complete(generations):
    """Every one got every token once. Returns how many attempts each took."""
    for generation in generations:
        (await generation.done()).assert_complete(generation.request)
    return [generation.outcome.finish.attempts for generation in generations]


async def until_state(stack, rank, state):
    await until(lambda: stack.table.state[rank] is state, f"rank {rank} to be {state}")


def states_of(stack, rank):
    return [entry["new"] for entry in stack.logged("rank_state") if entry["rank"] == rank]


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
async def test_a_frozen_rank_is_lost_and_comes_back_on_its_sockets_without_a_token_lost_or_doubled(protocol, mode):
    stub = stub_config(**TICKING)
    async with running_gateway(protocol, ranks=3, stub=stub, failure={"silence": SILENCE}, **mode) as stack:
        moving = await started(stack, 9, 3000)
        moved = on_rank(stack, 0)
        assert moved
        stack.ranks[0].set_faults(stall=True)
        await until_state(stack, 0, RankState.SUSPECT)
        assert (await stack.list_ranks())[0].state == gateway_pb2.RANK_STATE_SUSPECT
        await until_state(stack, 0, RankState.LOST)
        assert sorted(await complete(moving)) == [1] * (9 - moved) + [2] * moved
        assert stack.table.state[1:] == [RankState.READY] * 2

        stack.ranks[0].set_faults(stall=False)
        await stack.all_ready()
        assert (stack.table.incarnation, stack.ranks[0].incarnation) == ([2, 1, 1], 1)
        assert states_of(stack, 0) == ["READY", "SUSPECT", "LOST", "JOINING", "READY"]
        assert stack.router.counters.silence_losses == [1, 0, 0]
        again = [
            Generation(stack.client(), make_request(make_prompt(4, n), 20, data_parallel_rank=0)) for n in range(3)
        ]
        assert await complete(again) == [1, 1, 1]


async def test_what_is_still_said_of_the_old_incarnation_goes_to_nobody(protocol):
    """The rank does not act on aborts at first: it goes on with what was given up."""
    stub = stub_config(**TICKING)
    async with running_gateway(protocol, stub=stub, failure={"silence": SILENCE}) as stack:
        moving = await started(stack, 6, 2500)
        moved = on_rank(stack, 0)
        stack.ranks[0].set_faults(stall=True)
        await until_state(stack, 0, RankState.LOST)
        stack.ranks[0].set_faults(stall=False, ignore_aborts=moved)
        await until_state(stack, 0, RankState.JOINING)
        assert max(await complete(moving)) == 2
        await stack.all_ready()
        counters = stack.router.counters
        assert counters.late_rows > 100
        assert counters.reaborts >= moved
        assert counters.duplicated_tokens == counters.lost_tokens == counters.misattributed_rows == 0


async def test_a_suspect_that_goes_on_has_lost_nothing(protocol):
    stub = stub_config(**TICKING)
    async with running_gateway(protocol, stub=stub, failure={"silence": {"after_s": 30.0}}) as stack:
        going = await started(stack, 6, 300)
        stack.router._health._silence._after_s = 0.4  # suspected soon, lost late
        stack.ranks[0].set_faults(stall=True)
        await until_state(stack, 0, RankState.SUSPECT)
        stack.router._health._silence._after_s = 30.0
        others = [Generation(stack.client(), make_request(make_prompt(4, n), 10)) for n in range(6)]
        await complete(others)
        assert {generation.outcome.finish.rank for generation in others} == {1}
        stack.ranks[0].set_faults(stall=False)
        assert await complete(going) == [1] * 6
        assert stack.table.incarnation == [1, 1]


async def test_what_can_not_move_ends_with_an_exact_prefix(protocol):
    stub = stub_config(**TICKING)
    async with running_gateway(protocol, stub=stub, failure={"silence": SILENCE}) as stack:
        hit = await started(stack, 3, 5000, sampling={}, data_parallel_rank=0)
        stack.ranks[0].set_faults(stall=True)
        for generation in hit:
            outcome = await generation.done()
            assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.RANK_LOST)
            outcome.assert_prefix(generation.request)
        stack.ranks[0].set_faults(stall=False)
        await stack.all_ready()


async def test_a_rank_that_answers_nothing_is_lost_until_it_answers(protocol):
    stub = stub_config(**TICKING)
    async with running_gateway(protocol, stub=stub, failure={"silence": SILENCE}) as stack:
        client = stack.client()
        stack.ranks[0].set_faults(silent=True)
        requests = [make_request(make_prompt(6, n), 20) for n in range(6)]
        assert max(await complete([Generation(client, request) for request in requests])) == 2
        await until(lambda: stack.router.counters.probes[0] >= 1, "the question whether it lives")
        assert "LOST" in states_of(stack, 0)
        stack.ranks[0].set_faults(silent=False)
        stack.router._health._probes._due_at[0] = 0.0  # its next one is seconds away
        await stack.all_ready()
        assert stack.router.counters.silence_losses[0] >= 1
        assert await complete([Generation(client, make_request(make_prompt(4), 9, data_parallel_rank=0))]) == [1]


async def test_an_idle_rank_that_was_given_up_answers_when_it_is_asked(protocol):
    """It has read requests and their aborts in one go, so it has nothing to say by itself."""
    stub = stub_config(**TICKING)
    async with running_gateway(protocol, stub=stub, failure={"silence": SILENCE}) as stack:
        stack.ranks[0].set_faults(stall=True)
        (generation,) = [Generation(stack.client(), make_request(make_prompt(4), 9, data_parallel_rank=0))]
        assert (await generation.done()).reason is Reason.RANK_LOST
        stack.ranks[0].set_faults(stall=False)
        await stack.all_ready()
        assert stack.router.counters.probes == [1, 0]


async def test_a_long_prefill_is_no_silence(protocol):
    stub = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=1.0, per_prefill_token_us=200.0))
    failure = {"silence": {"after_s": 0.8, "prefill_tokens_per_s": 4000}}
    async with running_gateway(protocol, stub=stub, failure=failure) as stack:
        request = make_request(make_prompt(8000), 5, data_parallel_rank=0)
        assert await complete([Generation(stack.client(), request)]) == [1]
        assert stack.router.counters.suspects == [0, 0]


async def test_a_rank_that_refuses_sends_costs_no_request_its_attempts(protocol):
    failure = {"max_attempts": 1}
    async with running_gateway(protocol, stub=stub_config(**TICKING), failure=failure) as stack:
        stack.gateway.link._ranks[0]._channel._identity = b"\x99\x99"  # as libzmq answers for a peer that is gone
        client = stack.client()
        requests = [make_request(make_prompt(6, n), 20) for n in range(30)]
        await complete([Generation(client, request) for request in requests])
        assert stack.router.counters.reroutes > 0

        async def goes_on():
            while stack.table.state[0] is RankState.READY:
                request = make_request(make_prompt(6), 3)
                (await generate(client, request)).assert_complete(request)

        await asyncio.wait_for(goes_on(), 10.0)
        assert stack.table.state[0] is RankState.LOST


async def test_a_rank_that_fails_again_and_again_is_ejected_for_a_while():
    failure = {"eject": {"after_failures": 3, "base_s": 0.3, "max_s": 0.3}}
    async with running_gateway("vllm", auto_step=False, failure=failure) as stack:
        kept, kept_id = await held(stack, 0)
        for _ in range(3):
            generation, wire_id = await held(stack, 0)
            stack.ranks[0].send_rows([(wire_id, [], "error")])
            assert (await generation.done()).reason is Reason.ENGINE_ERROR
            stack.ranks[0].engine.scheduler.abort(wire_id)
        assert stack.table.state[0] is RankState.EJECTED
        ranks = await stack.list_ranks()
        assert ranks[0].state == gateway_pb2.RANK_STATE_EJECTED
        assert ranks[0].in_flight == 1, "it ends what it has"
        other, _ = await held(stack, None)
        assert on_rank(stack, 1) == 1
        await stack.all_ready()
        (line,) = [entry for entry in stack.logged("rank_state") if entry["new"] == "EJECTED"]
        assert (line["log_level"], line["rank"]) == ("warning", 0)
        assert line["cause"] == "for 0.3 s: 3 failures in a row, the last: engine error"
        kept.call.cancel()
        other.call.cancel()
        assert kept_id


async def test_requests_that_the_engine_refuses_eject_nobody(protocol):
    failure = {"eject": {"after_failures": 2}}
    async with running_gateway(protocol, auto_step=False, failure=failure) as stack:
        for _ in range(8):
            generation, wire_id = await held(stack, 0)
            stack.ranks[0].send_rows([(wire_id, [], "abort")])
            assert (await generation.done()).reason is Reason.ENGINE_REJECTED
            stack.ranks[0].engine.scheduler.abort(wire_id)
        assert stack.table.failures == [0, 0]
        assert stack.ready_ranks() == [0, 1]

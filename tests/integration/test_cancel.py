"""Requests that their clients give up, at any moment and in any way: nothing may stay charged or live.

What every test here is about is checked when its block ends: charges, live sets, log lines and tasks.
"""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.faults import Faults
from gateway.v1 import gateway_pb2
from tests.support.by_hand import held, report
from tests.support.calls import Generation, Many, engine_request, make_prompt, make_request, many_stream
from tests.support.doomed_client import CALLS, MANY
from tests.support.engine_edge import PROTOS
from tests.support.stack import expected, running_gateway, stub_config, until

pytestmark = pytest.mark.usefixtures("transport")

REPOSITORY = Path(__file__).parents[2]
CANCELS = 1000
AT_ONCE = 50
"""Requests that run side by side."""

TICKING = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=1.0))
"""Ranks that take a millisecond a token, so that there is a middle to cancel in."""


async def turns(count):
    """Let the loop turn: each count is another await point of the server that the cancel may hit."""
    for _ in range(count):
        await asyncio.sleep(0)


async def give_up(client, generation, source, number):
    """End one call in one of the ways that a client has."""
    way = number % 10
    if way == 0:
        generation.call.cancel()
    elif way < 5:
        await turns(number // 10 % 40)
        generation.call.cancel()
    elif way == 5:
        await generation.first_token()
        await turns(source.randrange(20))
        generation.call.cancel()
    elif way == 6:
        await asyncio.sleep(source.uniform(0, 0.03))
        generation.call.cancel()
    elif way == 7:
        await generation.first_token()
        await turns(source.randrange(40))
        await client.Abort(gateway_pb2.AbortRequest(request_id=generation.request.request_id))
    # 8: a deadline that expires somewhere, 9: nothing.


@pytest.mark.parametrize("seed", [1])
async def test_a_thousand_random_cancels_leave_nothing(protocol, seed):
    source = random.Random(seed)
    async with running_gateway(protocol, ranks=4, stub=TICKING) as stack:
        clients = [stack.client() for _ in range(4)]
        ended: dict[str, int] = {}

        async def one(number):
            may_end_well = number % 10 in (6, 8, 9)
            request = make_request(
                make_prompt(1 + number % 50, number),
                source.randrange(5, 40) if may_end_well else 10_000,
                request_id=f"c-{number}",
                sampling={"n": 3} if number % 7 == 0 else {},
            )
            client = clients[number % 4]
            timeout = source.uniform(0.001, 0.04) if number % 10 == 8 else None
            generation = Generation(client, request, timeout=timeout)
            await give_up(client, generation, source, number)
            outcome = await generation.done()
            ended[outcome.code.name] = ended.get(outcome.code.name, 0) + 1
            if outcome.status is None:
                outcome.assert_complete(request)
            else:
                assert outcome.code.name in ("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED")
                for tokens in outcome.tokens.values():
                    assert tokens == expected(request.prompt_token_ids, len(tokens))

        for first in range(0, CANCELS, AT_ONCE):
            await asyncio.gather(*(one(number) for number in range(first, first + AT_ONCE)))
        assert sum(ended.values()) == CANCELS
        assert min(ended.values()) > 10, ended
        assert len(ended) == 4, ended


class EndedCall:
    """The context of a call that its transport has ended without having said so yet."""

    def __init__(self, remaining_s=None):
        self._remaining_s = remaining_s

    def invocation_metadata(self):
        return ()

    def time_remaining(self):
        return self._remaining_s

    async def send_initial_metadata(self, _):
        return

    def accepted(self, stream=None):
        return

    async def write(self, _):
        raise grpc.aio.InternalError

    async def abort(self, *_):
        raise grpc.aio.InternalError


@pytest.mark.parametrize("remaining_s", [None, 0.0], ids=["while-writing", "while-refusing"])
async def test_a_call_that_has_ended_on_its_way_is_no_defect_of_the_gateway(protocol, remaining_s):
    """Seen with deadlines of some milliseconds: the handler's next word fails before it is cancelled."""
    async with running_gateway(protocol, ranks=1, stub=TICKING) as stack:
        methods = {method.name: method for method in stack.gateway.servers._gateway.service.methods}
        request = make_request(max_tokens=5_000).SerializeToString()
        with pytest.raises(asyncio.CancelledError):
            await methods["Generate"].call(request, EndedCall(remaining_s))
        assert not stack.logged("rpc_failed")


async def test_random_aborts_on_a_shared_stream_leave_nothing(protocol):
    source = random.Random(2)
    async with running_gateway(protocol, ranks=4, stub=TICKING) as stack, many_stream(stack.client()) as many:

        async def one(number):
            request = make_request(make_prompt(3, number), source.randrange(1, 80), sampling={"n": 1 + number % 3})
            future = many.start(request)
            await turns(source.randrange(60))
            if number % 4:
                many.abort(request.request_id)
            outcome = await future
            if outcome.status is None:
                outcome.assert_complete(request)
            else:
                assert outcome.reason == "ABORTED"
                for tokens in outcome.tokens.values():
                    assert tokens == expected(request.prompt_token_ids, len(tokens))
            return outcome.code.name

        names = []
        for first in range(0, 400, AT_ONCE):
            names += await asyncio.gather(*(one(number) for number in range(first, first + AT_ONCE)))
        assert set(names) == {"OK", "ABORTED"}


@pytest.mark.parametrize("stage", ["at-once", "submitting", "submitted", "streaming"])
async def test_a_cancelled_stream_ends_all_its_requests(protocol, stage):
    async with running_gateway(protocol, ranks=2, stub=TICKING) as stack:
        many = Many(stack.client())
        requests = [make_request(make_prompt(3, number), 10_000, sampling={"n": 2}) for number in range(40)]
        for request in requests:
            many.start(request)
        if stage == "submitting":
            await until(lambda: stack.router.live_count, "the first request")
        elif stage == "submitted":
            await until(lambda: stack.router.live_count == 40, "all requests")
        elif stage == "streaming":
            for request in requests:
                await many.outcome(request.request_id).progress.wait()
        many.call.cancel()
        await asyncio.gather(many.task, return_exceptions=True)


async def test_a_client_that_is_killed_in_mid_stream_leaves_nothing(protocol):
    async with running_gateway(protocol, ranks=4, stub=TICKING) as stack:
        command = [sys.executable, "-m", "tests.support.doomed_client", stack.gateway.servers.grpc_address]
        client = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY, stdout=subprocess.PIPE)
        try:
            assert await client.stdout.readline() == b"streaming\n"
            assert stack.router.live_count == CALLS + MANY
        finally:
            client.kill()
            await client.wait()
        await until(lambda: not stack.router.live_count, "the client's requests to end")
        assert {entry["outcome"] for entry in stack.logged("request_ended")} == {"CANCELLED"}
        await until(lambda: sum(rank.records.aborts for rank in stack.ranks) == CALLS + MANY, "the aborts")


async def test_cancelling_a_request_of_n_sequences_reaches_every_rank(protocol):
    async with running_gateway(protocol, ranks=4, stub=TICKING) as stack:
        generation = Generation(stack.client(), make_request(max_tokens=5_000, sampling={"n": 4}))
        await generation.first_token()
        generation.call.cancel()
        for rank in stack.ranks:
            await rank.wait_until(lambda rank=rank: len(rank.received_aborts) == 1 and not rank.live_ids)


async def test_a_standard_client_that_leaves_reaches_the_rank(protocol):
    async with running_gateway(protocol, ranks=2, stub=TICKING) as stack:
        call = stack.engine_client().Generate(engine_request(protocol, max_tokens=5_000))
        await call.read()
        call.cancel()
        await until(lambda: sum(rank.records.aborts for rank in stack.ranks) == 1, "the abort")


async def test_an_abort_by_id_ends_the_stream_on_both_sides(protocol):
    pb = PROTOS[protocol]
    async with running_gateway(protocol, ranks=2, auto_step=False) as stack:
        generation, wire_id = await held(stack, 0)
        generation.call.cancel()
        request = make_request(max_tokens=9, request_id="mine", data_parallel_rank=1)
        named = Generation(stack.client(), request)
        await stack.ranks[1].wait_until(lambda: stack.ranks[1].live_ids)
        await stack.client().Abort(gateway_pb2.AbortRequest(request_id="unknown"))
        await stack.client().Abort(gateway_pb2.AbortRequest(request_id="mine"))
        outcome = await named.done()
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.ABORTED, "ABORTED")
        abort = {"request_ids": ["nobody"]} if protocol == "vllm" else {"request_id": "nobody", "reason": "test"}
        await stack.engine_client().Abort(pb.AbortRequest(**abort))
        await stack.ranks[0].wait_until(lambda: wire_id in stack.ranks[0].received_aborts)


async def test_a_rank_that_ignores_an_abort_is_told_again(protocol):
    stub = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=1.0), faults=Faults(ignore_aborts=1))
    async with running_gateway(protocol, ranks=1, stub=stub, load={"abort_settle_s": 0.05}) as stack:
        generation = Generation(stack.client(), make_request(max_tokens=10_000))
        await generation.first_token()
        generation.call.cancel()
        (rank,) = stack.ranks
        await rank.wait_until(lambda: len(rank.received_aborts) == 2)
        assert len(set(rank.received_aborts)) == 1
        assert stack.router.counters.late_rows > 0
        assert stack.router.counters.reaborts == 1


async def test_a_cancel_between_the_last_token_and_its_finish_is_no_second_end(protocol):
    async with running_gateway(protocol, ranks=1, auto_step=False) as stack:
        generation, wire_id = await held(stack, 0)
        await report(stack, 0, [(wire_id, expected([1, 2, 3], 1), "stop")], None)
        generation.call.cancel()
        await generation.done()
        assert [entry["outcome"] for entry in stack.logged("request_ended")] == ["ok"]
        assert not stack.ranks[0].received_aborts

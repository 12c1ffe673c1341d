"""`ordering: preserve` over real sockets: answers leave in the order in which their requests arrived.

The order is read off one GenerateMany stream, message by message: it is what the gateway sent, not when it came.
"""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import msgspec
import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.group import StubGroup
from gateway.core.errors import Reason
from gateway.v1 import gateway_pb2
from tests.support.calls import Many, make_prompt, make_request
from tests.support.stack import expected, gateway_config, observed, running, running_gateway, stub_config, until

ORDERED = {"ordering": "preserve", "limits": {"default_deadline_s": 20.0}}


class Recorded(Many):
    """A GenerateMany stream that writes down the ids in the order in which their output and their ends came."""

    def __init__(self, stub, **options):
        super().__init__(stub, **options)
        self.outputs = []
        self.ends = []

    async def _read(self):
        while (response := await self.call.read()) is not grpc.aio.EOF:
            for output in response.outputs:
                if not self.outputs or self.outputs[-1] != output.request_id:
                    self.outputs.append(output.request_id)
                outcome, _, n = self._waiting[output.request_id]
                outcome.add(output)
                if len(outcome.finishes) == n:
                    self.ends.append(output.request_id)
                    self._settle(output.request_id)
            for error in response.errors:
                self.ends.append(error.request_id)
                self._waiting[error.request_id][0].status = error.status
                self._settle(error.request_id)


def numbered(count, *, max_tokens=3, **fields):
    """Requests r00, r01, ... with prompts of their own."""
    return [make_request(make_prompt(8, n), max_tokens, request_id=f"r{n:02}", **fields) for n in range(count)]


async def run_all(many, requests):
    return await asyncio.wait_for(asyncio.gather(*(many.start(request) for request in requests)), 20)


class _Both:
    """Two groups' ranks, for the postcondition."""

    def __init__(self, *groups):
        self.ranks = [rank for group in groups for rank in group.ranks]


@asynccontextmanager
async def two_speeds(protocol, fast_ms, slow_ms, **config):
    """One fast and one slow rank, in groups of their own."""
    values = gateway_config(protocol, 1, **config)
    first = values.groups[0]
    groups = tuple(
        type(first)(name=name, protocol=protocol, handshake="tcp://127.0.0.1:0", ranks=1) for name in ("fast", "slow")
    )
    async with AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(running(msgspec.structs.replace(values, groups=groups)))
        parts = []
        for address, fixed_ms in zip(stack.gateway.link.handshake_addresses, (fast_ms, slow_ms), strict=True):
            only = StepTime(
                fixed_ms=fixed_ms,
                per_prefill_token_us=0.0,
                per_decode_row_us=0.0,
                per_context_token_ns=0.0,
                per_prefill_context_ns=0.0,
            )
            stub = stub_config(step_time=only, time_scale=1.0)
            group = StubGroup(protocol, address, ranks=1, config=stub)
            parts.append(await cleanup.enter_async_context(group))
            await group.ready()
        await stack.all_ready()
        async with observed(stack, _Both(*parts)):
            yield stack


BATCHES_OF_4 = {
    "scheduling": {
        "mode": "batch",
        "queue": {"order": "fcfs", "hold_until_queued": 12},
        "batch": {"max_requests": 4, "max_in_flight_batches": 1, "release_at": "finish"},
    }
}


@pytest.mark.parametrize("ordering", ["preserve", "none"])
async def test_batches_of_four_on_a_fast_and_a_slow_rank(protocol, ordering):
    """The trace: 100 ms and 400 ms a batch, 12 requests. Two fast batches end while the slow one runs."""
    config = ORDERED | BATCHES_OF_4 | {"ordering": ordering}
    async with two_speeds(protocol, 100, 400, **config) as stack:
        many = Recorded(stack.client())
        requests = numbered(12, max_tokens=1)
        outcomes = await run_all(many, requests)
        await many.end()
        for request, outcome in zip(requests, outcomes, strict=True):
            outcome.assert_complete(request)
        assert stack.router.counters.batch_sizes == {4: 3}
        slow = [number for number, outcome in enumerate(outcomes) if outcome.finish.rank == 1]
        assert slow in ([0, 1, 2, 3], [4, 5, 6, 7]), "the third batch went to the rank that was free first"
        arrived = [request.request_id for request in requests]
        is_in_order = many.outputs == arrived and many.ends == arrived
        assert is_in_order == (ordering == "preserve"), many.ends


async def test_streams_never_interleave_and_the_next_one_starts_when_its_turn_comes(protocol):
    async with running_gateway(protocol, ranks=3, **ORDERED) as stack:
        many = Recorded(stack.client())
        requests = [make_request(make_prompt(8, n), 60 if n % 3 == 0 else 2, request_id=f"r{n:02}") for n in range(30)]
        outcomes = await run_all(many, requests)
        await many.end()
        for request, outcome in zip(requests, outcomes, strict=True):
            outcome.assert_complete(request)
        assert many.outputs == many.ends == [request.request_id for request in requests]


async def test_a_hit_waits_behind_a_queued_miss_and_leaves_nothing_behind_at_the_head(protocol):
    queue = {"scheduling": {"mode": "queue", "queue": {"order": "fcfs", "max_in_flight_per_rank": 1}}}
    async with running_gateway(
        protocol, ranks=1, auto_step=False, response_cache={"max_bytes": 1_000_000}, **ORDERED, **queue
    ) as stack:
        greedy = {"sampling": {"temperature": 0.0}}
        rank = stack.ranks[0]

        async def step_until(condition):
            while not condition():
                await rank.step()
                await asyncio.sleep(0)

        many = Recorded(stack.client())
        stored = make_request(make_prompt(8, 0), 3, request_id="stored", **greedy)
        first = many.start(stored)
        await step_until(first.done)
        head_hit = make_request(make_prompt(8, 0), 3, request_id="head-hit", **greedy)
        outcome = await asyncio.wait_for(many.start(head_hit), 10)
        assert outcome.text == expected(stored.prompt_token_ids, 3)
        assert stack.router.ordering.places == 0
        running_now = many.start(make_request(make_prompt(8, 1), 3, request_id="running"))
        queued = many.start(make_request(make_prompt(8, 2), 3, request_id="queued"))
        hit = many.start(make_request(make_prompt(8, 0), 3, request_id="hit", **greedy))
        await until(lambda: stack.router.ordering.places == 3)
        assert stack.router.response_cache.hits == 2, "its answer is known"
        assert not hit.done(), "but it is not its turn"
        await step_until(lambda: running_now.done() and queued.done() and hit.done())
        await many.end()
        assert many.ends == ["stored", "head-hit", "running", "queued", "hit"]


async def test_whatever_ends_the_head_the_others_go_on_in_order(protocol):
    """Aborted, past its deadline, its rank killed: in place as an error, or out of the way at once."""
    async with running_gateway(protocol, ranks=2, auto_step=False, **ORDERED) as stack:
        many = Recorded(stack.client())
        requests = [
            make_request(make_prompt(8, n), 2, request_id=f"r{n:02}", data_parallel_rank=n % 2) for n in range(6)
        ]
        futures = [many.start(request) for request in requests]
        await until(lambda: stack.router.live_count == 6)
        many.abort("r00")
        await asyncio.wait_for(futures[0], 10)
        assert futures[0].result().reason is Reason.ABORTED
        while stack.ranks[0].live_ids:
            await stack.ranks[0].step()
            await asyncio.sleep(0)
        assert not any(future.done() for future in futures[1:]), "r02 and r04 are complete and wait for r01"
        await stack.ranks[1].kill()
        outcomes = await asyncio.wait_for(asyncio.gather(*futures[1:]), 10)
        await many.end()
        assert many.ends == ["r00", "r01", "r02", "r03", "r04", "r05"]
        assert [outcome.reason for outcome in outcomes] == [
            Reason.RANK_LOST,
            None,
            Reason.RANK_LOST,
            None,
            Reason.RANK_LOST,
        ]
        for number in (2, 4):
            outcomes[number - 1].assert_complete(requests[number])


async def test_without_ordering_no_place_ever_exists(protocol):
    async with running_gateway(protocol, ranks=2) as stack:
        many = Recorded(stack.client())
        await run_all(many, numbered(50))
        await many.end()
        assert stack.router.ordering is None


async def test_a_full_order_refuses_before_anything_is_reserved(protocol):
    async with running_gateway(protocol, ranks=1, auto_step=False, preserve={"max_places": 2}, **ORDERED) as stack:
        many = Recorded(stack.client())
        futures = [many.start(request) for request in numbered(3)]
        refused = await asyncio.wait_for(futures[2], 10)
        assert refused.reason is Reason.ORDER_FULL
        assert refused.retry_after_s is not None
        assert refused.facts["bound"] == "places"
        assert stack.router.in_flight == 2
        while stack.ranks[0].live_ids or not futures[1].done():
            await stack.ranks[0].step()
            await asyncio.sleep(0)
        await many.end()
        assert isinstance(futures[0].result().finish, gateway_pb2.Finish)

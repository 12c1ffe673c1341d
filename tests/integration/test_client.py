"""The asyncio client against a whole gateway."""

import asyncio

import grpc
import pytest

from gateway.client import Client, GenerationError
from tests.support.calls import make_prompt, make_request
from tests.support.grpc_edge import until
from tests.support.stack import expected, running_gateway


async def test_many_requests_share_one_stream_and_each_gets_its_own_tokens(protocol):
    async with running_gateway(protocol, ranks=4) as stack, Client(stack.gateway.servers.grpc_address) as client:

        async def run(number):
            prompt = make_prompt(3 + number, number)
            generation = await client.start(prompt, max_tokens=1 + number % 30)
            assert await generation.tokens() == expected(prompt, 1 + number % 30)

        await asyncio.gather(*(run(number) for number in range(150)))


async def test_several_sequences_end_with_the_last_one(protocol):
    async with running_gateway(protocol) as stack, Client(stack.gateway.servers.grpc_address) as client:
        generation = await client.start([1, 2, 3], max_tokens=5, n=3, seed=7)
        outputs = [output async for output in generation]
        tokens = {index: [t for o in outputs if o.index == index for t in o.token_ids] for index in range(3)}
        assert tokens == {index: expected([1, 2, 3], 5, 7 + index) for index in range(3)}
        assert sum(output.HasField("finish") for output in outputs) == 3


async def test_a_refusal_is_typed_and_ends_that_request_only(protocol):
    async with running_gateway(protocol) as stack, Client(stack.gateway.servers.grpc_address) as client:
        refused = await client.start([1], temperature=-1.0)
        good = await client.start([1, 2], max_tokens=4)
        with pytest.raises(GenerationError) as caught:
            await refused.tokens()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert caught.value.metadata["field"]
        assert caught.value.retry_after_s is None
        assert await good.tokens() == expected([1, 2], 4)


async def test_a_whole_request_may_be_sent_again_while_it_is_live(protocol):
    async with running_gateway(protocol) as stack, Client(stack.gateway.servers.grpc_address) as client:
        request = make_request([1, 2], 4)
        request.ClearField("request_id")
        generations = [await client.start(request=request) for _ in range(3)]
        for generation in generations:
            assert await generation.tokens() == expected([1, 2], 4)


async def test_a_start_that_waits_for_room_is_told_of_the_close(protocol):
    async with running_gateway(protocol, auto_step=False) as stack:
        client = Client(stack.gateway.servers.grpc_address, max_live=1)
        first = await client.start([1], max_tokens=4)
        waiting = [asyncio.create_task(client.start([2], max_tokens=4)) for _ in range(3)]
        await asyncio.sleep(0)
        await client.close()
        for task in waiting:
            with pytest.raises(GenerationError, match="closed"):
                await task
        with pytest.raises(GenerationError, match="closed"):
            await client.start([3])
        with pytest.raises(GenerationError):
            await first.tokens()


async def test_a_refusal_for_now_says_when_to_come_back(protocol):
    async with (
        running_gateway(protocol, auto_step=False, admission={"max_in_flight": 1}) as stack,
        Client(stack.gateway.servers.grpc_address) as client,
    ):
        first = await client.start([1], max_tokens=4)
        refused = await client.start([2], max_tokens=4)
        with pytest.raises(GenerationError) as caught:
            await refused.tokens()
        assert (caught.value.reason, caught.value.retry_after_s > 0) == ("GATEWAY_FULL", True)
        first.abort()
        with pytest.raises(GenerationError, match="ABORTED"):
            await first.tokens()


async def test_leaving_a_generation_aborts_it_at_the_gateway(protocol):
    async with running_gateway(protocol) as stack, Client(stack.gateway.servers.grpc_address) as client:
        async with await client.start([5], max_tokens=2000) as generation:
            await anext(generation)
        await until(lambda: stack.gateway.router.live_count == 0)
        assert await (await client.start([6], max_tokens=3)).tokens() == expected([6], 3)


async def test_a_cancelled_start_does_not_end_the_others(protocol):
    async with running_gateway(protocol) as stack, Client(stack.gateway.servers.grpc_address, max_live=1) as client:
        first = await client.start([1, 2], max_tokens=200)
        waiting = asyncio.create_task(client.start([3], max_tokens=2))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await first.tokens() == expected([1, 2], 200)
        assert await (await client.start([4], max_tokens=2)).tokens() == expected([4], 2)


async def test_at_most_max_live_requests_are_live(protocol):
    async with running_gateway(protocol) as stack, Client(stack.gateway.servers.grpc_address, max_live=3) as client:
        most = 0

        async def run(number):
            nonlocal most
            async for _ in await client.start([number], max_tokens=20):
                most = max(most, stack.gateway.router.live_count)

        await asyncio.gather(*(run(number) for number in range(40)))
        assert 0 < most <= 3


async def test_what_nobody_reads_holds_the_connection_back_and_is_not_lost(protocol):
    async with (
        running_gateway(protocol) as stack,
        Client(stack.gateway.servers.grpc_address, max_buffered_tokens=50) as client,
    ):
        unread = await client.start([1], max_tokens=400)
        await until(lambda: client._stream._buffered_tokens > 50)
        held = client._stream._buffered_tokens
        other = asyncio.create_task((await client.start([2], max_tokens=4)).tokens())
        await asyncio.sleep(0.05)
        assert client._stream._buffered_tokens == held
        assert not other.done()
        assert await unread.tokens() == expected([1], 400)
        assert await other == expected([2], 4)


async def test_early_exits_leave_nothing_that_holds_the_connection_back(protocol):
    async with (
        running_gateway(protocol) as stack,
        Client(stack.gateway.servers.grpc_address, max_buffered_tokens=50) as client,
    ):
        for number in range(10):
            async with await client.start([number], max_tokens=400) as generation:
                await anext(generation)
        await until(lambda: not client._stream._live)
        assert client._stream._buffered_tokens == 0
        assert await (await client.start([2], max_tokens=80)).tokens() == expected([2], 80)


async def test_what_was_let_go_of_unread_does_not_hold_the_connection_back(protocol):
    async with (
        running_gateway(protocol) as stack,
        Client(stack.gateway.servers.grpc_address, max_buffered_tokens=50) as client,
    ):
        await client.start([1], max_tokens=400)
        async for _ in await client.start([1], max_tokens=400):
            break
        assert await (await client.start([2], max_tokens=80)).tokens() == expected([2], 80)
        await until(lambda: not client._stream._live)
        assert client._stream._buffered_tokens == 0


async def test_an_id_that_is_live_is_refused_here(protocol):
    async with running_gateway(protocol) as stack, Client(stack.gateway.servers.grpc_address, max_live=2) as client:
        first = await client.start(request=make_request([1], 100, request_id="a"))
        with pytest.raises(ValueError, match="'a' is live"):
            await client.start(request=make_request([1], 2, request_id="a"))
        assert await first.tokens() == expected([1], 100)
        assert await (await client.start(request=make_request([1], 2, request_id="a"))).tokens() == expected([1], 2)


async def test_a_lost_connection_ends_its_requests_and_the_next_one_connects_again(protocol):
    async with running_gateway(protocol) as stack, Client(stack.gateway.servers.grpc_address) as client:
        generation = await client.start([1], max_tokens=2000)
        await anext(generation)
        client._stream._call.cancel()
        with pytest.raises(GenerationError):
            await generation.tokens()
        assert await (await client.start([2], max_tokens=3)).tokens() == expected([2], 3)


async def test_a_connection_that_is_lost_while_it_is_held_back_is_noticed(protocol):
    async with (
        running_gateway(protocol) as stack,
        Client(stack.gateway.servers.grpc_address, max_buffered_tokens=50) as client,
    ):
        unread = await client.start([1], max_tokens=2000)
        await until(lambda: not client._stream._has_room.is_set())
        lost = client._stream
        lost._call.cancel()
        await until(lambda: lost.is_over)
        assert await (await client.start([2], max_tokens=3)).tokens() == expected([2], 3)
        with pytest.raises(GenerationError):
            await unread.tokens()


async def test_closing_ends_what_is_live(protocol):
    async with running_gateway(protocol) as stack:
        async with Client(stack.gateway.servers.grpc_address) as client:
            generation = await client.start([1], max_tokens=2000)
            await anext(generation)
        with pytest.raises(GenerationError):
            await generation.tokens()
        await until(lambda: stack.gateway.router.live_count == 0)

"""`listen.stream_interval_tokens`: fewer messages with the same tokens, over each way in and both transports."""

import grpc
import pytest

from gateway.v1 import gateway_pb2
from tests.support.calls import engine_request, make_prompt, make_request
from tests.support.stack import expected, running_gateway

pytestmark = pytest.mark.usefixtures("transport")

TOKENS = 41
LISTEN = {"stream_interval_tokens": 8, "max_flush_delay_ms": 60_000}


async def of_generate(stack, protocol, prompt):
    return [list(message.token_ids) async for message in stack.client().Generate(make_request(prompt, TOKENS))]


async def of_generate_many(stack, protocol, prompt):
    async def instructions():
        yield gateway_pb2.GenerateManyRequest(start=make_request(prompt, TOKENS, request_id="m"))

    messages = [message async for message in stack.client().GenerateMany(instructions())]
    return [list(output.token_ids) for message in messages for output in message.outputs]


async def of_the_standard_service(stack, protocol, prompt):
    request = engine_request(protocol, prompt, TOKENS)
    messages = [message async for message in stack.engine_client().Generate(request)]
    assert list(messages[-1].complete.output_ids) == expected(prompt, TOKENS)
    return [list(message.chunk.token_ids) for message in messages[:-1]]


@pytest.mark.parametrize("ask", [of_generate, of_generate_many, of_the_standard_service])
async def test_tokens_between_the_first_and_the_last_ones_leave_together(protocol, ask):
    prompt = make_prompt(5, 1)
    async with running_gateway(protocol, ranks=1, listen=LISTEN) as stack:
        messages = await ask(stack, protocol, prompt)
    assert [token for message in messages for token in message] == expected(prompt, TOKENS)
    assert all(len(message) >= LISTEN["stream_interval_tokens"] for message in messages[1:-1]), messages


async def test_a_delay_lets_tokens_go_that_are_too_few(protocol):
    listen = {"stream_interval_tokens": 1000, "max_flush_delay_ms": 5}
    async with running_gateway(protocol, ranks=1, listen=listen, auto_step=False) as stack:
        call = stack.client().Generate(make_request(make_prompt(5, 1), 4))
        await stack.ranks[0].wait_until(lambda: stack.ranks[0].live_ids)
        messages = []
        for _ in range(4):
            await stack.ranks[0].step()
            messages.append(await call.read())
        assert [len(message.token_ids) for message in messages] == [1, 1, 1, 1]
        assert await call.read() is grpc.aio.EOF

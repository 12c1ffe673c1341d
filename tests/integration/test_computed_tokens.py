"""Ranks that compute every token: what a client gets must not depend on who served it, or beside whom."""

import asyncio

import pytest

from tests.support.calls import generate, make_prompt, make_request
from tests.support.stack import running_gateway

CLIENTS = 8


@pytest.mark.parametrize("protocol", ["tokenspeed", "vllm"])
async def test_eight_concurrent_clients_get_the_same_tokens_whichever_rank_serves_them(protocol):
    prompts = [make_prompt(length, length) for length in (5, 11, 17)]
    async with running_gateway(protocol, ranks=4, backend="numpy") as stack:
        stub = stack.client()

        async def client(number):
            """Each in another order, so that the batches differ."""
            answers = {}
            for step in range(len(prompts)):
                which = (number + step) % len(prompts)
                outcome = await generate(stub, make_request(prompts[which], 12))
                answers[which] = (outcome.text, outcome.finishes[0].rank)
            return answers

        answers = await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    for which in range(len(prompts)):
        texts = {tuple(answer[which][0]) for answer in answers}
        assert len(texts) == 1
        assert len(next(iter(texts))) == 12
    assert {rank for answer in answers for _, rank in answer.values()} == {0, 1, 2, 3}

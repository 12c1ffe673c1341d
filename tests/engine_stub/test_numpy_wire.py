"""Ranks that run the exact model, over both wires."""

import pytest

from engine_stub.group import StubGroup
from engine_stub.model import jobs
from engine_stub.scheduler import SchedulerConfig
from tests.support.model_runs import NEW_TOKENS
from tests.support.models import config, exact_model, prompt
from tests.support.raw_gateway import RawGateway
from tests.support.stub_engine import finishes_of, tokens_of

SETTINGS = config(SchedulerConfig(kv_tokens=256, block_size=4, max_active=3, prefill_chunk_size=7))


@pytest.mark.parametrize("protocol", ["tokenspeed", "vllm"])
async def test_every_rank_serves_the_same_tokens(protocol):
    """Eight prompts at once on each of two ranks, in opposite orders, and what each yields alone."""
    texts = {str(number): prompt(number, 3 + 5 * number) for number in range(8)}
    async with (
        RawGateway(protocol) as gateway,
        StubGroup(protocol, gateway.address, ranks=2, config=SETTINGS, backend="numpy") as group,
    ):
        await group.ready()
        await gateway.registered(2)
        for index, ids in enumerate((list(texts), list(texts)[::-1])):
            for request_id in ids:
                await gateway.add(index, f"{index}-{request_id}", texts[request_id], NEW_TOKENS)
        alone = {key: jobs.run(exact_model(), [jobs.Job(text, NEW_TOKENS)], 4, 7)[0] for key, text in texts.items()}
        for index in range(2):
            batches = await gateway.collect(index, *(f"{index}-{request_id}" for request_id in texts))
            assert {key: tokens_of(batches, f"{index}-{key}") for key in texts} == alone


@pytest.mark.parametrize("protocol", ["tokenspeed", "vllm"])
async def test_sampled_texts_depend_on_their_seed_alone(protocol):
    async with (
        RawGateway(protocol) as gateway,
        StubGroup(protocol, gateway.address, ranks=2, config=SETTINGS, backend="numpy") as group,
    ):
        await group.ready()
        await gateway.registered(2)
        await gateway.add(1, "neighbour", prompt(5, 9), NEW_TOKENS)
        asked = {(0, "a"): 1, (1, "a"): 1, (0, "b"): 2}
        for (index, request_id), seed in asked.items():
            await gateway.add(index, request_id, prompt(4, 9), 20, seed=seed, temperature=1.0)
        batches = [await gateway.collect(0, "a", "b"), await gateway.collect(1, "a", "neighbour")]
        assert finishes_of(batches[0], "a") == ["length"]
        assert tokens_of(batches[0], "a") == tokens_of(batches[1], "a")
        assert tokens_of(batches[0], "a") != tokens_of(batches[0], "b")

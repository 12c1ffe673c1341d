"""What clients get from real ranks through the gateway is what the ranks generate."""

import asyncio

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from gateway.core.errors import Reason
from gateway.v1 import gateway_pb2
from tests.real_vllm.conftest import connect
from tests.support.calls import Generation, generate, make_request, many_stream
from tests.support.vllm_site import EOS, MAX_CONTEXT_TOKENS, RANKS

pytestmark = pytest.mark.real_vllm

PROMPTS = [[5, 6, 7, 8], [11, 400, 3, 77, 250], [*range(10, 140)], [511]]


def greedy(prompt, max_tokens, **fields):
    return make_request(prompt, max_tokens, sampling={"temperature": 0.0, **fields.pop("sampling", {})}, **fields)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_every_rank_gives_what_a_rank_without_a_gateway_gives(client, direct, prompt):
    wanted = await asyncio.to_thread(direct.generate, prompt, 24, _eos_token_id=EOS)
    for rank in range(RANKS):
        outcome = await generate(client, greedy(prompt, 24, data_parallel_rank=rank))
        assert outcome.status is None, outcome.status
        assert outcome.text == wanted
        assert outcome.finish.rank == rank
        assert outcome.finish.prompt_tokens == len(prompt)
        assert outcome.finish.completion_tokens == len(wanted)


async def test_tokens_arrive_one_step_at_a_time(client):
    generation = Generation(client, greedy([5, 6, 7, 8], 200))
    await generation.first_token()
    assert len(generation.outcome.text) < 200
    outcome = await generation.done()
    assert len(outcome.text) == 200
    assert outcome.finish.reason == gateway_pb2.FINISH_REASON_LENGTH


async def test_many_requests_on_both_ranks_are_told_apart(client, direct):
    """More than both ranks have slots, with prompts of different lengths, on one multiplexed stream."""
    prompts = [[5 + number, 6, 7, 8, *range(number)] for number in range(20)]
    wanted = [await asyncio.to_thread(direct.generate, prompt, 16, _eos_token_id=EOS) for prompt in prompts]
    async with many_stream(client) as many:
        futures = [many.start(greedy(prompt, 16)) for prompt in prompts]
        outcomes = await asyncio.gather(*futures)
    assert [outcome.text for outcome in outcomes] == wanted
    assert {outcome.finish.rank for outcome in outcomes} == set(range(RANKS))


async def test_sequences_of_one_request_are_equal_when_greedy(client, direct):
    """A real rank refuses n > 1 with temperature 0; the gateway sends n requests."""
    outcome = await generate(client, greedy([5, 6, 7, 8], 8, sampling={"n": 3}))
    wanted = await asyncio.to_thread(direct.generate, [5, 6, 7, 8], 8)
    assert outcome.tokens == dict.fromkeys(range(3), wanted)


async def test_a_seed_gives_the_same_tokens_on_both_ranks(client):
    requests = [
        make_request([5, 6, 7], 12, sampling={"seed": 7, "temperature": 1.0}, data_parallel_rank=rank)
        for rank in (0, 1, 0)
    ]
    texts = [(await generate(client, request)).text for request in requests]
    assert texts[0] == texts[1] == texts[2]
    other = await generate(client, make_request([5, 6, 7], 12, sampling={"seed": 8, "temperature": 1.0}))
    assert other.text != texts[0]


async def test_a_stop_token_ends_the_sequence(client, direct):
    tokens = await asyncio.to_thread(direct.generate, PROMPTS[1], 12)
    stop = tokens[4]
    expected = tokens[: tokens.index(stop) + 1]
    outcome = await generate(client, greedy(PROMPTS[1], 12, sampling={"stop_token_ids": [stop]}))
    assert outcome.text == expected
    assert outcome.finish.reason == gateway_pb2.FINISH_REASON_STOP


async def test_logprobs_of_the_chosen_token_and_of_its_rivals(client):
    outcome = await generate(client, greedy([5, 6, 7, 8], 6, sampling={"logprobs": 3}))
    assert outcome.status is None, outcome.status
    logprobs = outcome.logprobs[0]
    assert len(logprobs) == len(outcome.text) == 6
    for entry in logprobs:
        # Not by its id: with weights as small as these the most likely tokens may be equally likely.
        assert entry.logprob == pytest.approx(entry.top[0].logprob), "greedy: nothing is more likely"
        assert len({each.token_id for each in entry.top}) == 3
        assert 0.0 > entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob


async def test_the_whole_context_can_be_used(client):
    prompt = [number % 500 + 3 for number in range(MAX_CONTEXT_TOKENS - 1)]
    outcome = await generate(client, greedy(prompt, 1))
    assert outcome.status is None, outcome.status
    assert len(outcome.text) == 1
    outcome = await generate(client, greedy([5, 6], MAX_CONTEXT_TOKENS - 2, sampling={"ignore_eos": True}))
    assert len(outcome.text) == MAX_CONTEXT_TOKENS - 2
    assert outcome.finish.reason == gateway_pb2.FINISH_REASON_LENGTH


async def test_the_same_prompt_again_is_partly_cached(client):
    prompt = [number % 300 + 20 for number in range(300)]
    finishes = [(await generate(client, greedy(prompt, 2, data_parallel_rank=1))).finish for _ in range(2)]
    assert [finish.cached_tokens > 0 for finish in finishes] == [False, True]


async def test_an_abort_frees_the_rank(client, eventually):
    """The rank itself says so: KV usage is never made up by the gateway."""
    generation = Generation(client, greedy([5, 6, 7, 8], 1800, request_id="goner", data_parallel_rank=0))
    await generation.first_token()
    await eventually(lambda rank: rank.kv_usage)
    await client.Abort(gateway_pb2.AbortRequest(request_id="goner"))
    outcome = await generation.done()
    assert outcome.reason is Reason.ABORTED
    assert len(outcome.text) < 1800
    await eventually(lambda rank: not rank.kv_usage)


async def test_a_client_that_goes_away_frees_the_rank(client, eventually):
    generation = Generation(client, greedy([5, 6, 7, 8], 1800, data_parallel_rank=1))
    await generation.first_token()
    generation.call.cancel()
    assert (await generation.done()).code is grpc.StatusCode.CANCELLED
    await eventually(lambda rank: not rank.in_flight and not rank.kv_usage, number=1)


async def test_the_standard_engine_service_serves_them_too(site, direct):
    wanted = await asyncio.to_thread(direct.generate, [5, 6, 7, 8], 10)
    channel = connect(site)
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    request = vllm_engine_pb2.GenerateRequest(
        request_id="standard",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, 6, 7, 8]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=10, temperature=0.0),
        stream=True,
    )
    chunks, complete = [], None
    async for response in stub.Generate(request):
        if response.HasField("complete"):
            complete = response.complete
        else:
            chunks += response.chunk.token_ids
    assert chunks == wanted
    assert complete is not None
    assert list(complete.output_ids) == wanted
    await channel.close()

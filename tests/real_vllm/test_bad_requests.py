"""What kills or deafens a real rank never reaches it; and the extremes that are let through don't hurt it."""

import asyncio

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from gateway.core.errors import Reason
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.real_vllm.conftest import connect
from tests.real_vllm.test_streams import greedy
from tests.support.calls import Generation, generate, make_request
from tests.support.vllm_site import MAX_CONTEXT_TOKENS, RANKS, VOCAB_SIZE, VllmSite

pytestmark = pytest.mark.real_vllm

INVALID = (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_REQUEST)
TOO_LONG = (grpc.StatusCode.INVALID_ARGUMENT, Reason.PROMPT_TOO_LONG)
NAN, INF = float("nan"), float("inf")
GOOD = [5, 6, 7]

REFUSED = {
    "a negative temperature": (greedy(GOOD, 4, sampling={"temperature": -0.1}), INVALID),
    "a temperature above 2": (greedy(GOOD, 4, sampling={"temperature": 2.01}), INVALID),
    "no temperature": (greedy(GOOD, 4, sampling={"temperature": NAN}), INVALID),
    "an infinite temperature": (greedy(GOOD, 4, sampling={"temperature": INF}), INVALID),
    "top_p above 1": (greedy(GOOD, 4, sampling={"top_p": 1.01}), INVALID),
    "top_p 0": (greedy(GOOD, 4, sampling={"top_p": 0.0}), INVALID),
    "min_p below 0": (greedy(GOOD, 4, sampling={"min_p": -0.01}), INVALID),
    "top_k -2": (greedy(GOOD, 4, sampling={"top_k": -2}), INVALID),
    "a penalty above 2": (greedy(GOOD, 4, sampling={"presence_penalty": 2.01}), INVALID),
    "a penalty that is no number": (greedy(GOOD, 4, sampling={"frequency_penalty": NAN}), INVALID),
    "repetition_penalty 0": (greedy(GOOD, 4, sampling={"repetition_penalty": 0.0}), INVALID),
    "max_tokens 0": (greedy(GOOD, 0), INVALID),
    "min_tokens above max_tokens": (greedy(GOOD, 4, sampling={"min_tokens": 5}), INVALID),
    "n 0": (greedy(GOOD, 4, sampling={"n": 0}), INVALID),
    "logprobs 50": (greedy(GOOD, 4, sampling={"logprobs": 50}), INVALID),
    "a token outside the vocabulary": (greedy([5, VOCAB_SIZE], 4), INVALID),
    "the largest token id": (greedy([2**32 - 1], 4), INVALID),
    "a stop token outside the vocabulary": (greedy(GOOD, 4, sampling={"stop_token_ids": [VOCAB_SIZE]}), INVALID),
    "an empty prompt": (greedy([], 4), INVALID),
    "a prompt that fills the context": (greedy([5] * MAX_CONTEXT_TOKENS, 1), TOO_LONG),
    "a prompt beyond the context": (greedy([5] * (4 * MAX_CONTEXT_TOKENS), 1), TOO_LONG),
    "more tokens than the context leaves": (greedy(GOOD, MAX_CONTEXT_TOKENS - 2), INVALID),
    "a rank that isn't there": (
        greedy(GOOD, 4, data_parallel_rank=RANKS),
        (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_RANK),
    ),
    "a model that isn't served": (
        greedy(GOOD, 4, model="huge"),
        (grpc.StatusCode.NOT_FOUND, Reason.MODEL_NOT_FOUND),
    ),
}

EXTREMES = {
    "an almost greedy temperature": {"temperature": 1e-12},
    "the highest temperature": {"temperature": 2.0},
    "the smallest top_p": {"temperature": 1.0, "top_p": 1e-12},
    "min_p 1": {"temperature": 1.0, "min_p": 1.0},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_k beyond the vocabulary": {"temperature": 1.0, "top_k": 2**31 - 1},
    "the highest penalties": {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 100.0},
    "the lowest penalties": {"frequency_penalty": -2.0, "presence_penalty": -2.0, "repetition_penalty": 1e-9},
    "the largest seed": {"temperature": 1.0, "seed": 2**63 - 1},
    "the smallest seed": {"temperature": 1.0, "seed": -(2**63)},
    "seed -1": {"temperature": 1.0, "seed": -1},
    "min_tokens equal to max_tokens": {"min_tokens": 6},
    "the most logprobs": {"logprobs": 20},
    "logprobs of the chosen token only": {"logprobs": 0},
    "the most stop tokens": {"stop_token_ids": list(range(VOCAB_SIZE - 256, VOCAB_SIZE))},
    "the same stop token twice": {"stop_token_ids": [2, 2, 2]},
    "many sequences": {"n": 8},
    "past the end of the sequence": {"ignore_eos": True},
}


def adds(site):
    """Requests that the ranks' sockets took."""
    (line,) = [line for line in site.scrape().splitlines() if 'event="adds"' in line]
    return float(line.rpartition(" ")[2])


@pytest.fixture
def healthy(site, client, direct):
    """Afterwards both ranks are the processes that they were, and answer as before."""

    async def check(pids):
        assert [process.pid for process in site.processes] == pids
        assert all(process.is_running for process in site.processes)
        wanted = await asyncio.to_thread(direct.generate, [5, 6, 7, 8], 8)
        for rank in range(RANKS):
            outcome = await generate(client, greedy([5, 6, 7, 8], 8, data_parallel_rank=rank), timeout=20.0)
            assert outcome.text == wanted, outcome.status

    return check


async def test_what_would_cost_a_rank_is_refused(site, client, healthy):
    pids = [process.pid for process in site.processes]
    sent = adds(site)
    for what, (request, wanted) in REFUSED.items():
        for rank in (None,) if request.HasField("data_parallel_rank") else range(RANKS):
            aimed = type(request)()
            aimed.CopyFrom(request)
            if rank is not None:
                aimed.data_parallel_rank = rank
            outcome = await generate(client, aimed)
            assert (outcome.code, outcome.reason) == wanted, (what, outcome.status)
            assert outcome.status is not None
            assert outcome.status.message, what
            assert outcome.messages == 0
    assert adds(site) == sent
    await healthy(pids)


async def test_an_id_that_is_in_use_is_refused_and_free_again_afterwards(site, client, healthy):
    """A rank that gets an id twice ends; ids on the wire are the gateway's own, so a client may use its own again."""
    pids = [process.pid for process in site.processes]
    running = Generation(client, greedy([5, 6, 7, 8], 1800, request_id="twice", data_parallel_rank=0))
    await running.first_token()
    refused = await generate(client, greedy(GOOD, 4, request_id="twice", data_parallel_rank=0))
    assert (refused.code, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST_ID)
    running.call.cancel()
    await running.done()
    for _ in range(3):
        outcome = await generate(client, greedy(GOOD, 4, request_id="twice", data_parallel_rank=0))
        assert outcome.status is None, outcome.status
    await healthy(pids)


async def test_what_only_a_front_end_could_serve_is_refused_by_the_standard_service(site, client, healthy):
    """Stop strings without a detokenizer make a rank deaf, structured output has no tokenizer to lean on."""
    pids = [process.pid for process in site.processes]
    channel = connect(site)
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    for number, sampling in enumerate(
        ({"stop": ["x"]}, {"regex": "a+"}, {"prompt_logprobs": 1}, {"logit_bias": {600: 1.0}})
    ):
        request = vllm_engine_pb2.GenerateRequest(
            request_id=f"unserved-{number}",
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=GOOD),
            sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=4, **sampling),
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Generate(request):
                pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, sampling
        assert next(iter(sampling)) in (raised.value.details() or "")
    await channel.close()
    await healthy(pids)


async def test_the_extremes_that_are_let_through_are_served(site, client, healthy):
    pids = [process.pid for process in site.processes]
    for what, sampling in EXTREMES.items():
        for rank in range(RANKS):
            request = make_request(GOOD, 6, sampling={"temperature": 0.0} | sampling, data_parallel_rank=rank)
            outcome = await generate(client, request, timeout=30.0)
            assert outcome.status is None, (what, outcome.status)
            assert len(outcome.finishes) == sampling.get("n", 1)
    await healthy(pids)


async def test_a_burst_beyond_every_slot_is_served(site, client, healthy):
    """They queue at the ranks and lose nothing."""
    pids = [process.pid for process in site.processes]
    requests = [greedy([5 + number, 6, 7], 120) for number in range(24)]
    outcomes = await asyncio.gather(*(generate(client, request, timeout=60.0) for request in requests))
    assert [len(outcome.text) for outcome in outcomes] == [120] * 24
    await healthy(pids)


async def test_a_rank_with_less_context_than_the_configuration_says_is_not_killed_by_it(rank_server, direct):
    """A prompt beyond the rank's own context would end it."""
    with VllmSite(rank_server, ranks=1, settings={"max_model_len": 256}) as site:
        await asyncio.to_thread(site.start)
        channel = connect(site)
        client = GatewayServiceStub(channel)
        for length in (256, 300):
            refused = await generate(client, greedy([5] * length, 4), timeout=20.0)
            assert refused.status is not None
            assert not refused.messages
        wanted = await asyncio.to_thread(direct.generate, [5, 6, 7, 8], 8)
        assert (await generate(client, greedy([5, 6, 7, 8], 8), timeout=20.0)).text == wanted
        assert site.processes[0] is not None
        assert site.processes[0].is_running
        await channel.close()

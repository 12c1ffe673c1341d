"""Inputs that would kill or deafen a rank: refused here, and the ranks never see one.

The ranks are strict: a vLLM rank dies or goes deaf on what a real one would.
"""

import asyncio
import random
from math import inf, nan

import grpc
import pytest

from engine_stub.rank import RankPhase
from gateway.core.errors import Reason
from tests.support.calls import engine_request, generate, make_prompt, make_request, many_stream
from tests.support.grpc_edge import error_info, stream_failure
from tests.support.stack import MAX_CONTEXT_TOKENS, VOCAB_SIZE, expected, running_gateway, stub_config

INVALID = grpc.StatusCode.INVALID_ARGUMENT
STRICT = stub_config(strict_vllm=True)

BAD_SAMPLING = [
    {"temperature": -0.1},
    {"temperature": -inf},
    {"temperature": nan},
    {"temperature": inf},
    {"top_p": 1.1},
    {"top_p": 0.0},
    {"top_p": -0.5},
    {"top_p": nan},
    {"top_k": 0},
    {"top_k": -2},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"min_p": nan},
    {"frequency_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"frequency_penalty": nan},
    {"presence_penalty": 2.1},
    {"presence_penalty": -inf},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": nan},
    {"min_tokens": 5},
    {"n": 0},
    {"n": 65},
    {"logprobs": 21},
    {"logprobs": 2**32 - 1},
    {"stop_token_ids": [VOCAB_SIZE]},
    {"stop_token_ids": [2**32 - 1]},
    {"stop_token_ids": list(range(257))},
]
BAD_PROMPTS = {
    "empty": [],
    "id-at-vocab-size": [1, VOCAB_SIZE],
    "id-of-32-bits": [2**32 - 1],
    "fills-the-context": make_prompt(MAX_CONTEXT_TOKENS),
    "longer-than-the-context": make_prompt(MAX_CONTEXT_TOKENS + 100),
}
BAD_LENGTHS = {"none": 0, "beyond-the-context": MAX_CONTEXT_TOKENS, "of-32-bits": 2**32 - 1}


def name_of(sampling):
    ((field, value),) = sampling.items()
    return f"{field}={value if not isinstance(value, list) else f'{len(value)}-ids-to-{value[-1]}'}"


async def assert_unharmed(stack):
    """No rank got anything, and all of them serve."""
    assert [rank.records.adds for rank in stack.ranks] == [0] * len(stack.ranks)
    assert not any(stack.router.counters.decisions)
    for rank in range(len(stack.ranks)):
        request = make_request(data_parallel_rank=rank)
        (await generate(stack.client(), request)).assert_complete(request)
    assert_strict(stack)


def assert_strict(stack):
    for rank in stack.ranks:
        assert (rank.phase, list(rank.records.bad_inputs)) == (RankPhase.SERVING, [])


async def test_sampling_that_deafens_a_rank_is_refused_by_name(protocol):
    async with running_gateway(protocol, stub=STRICT) as stack:
        client = stack.client()
        async with many_stream(client) as many:
            for sampling in BAD_SAMPLING:
                (field,) = sampling
                for outcome in (
                    await generate(client, make_request(sampling=sampling)),
                    await many.start(make_request(sampling=sampling)),
                ):
                    assert outcome.code is INVALID, name_of(sampling)
                    assert outcome.facts["field"] == field, name_of(sampling)
        await assert_unharmed(stack)


@pytest.mark.parametrize("prompt", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
async def test_a_prompt_that_kills_a_rank_is_refused(protocol, prompt):
    async with running_gateway(protocol, stub=STRICT) as stack:
        request = make_request(prompt, 1)
        outcome = await generate(stack.client(), request)
        assert outcome.code is INVALID
        assert outcome.reason in (Reason.INVALID_REQUEST, Reason.PROMPT_TOO_LONG)
        request.sampling.ClearField("max_tokens")
        assert (await generate(stack.client(), request)).code is INVALID
        error, _ = await stream_failure(stack.engine_client().Generate(engine_request(protocol, prompt, 1)))
        assert error.code() is INVALID
        await assert_unharmed(stack)


@pytest.mark.parametrize("max_tokens", BAD_LENGTHS.values(), ids=BAD_LENGTHS)
async def test_a_length_that_deafens_a_rank_is_refused(protocol, max_tokens):
    async with running_gateway(protocol, stub=STRICT) as stack:
        outcome = await generate(stack.client(), make_request(max_tokens=max_tokens))
        assert (outcome.code, outcome.facts["field"]) == (INVALID, "max_tokens")
        if max_tokens < 2**31 or protocol == "vllm":
            request = engine_request(protocol, max_tokens=max_tokens)
            error, _ = await stream_failure(stack.engine_client().Generate(request))
            assert (error.code(), error_info(error).metadata["field"]) == (INVALID, "max_tokens")
        await assert_unharmed(stack)


def bad_engine_requests(protocol):
    """(field in the error, request) for what only the standard services can express, and some of the rest."""
    logprob_fields = (
        [({"logprobs": 21}, {}, "logprobs"), ({"prompt_logprobs": 1}, {}, "sampling_params.prompt_logprobs")]
        if protocol == "vllm"
        else [({}, {"return_logprob": True, "top_logprobs_num": 2}, "top_logprobs_num")]
    )
    cases = [
        ({"stop": ["x"]}, {}, "sampling_params.stop"),
        ({"json_schema": "{}"}, {}, "sampling_params.json_schema"),
        ({"regex": "a+"}, {}, "sampling_params.regex"),
        ({"temperature": -1.0}, {}, "temperature"),
        ({"temperature": nan}, {}, "temperature"),
        ({"top_p": 1.5}, {}, "top_p"),
        ({"min_p": 2.0}, {}, "min_p"),
        ({"frequency_penalty": 3.0}, {}, "frequency_penalty"),
        ({"repetition_penalty": -1.0}, {}, "repetition_penalty"),
        ({"stop_token_ids": [VOCAB_SIZE]}, {}, "stop_token_ids"),
        ({"n": 65}, {}, "n"),
        *logprob_fields,
    ]
    return [(field, engine_request(protocol, sampling=sampling, **more)) for sampling, more, field in cases]


async def test_the_standard_service_refuses_what_its_ranks_cannot_take(protocol):
    async with running_gateway(protocol, stub=STRICT) as stack:
        client = stack.engine_client()
        for field, request in bad_engine_requests(protocol):
            error, _ = await stream_failure(client.Generate(request))
            assert (error.code(), error_info(error).metadata["field"]) == (INVALID, field)
        await assert_unharmed(stack)


@pytest.mark.parametrize("path", ["gateway.v1.GatewayService/Generate", "engine", "gateway.v1.GatewayService/Abort"])
async def test_bytes_that_are_no_message_are_refused(protocol, path):
    services = {"vllm": "vllm.grpc.engine.VllmEngine", "tokenspeed": "tokenspeed.grpc.scheduler.TokenSpeedScheduler"}
    async with running_gateway(protocol, stub=STRICT) as stack:
        method = f"/{services[protocol]}/Generate" if path == "engine" else f"/{path}"
        for garbage in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x80" * 11, random.Random(3).randbytes(200)):
            if path.endswith("Abort"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stack.connect().unary_unary(method)(garbage)
                assert caught.value.code() is INVALID
            else:
                error, _ = await stream_failure(stack.connect().unary_stream(method)(garbage))
                assert error.code() is INVALID
        await assert_unharmed(stack)


async def test_greedy_requests_with_n_reach_the_ranks_one_by_one(protocol):
    """One ADD with n > 1 and temperature 0 would deafen its rank; each sequence is an ADD of its own."""
    async with running_gateway(protocol, stub=STRICT) as stack:
        request = make_request(max_tokens=5, sampling={"n": 4, "temperature": 0.0})
        (await generate(stack.client(), request)).assert_complete(request)
        assert sum(rank.records.adds for rank in stack.ranks) == 4
        assert_strict(stack)


async def test_a_request_without_sampling_is_sent_with_a_length(protocol):
    async with running_gateway(protocol, stub=STRICT) as stack:
        request = make_request(make_prompt(MAX_CONTEXT_TOKENS - 3))
        request.ClearField("sampling")
        outcome = await generate(stack.client(), request)
        assert outcome.text == expected(request.prompt_token_ids, 3)
        assert_strict(stack)


EDGE_VALUES = {
    "temperature": [0.0, 1e-9, 1e-5, 1.0, 2.0],
    "top_p": [1e-9, 0.5, 1.0],
    "top_k": [-1, 1, 5, 2**31 - 1],
    "min_p": [0.0, 0.5, 1.0],
    "frequency_penalty": [-2.0, 0.0, 2.0],
    "presence_penalty": [-2.0, 0.0, 2.0],
    "repetition_penalty": [1e-9, 1.0, 2.0],
    "seed": [0, 1, -1, 2**63 - 1, -(2**63)],
    "min_tokens": [0, 1, 3],
    "n": [1, 2, 64],
    "stop_token_ids": [[], [0, VOCAB_SIZE - 1]],
    "ignore_eos": [True, False],
}


async def test_no_rank_objects_to_anything_that_is_let_through(protocol):
    """Random combinations of values at the edges of what is allowed, and now and then one beyond."""
    source = random.Random(8)
    edges = EDGE_VALUES | {"logprobs": [0, 1, 20] if protocol == "vllm" else [0]}
    bad = [sampling for sampling in BAD_SAMPLING if name_of(sampling) != "min_tokens=5"]
    async with running_gateway(protocol, stub=STRICT) as stack, many_stream(stack.client()) as many:
        requests = []
        for number in range(300):
            fields = source.sample(sorted(edges), source.randrange(len(edges)))
            sampling = {field: source.choice(edges[field]) for field in fields}
            is_bad = number % 3 == 0
            sampling |= source.choice(bad) if is_bad else {}
            priority = source.choice([0, 1, -1, 2**31 - 1, -(2**31)])
            requests.append((is_bad, make_request(make_prompt(3, number), 3, sampling=sampling, priority=priority)))
        outcomes = await asyncio.gather(*(many.start(request) for _, request in requests))
        for (is_bad, request), outcome in zip(requests, outcomes, strict=True):
            assert (outcome.code is INVALID) is is_bad, request
            assert is_bad or outcome.status is None
        assert_strict(stack)


async def test_a_temperature_that_a_vllm_rank_refuses_is_not_sent():
    async with running_gateway("vllm", stub=STRICT) as stack:
        outcome = await generate(stack.client(), make_request(sampling={"temperature": 2.01}))
        assert outcome.code is INVALID
        assert_strict(stack)


async def test_a_repetition_penalty_that_a_tokenspeed_rank_refuses_is_not_sent():
    async with running_gateway("tokenspeed", stub=STRICT) as stack:
        outcome = await generate(stack.client(), make_request(sampling={"repetition_penalty": 2.5}))
        assert outcome.code is INVALID
        assert_strict(stack)

"""Tokens from rank to client: every byte, every finish, over each way in."""

import asyncio

import pytest

from engine_stub.config import Model
from engine_stub.faults import Faults, WireForm
from engine_stub.tokens import expected_logprob, expected_tokens, expected_top_logprobs
from gateway.v1 import gateway_pb2
from tests.support.calls import engine_request, generate, make_prompt, make_request, many_stream
from tests.support.engine_edge import PROTOS
from tests.support.stack import MAX_CONTEXT_TOKENS, VOCAB_SIZE, expected, running_gateway, stub_config

pytestmark = pytest.mark.usefixtures("transport")

STOP = gateway_pb2.FINISH_REASON_STOP
LENGTH = gateway_pb2.FINISH_REASON_LENGTH


async def test_generate_delivers_every_token_once_and_says_why_it_ended(protocol):
    async with running_gateway(protocol, ranks=4) as stack:
        client = stack.client()
        requests = [make_request(make_prompt(5 + n, n), 1 + 3 * n) for n in range(24)]
        outcomes = await asyncio.gather(*(generate(client, request) for request in requests))
        for request, outcome in zip(requests, outcomes, strict=True):
            outcome.assert_complete(request)
            assert outcome.trailing["x-rankgate-rank"] == str(outcome.finish.rank)
            assert outcome.finish.attempts == 1


async def test_generate_many_delivers_every_token_of_interleaved_requests(protocol):
    async with running_gateway(protocol, ranks=4) as stack:
        requests = [make_request(make_prompt(3 + n, n), 1 + n % 40, sampling={"seed": n}) for n in range(200)]
        async with many_stream(stack.client()) as many:
            outcomes = await asyncio.gather(*(many.start(request) for request in requests))
        for request, outcome in zip(requests, outcomes, strict=True):
            outcome.assert_complete(request)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_standard_engine_service_delivers_every_token(protocol, is_stream):
    async with running_gateway(protocol, ranks=2) as stack:
        client = stack.engine_client()
        prompts = [make_prompt(4 + n, n) for n in range(12)]

        async def run(number, prompt):
            request = engine_request(protocol, prompt, 2 + number, stream=is_stream)
            return [response async for response in client.Generate(request)]

        answers = await asyncio.gather(*(run(number, prompt) for number, prompt in enumerate(prompts)))
        for number, (prompt, responses) in enumerate(zip(prompts, answers, strict=True)):
            wanted = expected(prompt, 2 + number)
            kinds = [response.WhichOneof("response") for response in responses]
            assert kinds.count("complete") == 1
            assert kinds[-1] == "complete"
            chunks = [token for response in responses[:-1] for token in response.chunk.token_ids]
            assert chunks == (wanted if is_stream else [])
            complete = responses[-1].complete
            assert list(complete.output_ids) == wanted
            assert (complete.finish_reason, complete.prompt_tokens) == ("length", len(prompt))
            assert complete.completion_tokens == len(wanted)


async def test_sequences_of_a_seeded_request_differ_and_each_can_be_had_alone(protocol):
    async with running_gateway(protocol, ranks=2) as stack:
        request = make_request(make_prompt(9), 12, sampling={"n": 3, "seed": 40})
        outcome = await generate(stack.client(), request)
        outcome.assert_complete(request)
        assert len({tuple(tokens) for tokens in outcome.tokens.values()}) == 3
        alone = make_request(make_prompt(9), 12, sampling={"seed": 42})
        assert (await generate(stack.client(), alone)).text == outcome.tokens[2]


@pytest.mark.parametrize("way", ["generate", "many"])
async def test_n_sequences_are_balanced_over_the_ranks_and_each_is_whole(protocol, way):
    async with running_gateway(protocol, ranks=4) as stack:
        request = make_request(make_prompt(9), 12, sampling={"n": 4})
        if way == "generate":
            outcome = await generate(stack.client(), request)
            assert sorted(outcome.trailing["x-rankgate-rank"]) == [",", ",", ",", "0", "1", "2", "3"]
        else:
            async with many_stream(stack.client()) as many:
                outcome = await many.start(request)
        outcome.assert_complete(request)
        assert {finish.rank for finish in outcome.finishes.values()} == {0, 1, 2, 3}
        assert [rank.records.adds for rank in stack.ranks] == [1, 1, 1, 1]


async def test_n_sequences_of_the_engine_service_complete_once_each(protocol):
    async with running_gateway(protocol, ranks=4) as stack:
        prompt = make_prompt(6)
        request = engine_request(protocol, prompt, 7, sampling={"n": 4})
        responses = [response async for response in stack.engine_client().Generate(request)]
        completes = [response.complete for response in responses if response.WhichOneof("response") == "complete"]
        assert sorted(complete.index for complete in completes) == [0, 1, 2, 3]
        assert [list(complete.output_ids) for complete in completes] == [expected(prompt, 7)] * 4


@pytest.mark.parametrize(
    ("protocol", "alternatives"),
    [
        # The wire of the other family has no alternatives; that they are refused is tested with the bad inputs.
        ("tokenspeed", 0),
        ("vllm", 3),
        ("vllm", 0),
    ],
)
async def test_logprobs_come_with_their_tokens(protocol, alternatives):
    """A rank pads each row to the largest number of alternatives in its batch (the stub: to one at least)."""
    async with running_gateway(protocol) as stack:
        request = make_request(make_prompt(8), 40, sampling={"logprobs": alternatives})
        outcome = await generate(stack.client(), request)
        outcome.assert_complete(request)
        assert [entry.logprob for entry in outcome.logprobs[0]] == [expected_logprob(token) for token in outcome.text]
        tops = [[(top.token_id, top.logprob) for top in entry.top] for entry in outcome.logprobs[0]]
        assert tops == [
            expected_top_logprobs(token, alternatives, VOCAB_SIZE) if alternatives else [] for token in outcome.text
        ]


def eos_model(*eos: int) -> Model:
    """A model of few tokens that emits its EOS tokens now and then."""
    return Model(vocab_size=40, max_model_len=MAX_CONTEXT_TOKENS, eos_token_ids=eos, excluded_token_ids=())


@pytest.mark.parametrize("eos", [(7,), (7, 11)])
async def test_eos_ends_a_sequence_unless_it_is_ignored_or_too_early(protocol, eos):
    model = {"vocab_size": 40, "eos_token_ids": eos}
    async with running_gateway(protocol, stub=stub_config(model=eos_model(*eos)), model=model) as stack:
        client = stack.client()
        prompt = [1, 2, 3]
        stream = expected_tokens(prompt, None, 300, 40)
        stops = [at + 1 for at, token in enumerate(stream) if token in eos]
        assert len(stops) > 3, "the prompt gives no EOS: choose another"

        plain = await generate(client, make_request(prompt, 300))
        assert plain.text == stream[: stops[0]]
        assert (plain.finish.reason, plain.finish.completion_tokens) == (STOP, stops[0])

        ignored = await generate(client, make_request(prompt, 300, sampling={"ignore_eos": True}))
        assert ignored.text == stream
        assert ignored.finish.reason == LENGTH

        later = await generate(client, make_request(prompt, 300, sampling={"min_tokens": stops[1] + 1}))
        assert later.text == stream[: stops[2]]
        assert later.finish.reason == STOP


async def test_stop_token_ids_end_a_sequence_even_when_eos_is_ignored(protocol):
    model = {"vocab_size": 40, "eos_token_ids": [7]}
    async with running_gateway(protocol, stub=stub_config(model=eos_model(7)), model=model) as stack:
        prompt = [4, 5]
        stream = expected_tokens(prompt, None, 200, 40)
        stops = [at + 1 for at, token in enumerate(stream) if token in (13, 17)]
        sampling = {"stop_token_ids": [13, 17], "ignore_eos": True}
        outcome = await generate(stack.client(), make_request(prompt, 200, sampling=sampling))
        assert outcome.text == stream[: stops[0]]
        assert (outcome.finish.reason, outcome.finish.completion_tokens) == (STOP, stops[0])


@pytest.mark.parametrize("service", ["gateway", "engine"])
async def test_a_finish_without_tokens_ends_the_stream_once(protocol, service):
    faults = Faults(final_without_tokens=True)
    async with running_gateway(protocol, stub=stub_config(faults=faults)) as stack:
        prompt = make_prompt(5)
        if service == "gateway":
            requests = [make_request(prompt, count) for count in (1, 2, 30)]
            outcomes = await asyncio.gather(*(generate(stack.client(), request) for request in requests))
            for request, outcome in zip(requests, outcomes, strict=True):
                outcome.assert_complete(request)
        else:
            call = stack.engine_client().Generate(engine_request(protocol, prompt, 9))
            responses = [response async for response in call]
            assert list(responses[-1].complete.output_ids) == expected(prompt, 9)
            assert all(response.chunk.token_ids for response in responses[:-1])


async def test_a_prompt_may_fill_the_context_and_leaves_one_token(protocol):
    async with running_gateway(protocol) as stack:
        request = make_request(make_prompt(MAX_CONTEXT_TOKENS - 1), 1)
        (await generate(stack.client(), request)).assert_complete(request)
        # Without max_tokens it is what the context leaves.
        open_ended = make_request(make_prompt(MAX_CONTEXT_TOKENS - 5), 1)
        open_ended.sampling.ClearField("max_tokens")
        outcome = await generate(stack.client(), open_ended)
        assert outcome.text == expected(open_ended.prompt_token_ids, 5)
        assert outcome.finish.reason == LENGTH


@pytest.mark.parametrize(
    ("family", "form"),
    [
        pytest.param("tokenspeed", WireForm(tokenspeed_batch=9), id="tokenspeed-9"),
        pytest.param("tokenspeed", WireForm(tokenspeed_batch=10), id="tokenspeed-10"),
        pytest.param("vllm", WireForm(vllm_batch=8, vllm_row=14), id="vllm-8-14"),
    ],
)
async def test_older_wires_deliver_the_same_bytes(family, form):
    async with running_gateway(family, stub=stub_config(wire=form)) as stack:
        requests = [make_request(make_prompt(4 + n, n), 5 + n, sampling={"logprobs": 0}) for n in range(8)]
        outcomes = await asyncio.gather(*(generate(stack.client(), request) for request in requests))
        for each, outcome in zip(requests, outcomes, strict=True):
            outcome.assert_complete(each)
            assert len(outcome.logprobs[0]) == len(outcome.text)


async def test_the_engine_service_shows_the_fleet_and_aborts_by_id(protocol):
    pb = PROTOS[protocol]
    async with running_gateway(protocol, ranks=3, auto_step=False) as stack:
        client = stack.engine_client()
        loads = await client.GetLoads(pb.GetLoadsRequest())
        assert [load.dp_rank for load in loads.loads] == [0, 1, 2]
        call = client.Generate(engine_request(protocol, request_id="mine", data_parallel_rank=2))
        await stack.ranks[2].wait_until(lambda: stack.ranks[2].live_ids)
        loads = await client.GetLoads(pb.GetLoadsRequest())
        # Nothing reported yet: what this gateway has in flight stands in.
        assert [load.num_running_reqs for load in loads.loads] == [0, 0, 1]
        await stack.ranks[2].step()
        assert (await call.read()).chunk.token_ids == expected([1, 2, 3], 1)
        abort = {"request_ids": ["mine"]} if protocol == "vllm" else {"request_id": "mine", "reason": "test"}
        await client.Abort(pb.AbortRequest(**abort))
        last = await call.read()
        assert (last.complete.finish_reason, list(last.complete.output_ids)) == ("abort", expected([1, 2, 3], 1))
        assert await call.read() is not None
        await stack.ranks[2].wait_until(lambda: stack.ranks[2].received_aborts)

"""Requests that the gateway turns away: full, pinned to nowhere, or with an id that is taken."""

import asyncio

import grpc
import pytest

from engine_stub.config import Model
from engine_stub.faults import Faults
from engine_stub.scheduler.config import SchedulerConfig
from gateway.core.errors import Reason
from tests.support.by_hand import held, report
from tests.support.calls import Generation, engine_request, generate, make_prompt, make_request, many_stream
from tests.support.grpc_edge import error_info, stream_failure
from tests.support.stack import MAX_CONTEXT_TOKENS, VOCAB_SIZE, expected, running_gateway, stub_config, until

FIRST = expected([1, 2, 3], 1)


def silent():
    return stub_config(faults=Faults(silent=True))


async def end(stack, generations):
    """Let silent ranks answer."""
    for rank in stack.ranks:
        rank.set_faults(silent=False)
    for generation in generations:
        (await generation.done()).assert_complete(generation.request)


async def test_a_full_gateway_refuses_with_a_hint_when_to_retry(protocol):
    async with running_gateway(protocol, stub=silent(), admission={"max_in_flight": 4}) as stack:
        client = stack.client()
        live = [Generation(client, make_request(max_tokens=3)) for _ in range(4)]
        await until(lambda: stack.router.in_flight == 4, "four requests")
        outcome = await generate(client, make_request())
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.GATEWAY_FULL)
        assert outcome.retry_after_s > 0
        assert outcome.facts["limit"] == outcome.facts["in_flight"] == "4"
        async with many_stream(client) as many:
            assert (await many.start(make_request())).reason == Reason.GATEWAY_FULL
        error, _ = await stream_failure(stack.engine_client().Generate(engine_request(protocol)))
        assert error_info(error).reason == Reason.GATEWAY_FULL
        await end(stack, live)
        following = make_request()
        (await generate(client, following)).assert_complete(following)


async def test_full_ranks_refuse_with_a_hint_when_to_retry(protocol):
    async with running_gateway(protocol, stub=silent(), admission={"max_in_flight_per_rank": 2}) as stack:
        client = stack.client()
        live = [Generation(client, make_request(max_tokens=3)) for _ in range(4)]
        await until(lambda: stack.router.in_flight == 4, "four requests")
        assert stack.table.in_flight == [2, 2]
        for request in (make_request(), make_request(data_parallel_rank=1)):
            outcome = await generate(client, request)
            assert (outcome.code, outcome.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.RANKS_FULL)
            assert outcome.retry_after_s > 0
        await end(stack, live)


async def test_the_limit_of_a_rank_follows_its_slots(protocol):
    stub = stub_config(faults=Faults(silent=True), scheduler=SchedulerConfig(max_active=2))
    async with running_gateway(protocol, ranks=1, stub=stub) as stack:
        client = stack.client()
        live = [Generation(client, make_request(max_tokens=3)) for _ in range(8)]
        await until(lambda: stack.router.in_flight == 8, "eight requests")
        assert (await generate(client, make_request())).reason == Reason.RANKS_FULL
        await end(stack, live)


async def test_n_sequences_are_admitted_all_or_none(protocol):
    admission = {"max_in_flight": 6, "max_in_flight_per_rank": 2}
    async with running_gateway(protocol, ranks=2, stub=silent(), admission=admission) as stack:
        client = stack.client()
        for n, reason in ((7, Reason.GATEWAY_FULL), (5, Reason.RANKS_FULL)):
            outcome = await generate(client, make_request(sampling={"n": n}))
            assert outcome.reason == reason
            assert stack.table.in_flight == [0, 0]
        stack.router.check()
        whole = Generation(client, make_request(max_tokens=3, sampling={"n": 4}))
        await until(lambda: stack.table.in_flight == [2, 2], "all four sequences")
        await end(stack, [whole])
        assert sum(rank.records.adds for rank in stack.ranks) == 4


async def test_a_prompt_that_no_rank_can_ever_hold_is_not_to_be_retried(protocol):
    small = stub_config(scheduler=SchedulerConfig(kv_tokens=512))
    async with running_gateway(protocol, stub=small) as stack:
        outcome = await generate(stack.client(), make_request(make_prompt(600), 1))
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.PROMPT_TOO_LONG)
        assert outcome.retry_after_s is None
        assert not any(rank.records.adds for rank in stack.ranks)


async def test_a_prompt_that_does_not_fit_beside_what_runs_is_to_be_retried(protocol):
    small = stub_config(faults=Faults(silent=True), scheduler=SchedulerConfig(kv_tokens=512))
    async with running_gateway(protocol, ranks=1, stub=small) as stack:
        client = stack.client()
        live = Generation(client, make_request(make_prompt(300), 3))
        await until(lambda: stack.router.in_flight == 1, "the first request")
        outcome = await generate(client, make_request(make_prompt(300, 1), 3))
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.KV_FULL)
        assert outcome.retry_after_s > 0
        await end(stack, [live])


@pytest.mark.parametrize("way", ["field", "metadata", "both", "many", "engine"])
async def test_a_pin_is_honoured_whatever_the_load(protocol, way):
    async with running_gateway(protocol, ranks=4) as stack:
        for rank in range(4):
            metadata = (("x-data-parallel-rank", str(rank)),) if way in ("metadata", "both") else None
            pin = {} if way == "metadata" else {"data_parallel_rank": rank}
            for _ in range(3):
                if way == "many":
                    async with many_stream(stack.client()) as many:
                        outcome = await many.start(make_request(**pin))
                elif way == "engine":
                    call = stack.engine_client().Generate(engine_request(protocol, **pin))
                    assert [response async for response in call][-1].complete.output_ids == expected([1, 2, 3], 4)
                    assert dict(await call.trailing_metadata())["x-rankgate-rank"] == str(rank)
                    continue
                else:
                    outcome = await generate(stack.client(), make_request(**pin), metadata=metadata)
                assert outcome.finish.rank == rank
        assert [rank.records.adds for rank in stack.ranks] == [3, 3, 3, 3]


@pytest.mark.parametrize("pin", [-1, 4, 2**31 - 1, -(2**31)])
async def test_a_pin_out_of_range_is_refused_with_the_range(protocol, pin):
    async with running_gateway(protocol, ranks=4) as stack:
        client = stack.client()
        async with many_stream(client) as many:
            outcomes = [
                await generate(client, make_request(data_parallel_rank=pin)),
                await generate(client, make_request(), metadata=(("x-data-parallel-rank", str(pin)),)),
                await many.start(make_request(data_parallel_rank=pin)),
            ]
        for outcome in outcomes:
            assert (outcome.code, outcome.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_RANK)
            assert (outcome.facts["valid_min"], outcome.facts["valid_max"]) == ("0", "3")
        assert not any(rank.records.adds for rank in stack.ranks)


@pytest.mark.parametrize("text", ["x", "", "1.0", "0x1", "1 2", "99999999999"])
async def test_a_pin_in_metadata_must_be_a_number_of_a_rank(text):
    async with running_gateway("vllm", ranks=4) as stack:
        outcome = await generate(stack.client(), make_request(), metadata=(("x-data-parallel-rank", text),))
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_RANK)
        assert outcome.facts["valid_max"] == "3"


async def test_pins_that_disagree_are_refused(protocol):
    async with running_gateway(protocol, ranks=4) as stack:
        metadata = (("x-data-parallel-rank", "2"),)
        outcome = await generate(stack.client(), make_request(data_parallel_rank=1), metadata=metadata)
        assert outcome.reason == Reason.INVALID_RANK
        outcome = await generate(stack.client(), make_request(), metadata=(*metadata, ("x-data-parallel-rank", "1")))
        assert outcome.reason == Reason.INVALID_RANK


async def test_a_live_id_is_taken_until_its_request_ends(protocol):
    async with running_gateway(protocol, auto_step=False) as stack:
        client = stack.client()
        first = Generation(client, make_request(request_id="mine", data_parallel_rank=0))
        await stack.ranks[0].wait_until(lambda: stack.ranks[0].live_ids)
        (wire_id,) = stack.ranks[0].live_ids
        assert "mine" not in wire_id
        for request, metadata in (
            (make_request(request_id="mine"), None),
            (make_request(), (("x-request-id", "mine"),)),
        ):
            outcome = await generate(client, request, metadata=metadata)
            assert (outcome.code, outcome.reason) == (grpc.StatusCode.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST_ID)
        error, _ = await stream_failure(stack.engine_client().Generate(engine_request(protocol, request_id="mine")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert [rank.records.adds for rank in stack.ranks] == [1, 0]
        await report(stack, 0, [(wire_id, FIRST, "length")], None)
        assert (await first.done()).text == FIRST

        again = Generation(client, make_request(request_id="mine", data_parallel_rank=0))
        await stack.ranks[0].wait_until(lambda: stack.ranks[0].live_ids)
        (other_id,) = stack.ranks[0].live_ids
        assert other_id != wire_id
        await report(stack, 0, [(other_id, FIRST, "length")], None)
        await again.done()


async def test_ids_of_a_shared_stream_are_its_own(protocol):
    async with running_gateway(protocol, auto_step=False) as stack:
        other, other_id = await held(stack, 1)
        async with many_stream(stack.client()) as one, many_stream(stack.client()) as two:
            live = [many.start(make_request(request_id="a", data_parallel_rank=0)) for many in (one, two)]
            await stack.ranks[0].wait_until(lambda: len(stack.ranks[0].live_ids) == 2)
            ids = stack.ranks[0].live_ids
            await report(stack, 0, [(wire_id, FIRST, "length") for wire_id in ids], None)
            for outcome in await asyncio.gather(*live):
                assert outcome.text == FIRST
        await report(stack, 1, [(other_id, FIRST, "length")], None)
        await other.done()


async def test_an_id_that_is_live_on_its_stream_is_refused_there(protocol):
    stub = stub_config(faults=Faults(silent=True))
    async with running_gateway(protocol, stub=stub) as stack, many_stream(stack.client()) as many:
        first_request = make_request(request_id="a")
        first = many.start(first_request)
        await until(lambda: stack.router.live_count == 1, "the first request")
        kept = many.outcome("a")
        # Its error has the same id: the client's book-keeping follows the second one.
        second = await many.start(make_request(request_id="a"))
        assert second.reason == Reason.DUPLICATE_REQUEST_ID
        many.adopt("a", kept, first)
        for rank in stack.ranks:
            rank.set_faults(silent=False)
        (await first).assert_complete(first_request)


async def test_a_rank_with_a_shorter_context_than_the_model_is_not_asked_for_more(protocol):
    short = stub_config(model=Model(vocab_size=VOCAB_SIZE, max_model_len=1_000))
    assert MAX_CONTEXT_TOKENS > 1_000
    async with running_gateway(protocol, stub=short) as stack:
        outcome = await generate(stack.client(), make_request(make_prompt(1_000), 1))
        assert outcome.reason == Reason.PROMPT_TOO_LONG
        assert not any(rank.records.adds for rank in stack.ranks)
        outcome = await generate(stack.client(), make_request(make_prompt(999), 1))
        assert outcome.text == expected(make_prompt(999), 1)

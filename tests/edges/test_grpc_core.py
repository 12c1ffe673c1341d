"""gateway.v1 over the real core: what the scripted driver of the other tests takes for granted."""

import asyncio
import random
import sys

import grpc
import pytest
from google.protobuf import json_format

from gateway.core.events import BatchReceived, DrainStarted, RankLost
from gateway.types import EngineBatch
from gateway.v1 import admin_pb2, gateway_pb2
from tests.support.grpc_core import CountingRanks, serve_core
from tests.support.grpc_edge import error_info, generate_request, info_of, stream_failure, until

HOLD = (CountingRanks.HOLD,)


async def failure(call):
    error, _ = await stream_failure(call)
    return error


async def test_tokens_pins_and_decisions_end_to_end():
    async with serve_core() as core:
        call = core.edge.stub.Generate(generate_request((7, 50), data_parallel_rank=2))
        responses = [response async for response in call]
        assert [token for response in responses for token in response.token_ids] == [51, 52, 53, 54]
        assert responses[-1].finish.rank == 2
        trailing = dict(await call.trailing_metadata())
        assert trailing["x-rankgate-rank"] == "2"
        number = int(trailing["x-rankgate-decision-id"])
        decision = await core.edge.admin.GetDecision(admin_pb2.GetDecisionRequest(decision_id=number))
        rendered = json_format.MessageToDict(decision.decision)
        assert (rendered["id"], rendered["rank"], rendered["pinned_rank"]) == (number, 2, 2)
        latest = await core.edge.admin.ListDecisions(admin_pb2.ListDecisionsRequest())
        assert json_format.MessageToDict(latest.decisions[0]) == rendered


async def test_explain_changes_nothing():
    async with serve_core() as core:
        response = await core.edge.admin.Explain(admin_pb2.ExplainRequest(request=generate_request()))
        decision = json_format.MessageToDict(response.decision)
        assert len(decision["ranks"]) == 4
        assert core.ranks.sent == []
        assert not (await core.edge.admin.ListDecisions(admin_pb2.ListDecisionsRequest())).decisions


@pytest.mark.parametrize(("pin", "metadata"), [(-1, ()), (4, ()), (None, "x"), (None, "-1"), (None, "4"), (0, "1")])
async def test_bad_pins_are_refused_with_the_range_and_reach_no_rank(pin, metadata):
    async with serve_core() as core:
        fields = {} if pin is None else {"data_parallel_rank": pin}
        pairs = (("x-data-parallel-rank", metadata),) if metadata else ()
        error = await failure(core.edge.stub.Generate(generate_request(**fields), metadata=pairs))
        info = error_info(error)
        assert (error.code(), info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_RANK")
        assert (info.metadata["valid_min"], info.metadata["valid_max"]) == ("0", "3")
        assert core.ranks.sent == []


@pytest.mark.parametrize(
    ("request_fields", "code", "reason"),
    [
        ({"prompt": ()}, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ({"prompt": (1,) * 4096, "sampling": {}}, "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
        ({"model": "other"}, "NOT_FOUND", "MODEL_NOT_FOUND"),
        ({"sampling": {"n": 0}}, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ({"sampling": {"n": 2**32 - 1}}, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ({"sampling": {"max_tokens": 0}}, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ({"sampling": {"temperature": float("nan")}}, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ({"request_id": "x" * 257}, "INVALID_ARGUMENT", "INVALID_REQUEST"),
    ],
)
async def test_what_the_core_refuses_has_its_status(request_fields, code, reason):
    async with serve_core() as core:
        error = await failure(core.edge.stub.Generate(generate_request(**request_fields)))
        assert (error.code().name, error_info(error).reason) == (code, reason)
        assert core.ranks.sent == []


async def test_refusals_that_can_pass_say_when_to_retry():
    async with serve_core(ready=0) as core:
        error = await failure(core.edge.stub.Generate(generate_request()))
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ELIGIBLE_RANK")
        assert error_info(error).metadata["retryable"] == "true"
        error = await failure(core.edge.stub.Generate(generate_request(data_parallel_rank=1)))
        assert (error.code(), error_info(error).reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "PINNED_RANK_UNAVAILABLE",
        )


async def test_a_default_deadline_ends_a_call_that_brought_none():
    async with serve_core(limits={"default_deadline_s": 0.05}) as core:
        error = await failure(core.edge.stub.Generate(generate_request(HOLD)))
        assert (error.code(), error_info(error).reason) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DEADLINE_EXCEEDED",
        )
        assert len(core.ranks.aborted) == 1


async def test_cancel_deadline_abort_and_disconnect_reach_the_rank():
    async with serve_core() as core:
        stub = core.edge.stub
        cancelled = stub.Generate(generate_request(HOLD, request_id="cancelled"))
        late = stub.Generate(generate_request(HOLD, request_id="late"), timeout=0.2)
        aborted = stub.Generate(generate_request(HOLD, request_id="aborted", sampling={"n": 3, "max_tokens": 4}))
        async with grpc.aio.insecure_channel(core.edge.servers.grpc_address) as channel:
            method = channel.unary_stream("/gateway.v1.GatewayService/Generate")
            dropped = method(generate_request(HOLD, request_id="dropped").SerializeToString())
            await until(lambda: len(core.ranks.sent) == 6)
        cancelled.cancel()
        await stub.Abort(gateway_pb2.AbortRequest(request_id="aborted"))
        assert (await failure(aborted)).code() is grpc.StatusCode.ABORTED
        assert (await failure(late)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(core.ranks.aborted) == 6)
        sent = sorted((rank, request.wire_id) for rank, request in core.ranks.sent)
        assert sorted(core.ranks.aborted) == sent
        ended = {outcome: count for outcome, count in core.router.counters.ended.items() if count}
        assert ended == {"ABORTED": 1, "CANCELLED": 2, "DEADLINE_EXCEEDED": 1}
        del dropped


async def test_a_lost_rank_ends_its_streams_and_shows_in_lists_and_watches():
    async with serve_core() as core:
        stub = core.edge.stub
        watch = stub.WatchRanks(gateway_pb2.WatchRanksRequest())
        states = [gateway_pb2.RankState.Name(rank.state) for rank in (await watch.read()).ranks]
        assert states == ["RANK_STATE_READY"] * 4
        call = stub.Generate(generate_request(HOLD, data_parallel_rank=0))
        await until(lambda: core.ranks.sent)
        listed = (await stub.ListRanks(gateway_pb2.ListRanksRequest())).ranks
        assert [rank.in_flight for rank in listed] == [1, 0, 0, 0]
        assert not listed[0].HasField("reported_running")
        core.ranks.live.clear()
        core.driver.emit(RankLost(rank=0, incarnation=1, cause="test"))
        error = await failure(call)
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "RANK_LOST")
        while (await watch.read()).ranks[0].state != gateway_pb2.RANK_STATE_LOST:
            pass
        watch.cancel()


async def test_a_slow_reader_is_ended_by_the_cores_own_bound():
    async with serve_core(
        model={"name": "m", "max_context_tokens": 4_000_000, "vocab_size": 4_000_000},
        limits={"max_stream_buffer_bytes": 100_000},
        tokens_per_turn=1000,
    ) as core:
        slow = core.edge.stub.Generate(generate_request((5,), sampling={"max_tokens": 3_000_000}))
        await until(lambda: core.router.counters.ended.get("SLOW_READER"))
        assert not core.ranks.live
        quick = core.edge.stub.Generate(generate_request((5,), sampling={"max_tokens": 2000}))
        assert sum([len(response.token_ids) async for response in quick]) == 2000
        error = await failure(slow)
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")


async def test_generate_many_balances_and_drains():
    async with serve_core() as core:
        call = core.edge.stub.GenerateMany()
        for number in range(64):
            await call.write(gateway_pb2.GenerateManyRequest(start=generate_request(HOLD, request_id=f"r{number}")))
        await until(lambda: len(core.ranks.sent) == 64)
        assert core.router.ranks.in_flight == [16] * 4
        core.driver.emit(DrainStarted())
        await call.write(gateway_pb2.GenerateManyRequest(start=generate_request(request_id="late")))
        message = await call.read()
        assert [(e.request_id, info_of(e.status).reason) for e in message.errors] == [("late", "DRAINING")]
        for number in range(64):
            await call.write(gateway_pb2.GenerateManyRequest(abort_request_id=f"r{number}"))
        await call.done_writing()
        aborted = set()
        while (message := await call.read()) is not grpc.aio.EOF:
            aborted |= {error.request_id for error in message.errors}
        assert len(aborted) == 64


class TestScheduling:
    """What the client sees of queue, order and cache."""

    GREEDY = {"max_tokens": 3, "temperature": 0.0}

    async def answer(self, core, request, **more):
        call = core.edge.stub.Generate(request, **more)
        responses = [response async for response in call]
        return responses, dict(await call.trailing_metadata())

    async def test_a_stored_answer_is_the_same_without_a_rank(self):
        async with serve_core(response_cache={}) as core:
            request = generate_request((5,), sampling=self.GREEDY)
            first, trailing = await self.answer(core, request)
            assert "x-rankgate-cache" not in trailing
            second, trailing = await self.answer(core, request)
            assert (trailing["x-rankgate-cache"], "x-rankgate-rank" in trailing) == ("hit", False)
            assert [t for r in second for t in r.token_ids] == [t for r in first for t in r.token_ids] == [6, 7, 8]
            assert first[-1].finish.HasField("rank")
            assert not second[-1].finish.HasField("rank")
            assert (second[-1].finish.attempts, second[-1].finish.completion_tokens) == (0, 3)
            assert len(core.ranks.sent) == 1

    async def test_a_salt_another_tenant_and_no_cache_ask_a_rank(self):
        async with serve_core(response_cache={}) as core:
            request = generate_request((5,), sampling=self.GREEDY)
            await self.answer(core, request)
            for key in ("x-cache-salt", "x-tenant-id"):
                _, trailing = await self.answer(core, request, metadata=((key, "other"),))
                assert "x-rankgate-cache" not in trailing
            _, trailing = await self.answer(core, generate_request((5,), sampling=self.GREEDY, no_cache=True))
            assert "x-rankgate-cache" not in trailing
            assert len(core.ranks.sent) == 4

    async def test_a_flush_is_counted_and_felt(self):
        async with serve_core(response_cache={}) as core:
            request = generate_request((5,), sampling=self.GREEDY)
            await self.answer(core, request)
            flushed = await core.edge.admin.FlushResponseCache(admin_pb2.FlushResponseCacheRequest())
            assert (flushed.enabled, flushed.entries) == (True, 1)
            assert flushed.bytes > 0
            _, trailing = await self.answer(core, request)
            assert "x-rankgate-cache" not in trailing

    async def test_a_wait_in_the_queue_is_told_and_bounded_by_the_call(self):
        queue = {"max_in_flight_per_rank": 1}
        async with serve_core(ranks=1, scheduling={"mode": "queue", "queue": queue | {"timeout_s": 30}}) as core:
            first = core.edge.stub.Generate(generate_request(HOLD, request_id="first"))
            await until(lambda: core.ranks.sent)
            late = core.edge.stub.Generate(generate_request((5,)), metadata=(("x-queue-timeout-ms", "60"),))
            error = await failure(late)
            assert (error.code(), error_info(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
            trailing = dict(error.trailing_metadata())
            assert float(trailing["x-rankgate-queue-ms"]) >= 60
            assert "x-rankgate-rank" not in trailing
            waiting = core.edge.stub.Generate(generate_request((5,)))
            await until(lambda: core.router.queue_depth == 1)
            first.cancel()
            assert [token async for response in waiting for token in response.token_ids] == [6, 7, 8, 9]
            assert float(dict(await waiting.trailing_metadata())["x-rankgate-queue-ms"]) > 0
            assert len(core.ranks.sent) == 2

    async def test_a_preserved_order_holds_on_the_wire_errors_included(self):
        async with serve_core(ordering="preserve", preserve={"domain": "stream"}) as core:
            call = core.edge.stub.GenerateMany()
            prompts = {"a": HOLD, "b": (5,), "c": HOLD, "d": (6,)}
            for name, prompt in prompts.items():
                await call.write(gateway_pb2.GenerateManyRequest(start=generate_request(prompt, request_id=name)))
            await until(lambda: len(core.ranks.sent) == 4)
            by_prompt = [request for _, request in core.ranks.sent]
            rank, incarnation, _, _ = core.ranks.live[by_prompt[2].wire_id]
            await until(lambda: len(core.ranks.live) == 2)
            core.driver.emit(self.final(rank, incarnation, by_prompt[2].wire_id, [], "error"))
            rank, incarnation, _, _ = core.ranks.live[by_prompt[0].wire_id]
            core.driver.emit(self.final(rank, incarnation, by_prompt[0].wire_id, [1], "stop"))
            core.ranks.live.clear()
            await call.done_writing()
            seen = []
            while (message := await call.read()) is not grpc.aio.EOF:
                seen += [(output.request_id, list(output.token_ids)) for output in message.outputs]
                seen += [(error.request_id, info_of(error.status).reason) for error in message.errors]
            assert seen == [("a", [1]), ("b", [6, 7, 8, 9]), ("c", "ENGINE_ERROR"), ("d", [7, 8, 9, 10])]

    def final(self, rank, incarnation, wire_id, tokens, finish):
        return BatchReceived(rank, incarnation, EngineBatch(ids=[wire_id], token_ids=[tokens], finish=[finish]))

    async def test_explain_shows_the_gates_of_a_queue(self):
        async with serve_core(scheduling={"mode": "queue"}) as core:
            response = await core.edge.admin.Explain(admin_pb2.ExplainRequest(request=generate_request()))
            decision = json_format.MessageToDict(response.decision)
            assert decision["rank"] is not None
            assert core.ranks.sent == []


CLIENT = """
import sys, grpc
generate = grpc.insecure_channel(sys.argv[1]).unary_stream("/gateway.v1.GatewayService/Generate")
calls = [
    generate(bytes.fromhex(request), metadata=[("x-request-id", f"killed-{number}")])
    for number, request in enumerate(sys.argv[2:])
]
for call in calls:
    call.initial_metadata()
print("streaming", flush=True)
for call in calls:
    list(call)
"""


async def test_a_killed_client_leaves_nothing(capsys):
    flowing = generate_request((5,), sampling={"max_tokens": 4000, "n": 2}).SerializeToString().hex()
    held = generate_request(HOLD).SerializeToString().hex()
    async with serve_core(model={"name": "m", "max_context_tokens": 5000, "vocab_size": 32000}) as core:
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CLIENT, core.edge.servers.grpc_address, *[flowing] * 4, *[held] * 4),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert await client.stdout.readline() == b"streaming\n"
        client.kill()
        await client.communicate()
        await until(lambda: core.router.live_count == 0)
        core.assert_quiet()
        assert core.router.counters.ended["CANCELLED"] >= 4
    assert "rpc_failed" not in capsys.readouterr().out


async def test_random_cancels_leave_the_core_the_ranks_and_the_loop_clean():
    rng = random.Random(3)
    before = len(asyncio.all_tasks())

    async def single(core):
        sampling = {"max_tokens": 20, "n": rng.choice([1, 1, 3])}
        call = core.edge.stub.Generate(generate_request(rng.choice([(5,), HOLD]), sampling=sampling), timeout=5)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        call.cancel()

    async def many(core):
        call = core.edge.stub.GenerateMany()
        for number in range(rng.randrange(5)):
            request = generate_request(rng.choice([(5,), HOLD]), request_id=f"r{number}")
            await call.write(gateway_pb2.GenerateManyRequest(start=request))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        call.cancel()

    async with serve_core() as core:
        for _ in range(10):
            await asyncio.gather(*(rng.choice([single, many])(core) for _ in range(20)), return_exceptions=True)
        await until(lambda: core.router.live_count == 0)
        core.assert_quiet()
    await until(lambda: len(asyncio.all_tasks()) <= before)

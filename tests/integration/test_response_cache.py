"""The response cache over real sockets: a hit is what a rank had generated, and identical requests cost one."""

import asyncio

import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.faults import Faults
from gateway.core.errors import Reason
from gateway.v1 import admin_pb2, gateway_pb2
from tests.support.calls import Generation, Many, engine_request, generate, make_prompt, make_request, many_stream
from tests.support.stack import expected, running_gateway, stub_config, until

CACHE = {"response_cache": {"max_bytes": 10_000_000}}
SHARED = {"response_cache": {"max_bytes": 10_000_000, "coalesce": True}}
GREEDY = {"temperature": 0.0}
TICKING = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=2.0))
MODES = {"direct": {}, "queue": {"scheduling": {"mode": "queue"}}, "batch": {"scheduling": {"mode": "batch"}}}


def adds(stack):
    return sum(rank.records.adds for rank in stack.ranks)


def greedy(number=1, max_tokens=8, **fields):
    return make_request(make_prompt(12, number), max_tokens, sampling=GREEDY | fields.pop("sampling", {}), **fields)


def assert_same(hit, miss):
    """The same answer, but for what says that no rank made it."""
    assert hit.status is None
    assert hit.tokens == miss.tokens
    assert hit.logprobs == miss.logprobs
    assert hit.finishes.keys() == miss.finishes.keys()
    for index, finish in hit.finishes.items():
        other = miss.finishes[index]
        for field in ("reason", "prompt_tokens", "completion_tokens", "cached_tokens"):
            assert getattr(finish, field) == getattr(other, field), field
        assert not finish.HasField("rank")
        assert finish.attempts == 0
        assert other.HasField("rank")


# --- hits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_hit_is_the_generated_answer(protocol, mode):
    """Tokens, log probabilities, finish and usage, of every sequence."""
    alternatives = 2 if protocol == "vllm" else 0
    async with running_gateway(protocol, **CACHE, **MODES[mode]) as stack:
        client = stack.client()
        requests = [
            greedy(1),
            greedy(2, sampling={"n": 3}),
            greedy(3, max_tokens=300),
            greedy(4, sampling={"logprobs": alternatives}),
            greedy(5, sampling={"logprobs": alternatives, "n": 2}),
            make_request(make_prompt(12, 6), 20, sampling={"seed": 7, "n": 2, "temperature": 0.8}),
        ]
        for request in requests:
            before = adds(stack)
            miss = await generate(client, request)
            hits = [await generate(client, request) for _ in range(2)]
            miss.assert_complete(request)
            assert adds(stack) == before + max(1, request.sampling.n)
            assert "x-rankgate-cache" not in miss.trailing
            if request.sampling.HasField("logprobs"):
                assert len(miss.logprobs[0]) == 8
            for hit in hits:
                assert_same(hit, miss)
                assert hit.trailing["x-rankgate-cache"] == "hit"
                assert not {"x-rankgate-rank", "x-rankgate-decision-id"} & hit.trailing.keys()
        cache = stack.router.response_cache
        assert (cache.entries, cache.hits, cache.misses) == (6, 12, 6)
        cached = [entry.get("cached") for entry in stack.logged("request_ended")]
        assert cached == [None, True, True] * 6


async def test_a_stop_is_stored_as_one(protocol):
    async with running_gateway(protocol, **CACHE) as stack:
        client = stack.client()
        stop = expected(make_prompt(12, 1), 5)[4]
        request = greedy(1, max_tokens=50, sampling={"stop_token_ids": [stop]})
        miss, hit = [await generate(client, request) for _ in range(2)]
        assert miss.finish.reason == gateway_pb2.FINISH_REASON_STOP
        assert len(miss.text) <= 5
        assert_same(hit, miss)


async def test_a_hit_on_a_shared_stream_and_by_the_standard_service(protocol):
    async with running_gateway(protocol, **CACHE) as stack:
        request = greedy(1, max_tokens=6)
        miss = await generate(stack.client(), request)
        async with many_stream(stack.client()) as many:
            assert_same(await many.start(greedy(1, max_tokens=6)), miss)
        engine = stack.engine_client()
        # Its defaults differ from gateway.v1's, so it may be an entry of its own: the second one hits at the latest.
        for is_stream in (True, True, False):
            call = engine.Generate(
                engine_request(protocol, make_prompt(12, 1), 6, stream=is_stream, sampling={"temperature": 0.0})
            )
            responses = [response async for response in call]
            assert list(responses[-1].complete.output_ids) == expected(make_prompt(12, 1), 6)
            assert responses[-1].complete.completion_tokens == 6
        assert dict(await call.trailing_metadata())["x-rankgate-cache"] == "hit"
        assert adds(stack) <= 2


OTHERS = {
    "another prompt": (greedy(2), ()),
    "another limit": (greedy(1, max_tokens=9), ()),
    "another n": (greedy(1, sampling={"n": 2}), ()),
    "another penalty": (greedy(1, sampling={"repetition_penalty": 1.1}), ()),
    "another salt": (greedy(1), (("x-cache-salt", "s"),)),
    "another tenant": (greedy(1), (("x-tenant-id", "t"),)),
    "no cache": (greedy(1, no_cache=True), ()),
    "a pin": (greedy(1, data_parallel_rank=0), ()),
}


@pytest.mark.parametrize("case", OTHERS)
async def test_what_differs_is_generated(protocol, case):
    other, metadata = OTHERS[case]
    async with running_gateway(protocol, **CACHE) as stack:
        client = stack.client()
        await generate(client, greedy(1))
        before = adds(stack)
        for _ in range(2):
            assert (await generate(client, other, metadata=metadata)).status is None
        is_storable = case not in ("no cache", "a pin")
        assert adds(stack) == before + (1 if is_storable else 2) * max(1, other.sampling.n)
        # Nor has it changed what the first one hits.
        assert (await generate(client, greedy(1))).trailing["x-rankgate-cache"] == "hit"


async def test_sampled_answers_and_failed_ones_are_not_stored(protocol):
    async with running_gateway(protocol, ranks=1, stub=TICKING, **CACHE) as stack:
        client = stack.client()
        for _ in range(2):
            assert (
                await generate(client, make_request(make_prompt(12), 4, sampling={"temperature": 1.0}))
            ).status is None
        cancelled = Generation(client, greedy(1, max_tokens=5_000))
        await cancelled.first_token()
        cancelled.call.cancel()
        await cancelled.done()
        lost = Generation(client, greedy(2, max_tokens=5_000))
        await lost.first_token()
        await stack.ranks[0].kill()
        assert (await lost.done()).reason is Reason.RANK_LOST
        cache = stack.router.response_cache
        assert (cache.entries, cache.hits, cache.inserts) == (0, 0, 0)
        await stack.ranks[0].restart()
        await stack.all_ready()


async def test_a_flush_forgets_what_is_stored_and_no_more(protocol):
    async with running_gateway(protocol, **CACHE) as stack:
        client = stack.client()
        for number in range(5):
            await generate(client, greedy(number))
        flushed = await stack.admin().FlushResponseCache(admin_pb2.FlushResponseCacheRequest())
        assert (flushed.enabled, flushed.entries) == (True, 5)
        assert flushed.bytes > 5 * 8 * 4
        before = adds(stack)
        for expected_hits in (0, 1):
            assert (await generate(client, greedy(0))).status is None
            assert stack.router.response_cache.hits == expected_hits
        assert adds(stack) == before + 1


# --- one for all ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_twenty_identical_ones_at_once_cost_one(protocol, mode):
    async with running_gateway(protocol, stub=TICKING, **SHARED, **MODES[mode]) as stack:
        clients = [stack.client() for _ in range(3)]
        alternatives = 1 if protocol == "vllm" else 0

        def request():
            return greedy(1, max_tokens=30, sampling={"n": 2, "logprobs": alternatives})

        async with many_stream(clients[0]) as many:
            starts = [many.start(request()) if n % 4 == 0 else generate(clients[n % 3], request()) for n in range(20)]
            outcomes = await asyncio.gather(*starts)
        (leader,) = [outcome for outcome in outcomes if outcome.finishes[0].attempts]
        leader.assert_complete(request())
        for outcome in outcomes:
            if outcome is not leader:
                assert_same(outcome, leader)
        assert adds(stack) == 2, "its two sequences"
        counters = stack.router.counters
        assert (counters.accepted, counters.ended["OK"]) == (20, 20)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["cancel", "abort", "rank lost"])
async def test_when_the_first_one_ends_the_others_are_served_all_the_same(protocol, mode, end):
    # Or a lost rank would not end it.
    failure = {"reroute": False, "resume": False}
    async with running_gateway(protocol, stub=TICKING, failure=failure, **SHARED, **MODES[mode]) as stack:
        client = stack.client()
        leader = Generation(client, greedy(1, max_tokens=400, request_id="first"))
        await leader.first_token()
        followers = [Generation(client, greedy(1, max_tokens=400)) for _ in range(8)]
        await until(lambda: stack.router.live_count == 9, "all to be accepted")
        assert adds(stack) == 1
        rank = leader_rank(stack)
        if end == "cancel":
            leader.call.cancel()
        elif end == "abort":
            await client.Abort(gateway_pb2.AbortRequest(request_id="first"))
        else:
            await stack.ranks[rank].kill()
        assert (await leader.done()).status is not None
        leader.outcome.assert_prefix(leader.request)
        for follower in followers:
            (await follower.done()).assert_complete(follower.request)
        assert adds(stack) == 2, "one of them went, for all of them"
        if end == "rank lost":
            await stack.ranks[rank].restart()
            await stack.all_ready()


async def test_an_answer_that_two_ranks_made_is_shared_and_stored_whole(protocol):
    async with running_gateway(protocol, stub=TICKING, **SHARED) as stack:
        client = stack.client()
        leader = Generation(client, greedy(1, max_tokens=100))
        await leader.first_token()
        follower = Generation(client, greedy(1, max_tokens=100))
        await until(lambda: stack.router.live_count == 2, "both to be accepted")
        rank = leader_rank(stack)
        await stack.ranks[rank].kill()
        (await leader.done()).assert_complete(leader.request)
        assert leader.outcome.finish.attempts == 2
        assert_same(await follower.done(), leader.outcome)
        assert_same(await generate(client, greedy(1, max_tokens=100)), leader.outcome)
        assert adds(stack) == 2, "the first one's, on both ranks"
        await stack.ranks[rank].restart()
        await stack.all_ready()


def leader_rank(stack):
    (rank,) = [number for number, count in enumerate(stack.table.in_flight) if count]
    return rank


async def test_those_that_give_up_waiting_take_nothing_with_them(protocol):
    """A thousand in turn join a long one and leave: nothing of them stays while it runs."""
    async with running_gateway(protocol, ranks=1, stub=stub_config(faults=Faults(silent=True)), **SHARED) as stack:
        client = stack.client()
        leader = Generation(client, greedy(1))
        await until(lambda: stack.router.live_count == 1, "the first one")
        for _ in range(20):
            many = Many(client)
            futures = [many.start(greedy(1)) for _ in range(50)]
            await until(lambda: stack.router.live_count == 51, "all to be accepted")
            many.call.cancel()
            await asyncio.gather(many.task, return_exceptions=True)
            await until(lambda: stack.router.live_count == 1, "them to be gone")
            for future in futures:
                future.cancel()
        assert sum(map(len, stack.router._answers._followers.values())) == 0
        kept = Generation(client, greedy(1))
        await until(lambda: stack.router.live_count == 2, "one that stays")
        stack.ranks[0].set_faults(silent=False)
        (await leader.done()).assert_complete(leader.request)
        assert_same(await kept.done(), leader.outcome)
        assert adds(stack) == 1

"""Budgets over real sockets: never exceeded, whatever comes; refused requests cost nothing and are told what to do."""

import asyncio
import random
from collections import Counter

import grpc
import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.faults import Faults
from gateway.core.errors import Reason
from tests.support.calls import Generation, engine_request, generate, make_prompt, make_request, many_stream
from tests.support.grpc_edge import error_info, stream_failure
from tests.support.stack import running_gateway, stub_config, until

TICKING = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=3.0))
TRANSIENT = (Reason.GATEWAY_FULL, Reason.TENANT_LIMIT, Reason.QUEUE_FULL, Reason.RANKS_FULL, Reason.QUEUE_TIMEOUT)
SCHEDULING = {
    "direct": {},
    "queue": {"scheduling": {"mode": "queue", "queue": {"max_in_flight_per_rank": 4}}},
    "batch": {
        "scheduling": {
            "mode": "batch",
            "queue": {"max_in_flight_per_rank": 6},
            "batch": {"max_requests": 4, "release_at": "finish"},
        }
    },
}


def silent():
    return stub_config(faults=Faults(silent=True))


def tenant(name):
    return (("x-tenant-id", name),)


# --- each limit, set to 1, can be seen ------------------------------------------------------


ONE = {
    "max_in_flight": ("direct", {"max_in_flight": 1}, {}, Reason.GATEWAY_FULL, "sequences"),
    "max_prompt_tokens": ("direct", {"max_prompt_tokens": 1}, {}, Reason.GATEWAY_FULL, "prompt_tokens"),
    "max_kv_tokens": ("direct", {"max_kv_tokens": 2}, {}, Reason.GATEWAY_FULL, "kv_tokens"),
    "max_in_flight_per_rank": ("direct", {"max_in_flight_per_rank": 1}, {}, Reason.RANKS_FULL, None),
    "max_queue_depth": ("queue", {"max_queue_depth": 1}, {}, Reason.QUEUE_FULL, None),
    "tenant max_in_flight": ("direct", {}, {"max_in_flight": 1}, Reason.TENANT_LIMIT, "sequences"),
    "tenant max_prompt_tokens": ("direct", {}, {"max_prompt_tokens": 1}, Reason.TENANT_LIMIT, "prompt_tokens"),
    "tenant max_kv_tokens": ("direct", {}, {"max_kv_tokens": 2}, Reason.TENANT_LIMIT, "kv_tokens"),
    "tenant max_queue_depth": ("queue", {}, {"max_queue_depth": 1}, Reason.TENANT_LIMIT, "queue_depth"),
}
"""Mode, settings of `admission`, of the tenant; the reason and the budget that it names."""


@pytest.mark.parametrize("limit", ONE)
async def test_a_limit_of_one_is_one(protocol, limit):
    mode, admission, settings, reason, budget = ONE[limit]
    admission = admission | {"tenants": {"named": {"t": settings}}}
    scheduling = {} if mode == "direct" else {"scheduling": {"mode": "queue", "queue": {"max_in_flight_per_rank": 1}}}
    async with running_gateway(protocol, ranks=1, stub=silent(), admission=admission, **scheduling) as stack:
        client = stack.client()

        def call():
            return Generation(client, make_request([5], 1), metadata=tenant("t"))

        held = []
        for count in range(1, 2 + (mode == "queue")):
            held.append(call())
            await until(lambda count=count: stack.router.live_count == count, "the held ones")
        refused = await call().done()
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        assert refused.facts.get("budget") == budget
        assert refused.facts["retryable"] == "true"
        assert 0 < refused.retry_after_s <= 5
        async with many_stream(client) as many:
            if reason is not Reason.TENANT_LIMIT:
                assert (await many.start(make_request([5], 1))).reason == reason
        error, _ = await stream_failure(
            stack.engine_client().Generate(engine_request(protocol, [5], 1), metadata=tenant("t"))
        )
        assert error_info(error).reason == reason
        stack.ranks[0].set_faults(silent=False)
        for each in held:
            (await each.done()).assert_complete(each.request)
        following = call()
        (await following.done()).assert_complete(following.request)


# --- under load -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SCHEDULING)
async def test_budgets_hold_at_every_moment_and_are_empty_at_the_end(protocol, mode):
    """Four tenants, up to three sequences a request, a third of the calls given up at any point."""
    limits = {"max_in_flight": 40, "max_prompt_tokens": 900, "max_kv_tokens": 1500, "max_queue_depth": 20}
    admission = limits | {"tenants": {"named": {"small": {"max_in_flight": 4, "max_queue_depth": 3}}}}
    source = random.Random(5)
    async with running_gateway(protocol, ranks=2, stub=TICKING, admission=admission, **SCHEDULING[mode]) as stack:
        clients = [stack.client() for _ in range(4)]
        budgets, router = stack.router._admission, stack.router
        outcomes = Counter()
        peak = Counter()
        is_over = asyncio.Event()

        async def watch():
            while not is_over.is_set():
                peak["sequences"] = max(peak["sequences"], budgets.sequences)
                peak["queued"] = max(peak["queued"], router.queue_depth)
                assert budgets.sequences <= 40
                assert budgets.prompt_tokens <= 900
                assert budgets.kv_tokens <= 1500
                assert router.queue_depth <= 20
                for account in budgets.tenants.active():
                    assert account.name != "small" or (account.in_flight <= 4 and account.queued <= 3)
                await asyncio.sleep(0)

        async def one(number):
            await asyncio.sleep(source.uniform(0, 1.5))
            prompt = make_prompt(source.randrange(1, 60), number)
            request = make_request(prompt, source.randrange(1, 40), sampling={"n": source.choice((1, 1, 2, 3))})
            name = ("small", "b", "c", "")[number % 4]
            call = Generation(clients[number % 4], request, metadata=tenant(name) if name else None)
            if number % 3 == 0:
                await asyncio.sleep(source.uniform(0, 0.05))
                call.call.cancel()
            outcome = await call.done()
            outcomes[outcome.reason or outcome.code.name] += 1
            if outcome.status is None:
                outcome.assert_complete(request)
            elif outcome.reason is not None:
                assert outcome.reason in TRANSIENT
                assert (outcome.facts["retryable"], outcome.messages) == ("true", 0)
                assert 0 < outcome.retry_after_s <= 5

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(one(number) for number in range(800)))
        is_over.set()
        await watching
        assert outcomes["OK"] > 50, outcomes
        assert outcomes["CANCELLED"] > 20, outcomes
        assert outcomes[Reason.TENANT_LIMIT] > 10, outcomes
        assert sum(router.counters.refused.values()) >= sum(outcomes[reason] for reason in TRANSIENT)
        assert peak["sequences"] >= 10
        assert (peak["queued"] > 3) == (mode != "direct")


@pytest.mark.parametrize("mode", ["queue", "batch"])
async def test_a_thousand_at_once_fill_the_queue_and_no_more(protocol, mode):
    """What is refused is refused at once and says how deep the queue was; what is accepted is served."""
    settings = {"admission": {"max_queue_depth": 50}} | SCHEDULING[mode]
    async with running_gateway(protocol, ranks=2, stub=silent(), **settings) as stack:
        requests = [make_request(make_prompt(10, number), 10) for number in range(1000)]
        async with many_stream(stack.client()) as many:
            futures = [many.start(request) for request in requests]
            await until(lambda: stack.router.queue_depth == 50, "the queue to be full")
            in_flight = stack.router.in_flight
            accepted = in_flight + 50
            await until(lambda: sum(future.done() for future in futures) == 1000 - accepted, "the rest to be refused")
            for rank in stack.ranks:
                rank.set_faults(silent=False)
            outcomes = await asyncio.gather(*futures)
        # First come, first served: with ranks that hold still, it is the first ones that got in.
        for request, outcome in list(zip(requests, outcomes, strict=True))[:accepted]:
            outcome.assert_complete(request)
        for outcome in outcomes[accepted:]:
            assert outcome.reason is Reason.QUEUE_FULL
            assert outcome.facts["queue_depth"] == outcome.facts["limit"] == "50"
            assert 0 < outcome.retry_after_s <= 5
        assert 2 <= in_flight <= 12
        assert stack.router.counters.refused == {Reason.QUEUE_FULL: 1000 - accepted}


async def test_an_id_is_refused_for_a_while_after_its_end(protocol):
    async with running_gateway(protocol, admission={"id_reuse_after_s": 0.4}) as stack:
        client = stack.client()
        for outcome_of_first in ("served", "cancelled"):
            request = make_request(
                max_tokens=2 if outcome_of_first == "served" else 10_000, request_id=outcome_of_first
            )
            first = Generation(client, request)
            if outcome_of_first == "cancelled":
                await first.first_token()
                first.call.cancel()
            await first.done()
            await until(lambda: not stack.router.live_count, "its end")
            again = make_request(max_tokens=2, request_id=outcome_of_first)
            refused = await generate(client, again)
            assert (refused.code, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST_ID)
            error, _ = await stream_failure(
                stack.engine_client().Generate(engine_request(protocol, request_id=outcome_of_first))
            )
            assert error_info(error).reason == Reason.DUPLICATE_REQUEST_ID
            # A refused one doesn't prolong it.
            await asyncio.sleep(0.5)
            (await generate(client, again)).assert_complete(again)


async def test_a_hint_follows_how_fast_requests_end(protocol):
    """Before anything has ended it is a second; then it is near the real pace."""
    stub = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=2.0))
    async with running_gateway(protocol, ranks=1, stub=stub, admission={"max_in_flight": 4}) as stack:
        client, (rank,) = stack.client(), stack.ranks

        async def hint():
            rank.set_faults(silent=True)
            held = [Generation(client, make_request(max_tokens=10)) for _ in range(4)]
            await until(lambda: stack.router.live_count == 4, "the held ones")
            outcome = await generate(client, make_request())
            rank.set_faults(silent=False)
            for each in held:
                (await each.done()).assert_complete(each.request)
            return outcome.retry_after_s

        assert await hint() == 1.0
        for _ in range(15):
            await asyncio.gather(*(generate(client, make_request(max_tokens=10)) for _ in range(4)))
        # Four at a time take 20 ms or more: one ends every 5 ms and up, and the shortest hint is 50 ms.
        assert await hint() < 0.5

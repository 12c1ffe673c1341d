"""Modes queue and batch over real sockets: every byte arrives, whatever waits, whatever is given up meanwhile.

What every test here is about is checked when its block ends: budgets, queue, batches, charges, live sets, log lines.
"""

import asyncio
import random
from collections import Counter

import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.scheduler.config import SchedulerConfig
from gateway.core.errors import Reason
from gateway.v1 import gateway_pb2
from tests.support.calls import Generation, Many, engine_request, generate, make_prompt, make_request, many_stream
from tests.support.stack import expected, running_gateway, stub_config

REQUESTS = 300
CANCELS = 500
AT_ONCE = 125
TICKING = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=1.0))
"""Ranks that take a millisecond a token, so that there is a middle to cancel in."""

QUEUE = {"scheduling": {"mode": "queue", "queue": {"max_in_flight_per_rank": 3, "gate_tokens": 64}}}
BATCH = {
    "scheduling": {
        "mode": "batch",
        "queue": {"max_in_flight_per_rank": 8, "gate_tokens": 256},
        "batch": {"max_requests": 5, "window_ms": 2.0, "max_tokens": 128},
    }
}
MODES = {"queue": QUEUE, "batch": BATCH}


def any_request(source, number, **fields):
    """Prompts of 1 to 60 tokens, up to 3 sequences, some seeded, of any priority."""
    sampling = {"n": source.choice((1, 1, 1, 2, 3))}
    if number % 3 == 0:
        sampling["seed"] = number
    prompt = make_prompt(source.randrange(1, 60), number)
    return make_request(prompt, source.randrange(1, 30), sampling=sampling, priority=source.randrange(3), **fields)


def assert_batches(stack):
    """Sizes within the bound, some with company, and every dispatched sequence in exactly one."""
    counters = stack.router.counters
    sizes = counters.batch_sizes
    assert max(sizes) <= 5
    assert max(sizes) > 1, sizes
    assert sum(size * count for size, count in sizes.items()) == sum(counters.decisions)
    assert sum(counters.dispatch_reasons.values()) == sum(counters.decisions)
    assert not counters.dispatch_reasons["direct"]


@pytest.mark.parametrize("mode", MODES)
async def test_every_byte_of_every_sequence_arrives(protocol, mode):
    source = random.Random(11)
    async with running_gateway(protocol, ranks=3, stub=TICKING, **MODES[mode]) as stack:
        clients = [stack.client() for _ in range(3)]
        deepest = 0
        async with many_stream(stack.client()) as many:
            requests = [any_request(source, number) for number in range(REQUESTS)]
            futures = [
                many.start(each) if number % 2 else generate(clients[number % 3], each)
                for number, each in enumerate(requests)
            ]
            waiting = asyncio.gather(*futures)
            while not waiting.done():
                deepest = max(deepest, stack.router.queue_depth)
                await asyncio.sleep(0.001)
            for request, outcome in zip(requests, await waiting, strict=True):
                outcome.assert_complete(request)
        assert deepest > 5, "it was the gateway that they waited in"
        assert min(stack.router.counters.decisions) > 0
        if mode == "batch":
            assert_batches(stack)


@pytest.mark.parametrize("mode", MODES)
async def test_the_standard_service_waits_in_the_same_queue(protocol, mode):
    scheduling = MODES[mode]["scheduling"]
    scheduling = scheduling | {"queue": scheduling["queue"] | {"hold_until_queued": 30}}
    async with running_gateway(protocol, ranks=1, stub=TICKING, scheduling=scheduling) as stack:
        client = stack.engine_client()
        prompts = [make_prompt(20, number) for number in range(30)]

        async def one(prompt, *, is_stream):
            call = client.Generate(engine_request(protocol, prompt, 7, stream=is_stream))
            responses = [response async for response in call]
            if is_stream:
                chunks = [each.chunk.token_ids for each in responses if each.WhichOneof("response") == "chunk"]
                assert [token for tokens in chunks for token in tokens] == expected(prompt, 7)
            assert list(responses[-1].complete.output_ids) == expected(prompt, 7)
            return float(dict(await call.trailing_metadata())["x-rankgate-queue-ms"])

        waits = await asyncio.gather(*(one(prompt, is_stream=n % 2 == 0) for n, prompt in enumerate(prompts)))
        assert max(waits) > min(waits) >= 0
        assert sum(wait > 0 for wait in waits) >= 29, "all but the one that filled the queue waited"


async def give_up(client, generation, source, number):
    """End one call in one of the ways that a client has, at any point of its way; or let it go on."""
    way = number % 8
    if way < 3:
        await asyncio.sleep(source.uniform(0, 0.15))
        generation.call.cancel()
    elif way == 3:
        for _ in range(source.randrange(60)):
            await asyncio.sleep(0)
        generation.call.cancel()
    elif way == 4:
        await generation.first_token()
        generation.call.cancel()
    elif way == 5:
        await asyncio.sleep(source.uniform(0, 0.15))
        await client.Abort(gateway_pb2.AbortRequest(request_id=generation.request.request_id))


@pytest.mark.parametrize("mode", MODES)
async def test_five_hundred_that_give_up_leave_nothing(protocol, mode):
    """Way 6 has a deadline, 7 a short time-out in the queue; ways 0 to 5 would run for long."""
    source = random.Random(12)
    async with running_gateway(protocol, ranks=2, stub=TICKING, **MODES[mode]) as stack:
        clients = [stack.client() for _ in range(4)]
        ended = Counter()
        never_dispatched = 0

        async def one(number):
            nonlocal never_dispatched
            way = number % 8
            client, options = clients[number % 4], {}
            request = any_request(source, number, request_id=f"c-{number}")
            if way < 6:
                request.sampling.max_tokens = 10_000
            if way == 6:
                options["timeout"] = source.uniform(0.005, 0.1)
            elif way == 7:
                options["metadata"] = (("x-queue-timeout-ms", str(source.randrange(50, 300))),)
            generation = Generation(client, request, **options)
            if way == 4:
                request.sampling.max_tokens = 10_000
            await give_up(client, generation, source, number)
            outcome = await generation.done()
            ended[outcome.reason or outcome.code.name] += 1
            never_dispatched += outcome.status is not None and not outcome.tokens
            for index, tokens in outcome.tokens.items():
                seed = request.sampling.seed + index if request.sampling.HasField("seed") else None
                assert tokens == expected(request.prompt_token_ids, len(tokens), seed)
            if outcome.status is None:
                outcome.assert_complete(request)

        for first in range(0, CANCELS, AT_ONCE):
            await asyncio.gather(*(one(number) for number in range(first, first + AT_ONCE)))
        assert sum(ended.values()) == CANCELS
        assert ended["CANCELLED"] > 150, ended
        assert ended[Reason.ABORTED] > 20, ended
        assert ended["DEADLINE_EXCEEDED"] > 20, ended
        assert ended[Reason.QUEUE_TIMEOUT] > 0, ended
        assert never_dispatched > 50, "some were still in the queue"
        assert sum(stack.router.counters.decisions) > 100, "others were not"
        if mode == "batch":
            assert_batches(stack)


@pytest.mark.parametrize("mode", ["direct", "queue"])
async def test_what_waits_waits_here_and_not_in_the_engines(protocol, mode):
    """Ranks with 4 slots, and 15 requests for each rank at once: late binding leaves the order to the gateway."""
    stub = stub_config(
        time_scale=1.0,
        step_time=StepTime(fixed_ms=6.0),
        scheduler=SchedulerConfig(max_active=4, max_prefills_per_tick=4),
    )
    scheduling = {"scheduling": {"mode": "queue"}} if mode == "queue" else {}
    async with running_gateway(protocol, ranks=2, stub=stub, **scheduling) as stack:
        # All of them fit what a rank may hold in mode direct: 4 x 4.
        client = stack.client()
        calls = [Generation(client, make_request(make_prompt(30, number), 40)) for number in range(30)]
        most = 0
        while not all(call.task.done() for call in calls):
            most = max(most, *(rank.engine.scheduler.waiting_count for rank in stack.ranks))
            await asyncio.sleep(0.0005)
        for call in calls:
            call.outcome.assert_complete(call.request)
        # In mode queue a rank never has more than it has slots for, which its next step starts.
        assert (most <= 4) if mode == "queue" else (most > 5), most


async def test_the_order_of_the_queue_is_the_order_at_the_ranks(protocol):
    """Shortest prefill first, of what is there when the first one goes; and priorities before that."""
    queue = {"order": "spf", "fair": False, "max_in_flight_per_rank": 1, "hold_until_queued": 12}
    async with running_gateway(protocol, ranks=1, scheduling={"mode": "queue", "queue": queue}) as stack:
        lengths = [30, 10, 50, 20, 40, 60]
        requests = [
            make_request(make_prompt(length, priority), 2, priority=priority)
            for priority in (1, 0)
            for length in lengths
        ]
        async with many_stream(stack.client()) as many:
            outcomes = await asyncio.gather(*(many.start(request) for request in requests))
        for request, outcome in zip(requests, outcomes, strict=True):
            outcome.assert_complete(request)
        adds = list(stack.ranks[0].received_adds)
        urgent, others = adds[:6], adds[6:]
        assert [len(each.prompt_ids) for each in urgent] == [len(each.prompt_ids) for each in others] == sorted(lengths)
        assert {tuple(each.prompt_ids) for each in urgent} == {tuple(make_prompt(length, 0)) for length in lengths}


async def test_tenants_share_a_backlog_by_weight(protocol):
    """Two tenants with weights 3 and 1 and equal requests: of any 8 in a row, 6 are the first one's."""
    tenants = {"named": {"heavy": {"weight": 3.0}, "light": {"weight": 1.0}}}
    queue = {"order": "fcfs", "max_in_flight_per_rank": 1, "hold_until_queued": 80}
    async with running_gateway(
        protocol, ranks=1, scheduling={"mode": "queue", "queue": queue}, admission={"tenants": tenants}
    ) as stack:
        # The light one comes first, and with as much.
        light, heavy = (Many(stack.client(), metadata=(("x-tenant-id", name),)) for name in ("light", "heavy"))
        prompts = {
            many: [make_prompt(10, number + 100 * (many is heavy)) for number in range(40)] for many in (light, heavy)
        }
        futures = [many.start(make_request(prompt, 3)) for many in (light, heavy) for prompt in prompts[many]]
        for prompt, outcome in zip((*prompts[light], *prompts[heavy]), await asyncio.gather(*futures), strict=True):
            assert outcome.text == expected(prompt, 3)
        await asyncio.gather(light.end(), heavy.end())
        got = [list(each.prompt_ids) for each in stack.ranks[0].received_adds]
        for many in (light, heavy):
            assert [prompt for prompt in got if prompt in prompts[many]] == prompts[many], "each in its own order"
        is_heavy = [prompt in prompts[heavy] for prompt in got]
        # Both have a backlog until the heavy one's is served: 40 of its own among the first 53 or so.
        assert {sum(is_heavy[first : first + 8]) for first in range(44)} <= {5, 6, 7}
        assert 51 <= max(position for position, each in enumerate(is_heavy) if each) <= 55

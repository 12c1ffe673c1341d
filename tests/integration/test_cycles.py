"""Nothing of the gateway waits for the garbage collector: what has ended is freed at once.

Full collections are rare in a running gateway (`gateway.process`), so a cycle is memory that is gone for hours.
"""

import asyncio
import gc
import itertools
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from gateway.core.errors import Reason
from tests.support.calls import Generation, generate, make_prompt, make_request, many_stream
from tests.support.stack import running_gateway, until

GREEDY = {"temperature": 0.0}
ROUNDS = 3
_numbers = itertools.count()


@asynccontextmanager
async def no_cycles():
    """What happens within leaves none. The first time of everything is to lie before."""
    gc.collect()
    gc.disable()
    try:
        yield
        await asyncio.sleep(0.05)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    ours = {name: count for name, count in left.items() if name.startswith("gateway.")}
    assert not ours, f"{ours} among {left}"


async def rank_comes_back(stack):
    moving = [Generation(stack.client(), make_request(make_prompt(4, n), 400, sampling=GREEDY)) for n in range(4)]
    await asyncio.gather(*(generation.first_token() for generation in moving))
    await stack.ranks[1].kill()
    await until(lambda: stack.ready_ranks() == [0], "the loss")
    await stack.ranks[1].restart()
    await stack.all_ready()
    for generation in moving:
        (await generation.done()).assert_complete(generation.request)


async def client_cancels(stack):
    generation = Generation(stack.client(), make_request((5, 6), 4000))
    await generation.first_token()
    generation.call.cancel()
    await generation.done()
    await until(lambda: not stack.router.live_count, "the cancel")


async def deadline_passes(stack):
    outcome = await generate(stack.client(), make_request((5, 6), 4000), timeout=0.05)
    assert outcome.code.name == "DEADLINE_EXCEEDED"


async def requests_are_refused(stack):
    outcomes = [
        await generate(stack.client(), make_request((), 4)),
        await generate(stack.client(), make_request((5,), 4, data_parallel_rank=77)),
        await generate(stack.client(), make_request((10**9,), 4)),
    ]
    assert [outcome.reason for outcome in outcomes] == [
        *(Reason.INVALID_REQUEST, Reason.INVALID_RANK, Reason.INVALID_REQUEST),
    ]


async def rank_is_lost_under_what_cannot_move(stack):
    request = make_request((5, 6), 4000, data_parallel_rank=1)
    generation = Generation(stack.client(), request)
    await generation.first_token()
    await stack.ranks[1].kill()
    assert (await generation.done()).reason is Reason.RANK_LOST
    await stack.ranks[1].restart()
    await stack.all_ready()


async def many_share_a_stream(stack):
    async with many_stream(stack.client()) as many:
        requests = [make_request(make_prompt(4, n), 8) for n in range(4)]
        doomed_id = f"doomed-{next(_numbers)}"
        doomed = many.start(make_request((5, 6), 4000, request_id=doomed_id))
        for request, outcome in zip(requests, await asyncio.gather(*map(many.start, requests)), strict=True):
            outcome.assert_complete(request)
        many.abort(doomed_id)
        await doomed


@pytest.mark.parametrize(
    "step",
    [
        rank_comes_back,
        client_cancels,
        deadline_passes,
        requests_are_refused,
        rank_is_lost_under_what_cannot_move,
        many_share_a_stream,
    ],
)
async def test_what_has_ended_is_freed_at_once(protocol, step):
    async with running_gateway(protocol, ranks=2, failure={"eject": None}) as stack:
        await step(stack)
        async with no_cycles():
            for _ in range(ROUNDS):
                await step(stack)

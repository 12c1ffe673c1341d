"""Even spread without any load report: the gateway's own count of what it sent has to do.

Ranks report nothing and, where a burst is judged, say nothing before its last request has arrived.
"""

import asyncio
import random
from collections import Counter

import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.config import LoadReports
from engine_stub.faults import Faults
from engine_stub.scheduler.config import SchedulerConfig
from tests.support.calls import Generation, Many, make_prompt, make_request, many_stream
from tests.support.stack import Stack, running_gateway, stub_config, until

RANKS = 8
PRESETS = ["lmetric", "smg", "vllm", "least_in_flight"]
NO_REPORTS = LoadReports(snapshot="none")

CHI_SQUARE_LIMIT = 24.322
"""Upper 0.001 point of the chi-square distribution with 7 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.4)."""


def silent_ranks():
    return stub_config(load=NO_REPORTS, faults=Faults(silent=True))


def speak(stack: Stack) -> None:
    for rank in stack.ranks:
        rank.set_faults(silent=False)


async def all_sent(stack: Stack, count: int) -> list[int]:
    """In-flight requests per rank once all of them have reached their ranks."""
    await until(lambda: sum(len(rank.live_ids) for rank in stack.ranks) == count, "the last request to arrive")
    assert sum(stack.router.counters.batches) == 0, "a rank has spoken already"
    in_flight = list(stack.table.in_flight)
    assert in_flight == [len(rank.live_ids) for rank in stack.ranks]
    return in_flight


@pytest.mark.parametrize("preset", PRESETS)
async def test_a_burst_of_equal_requests_is_spread_evenly(protocol, preset):
    policy = {"preset": preset, "seed": 5}
    async with running_gateway(protocol, ranks=RANKS, stub=silent_ranks(), policy=policy) as stack:
        streams = [Many(stack.client()) for _ in range(4)]
        requests = [make_request(make_prompt(20, number), 6) for number in range(512)]
        futures = [streams[number % 4].start(request) for number, request in enumerate(requests)]
        in_flight = await all_sent(stack, 512)
        assert max(in_flight) - min(in_flight) <= 1, in_flight
        speak(stack)
        for request, outcome in zip(requests, await asyncio.gather(*futures), strict=True):
            outcome.assert_complete(request)
        for stream in streams:
            await stream.end()


async def test_tasks_released_by_one_event_are_spread_evenly(protocol):
    async with running_gateway(protocol, ranks=RANKS, stub=silent_ranks()) as stack:
        clients = [stack.client() for _ in range(4)]
        go = asyncio.Event()

        async def run(number):
            await go.wait()
            generation = Generation(clients[number % 4], make_request(make_prompt(20, number), 4))
            (await generation.done()).assert_complete(generation.request)

        tasks = [asyncio.create_task(run(number)) for number in range(200)]
        await asyncio.sleep(0)
        go.set()
        in_flight = await all_sent(stack, 200)
        assert max(in_flight) - min(in_flight) <= 1, in_flight
        speak(stack)
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(("protocol", "preset"), [("vllm", "lmetric"), ("tokenspeed", "smg")])
async def test_one_request_at_a_time_goes_to_every_rank_equally_often(protocol, preset):
    policy = {"preset": preset, "seed": 11}
    async with running_gateway(protocol, ranks=RANKS, stub=stub_config(load=NO_REPORTS), policy=policy) as stack:
        used: Counter[int] = Counter()
        async with many_stream(stack.client()) as many:
            for number in range(1000):
                outcome = await many.start(make_request((1, 2, number), 1))
                used[outcome.finish.rank] += 1
        assert sum(used.values()) == 1000
        fair = 1000 / RANKS
        statistic = sum((used[rank] - fair) ** 2 / fair for rank in range(RANKS))
        assert statistic < CHI_SQUARE_LIMIT, dict(used)


class Sampler:
    """Looks at the ranks every 50 ms; a fault is an idle rank beside one with two requests un-started, twice running."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._was_unfair = False
        self.queued_samples = 0
        self.faults = 0

    async def run(self, samples: int) -> None:
        table = self._stack.table
        for _ in range(samples):
            await asyncio.sleep(0.05)
            has_queue = max(table.in_flight_prefill) >= 2
            has_idle = any(is_open and not count for is_open, count in zip(table.is_open, table.in_flight, strict=True))
            self.queued_samples += has_queue
            self.faults += has_queue and has_idle and self._was_unfair
            self._was_unfair = has_queue and has_idle


async def closed_loop(stack: Stack, clients: int, samples: int) -> Sampler:
    """Clients that send their next request when the last one has ended, until enough samples are taken."""
    source = random.Random(17)
    sampler = Sampler(stack)

    async def client(stream: Many) -> None:
        while not sampling.done():
            request = make_request(make_prompt(source.randrange(1, 400)), source.randrange(1, 16))
            (await stream.start(request)).assert_complete(request)

    sampling = asyncio.create_task(sampler.run(samples))
    streams = [Many(stack.client()) for _ in range(4)]
    await asyncio.gather(*(client(streams[number % 4]) for number in range(clients)), sampling)
    for stream in streams:
        await stream.end()
    return sampler


def slow_ranks():
    """Steps of 15 ms and 16 slots: with 64 clients a rank, requests do queue."""
    return stub_config(
        load=NO_REPORTS,
        time_scale=1.0,
        step_time=StepTime(fixed_ms=15.0, per_prefill_token_us=5.0, per_decode_row_us=0.0),
        scheduler=SchedulerConfig(max_active=16),
    )


async def test_in_a_closed_loop_no_rank_idles_while_another_has_a_queue(protocol):
    async with running_gateway(protocol, ranks=RANKS, stub=slow_ranks()) as stack:
        sampler = await closed_loop(stack, clients=512, samples=30)
        assert sampler.queued_samples > 20, "the load is too light to show anything"
        assert sampler.faults == 0


async def test_the_closed_loop_does_find_a_policy_that_herds():
    """The control: by reported load alone, and nobody reports, everything goes to the first rank."""
    policy = {"preset": None, "cost": "reported_running + reported_waiting", "tie_break": "first"}
    async with running_gateway("vllm", ranks=RANKS, stub=slow_ranks(), policy=policy) as stack:
        sampler = await closed_loop(stack, clients=48, samples=10)
        assert sampler.faults > 0

"""Ranks that step together, behind the whole gateway: nobody waits for ever, whatever the order of things."""

import asyncio
import shutil
import tempfile

import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.group import StubGroup
from tests.support.calls import Generation, generate, make_prompt, make_request, many_stream
from tests.support.processes import free_port
from tests.support.stack import gateway_config, running, running_gateway, stub_config, until

LOCKSTEP = {"stub": stub_config(lockstep=True), "group": {"coupled": True}}
SLOW = {
    "stub": stub_config(lockstep=True, time_scale=1.0, step_time=StepTime(fixed_ms=2.0)),
    "group": {"coupled": True},
}


def starts(rank):
    return [wave.wave for wave in rank.records.received_waves]


async def test_a_request_to_one_rank_wakes_all_of_them():
    async with running_gateway("vllm", ranks=3, **LOCKSTEP) as stack:
        assert all(starts(rank) == [] for rank in stack.ranks)
        for number in range(4):
            request = make_request(make_prompt(5, number), 6, data_parallel_rank=number % 3)
            (await generate(stack.client(), request)).assert_complete(request)
            await until(lambda: all(not rank.live_ids for rank in stack.ranks))
        waves = starts(stack.ranks[0])
        assert all(starts(rank) == waves for rank in stack.ranks)
        assert waves == sorted(set(waves)), "strictly increasing"
        assert len(waves) >= 2


async def test_requests_in_one_wave_start_it_once():
    async with running_gateway("vllm", ranks=2, **SLOW) as stack:
        first = Generation(stack.client(), make_request(make_prompt(4), 60, data_parallel_rank=0))
        await first.first_token()
        for number in range(5):
            request = make_request(make_prompt(4, number), 3, data_parallel_rank=number % 2)
            (await generate(stack.client(), request)).assert_complete(request)
        assert not first.task.done()
        (await first.done()).assert_complete(first.request)
        assert starts(stack.ranks[0]) == starts(stack.ranks[1]) == [0]
        assert set(stack.ranks[1].records.received_add_waves) == {0}


async def test_many_short_requests_race_with_the_ends_of_waves():
    """Each wave is about to end when the next request comes; sooner or later every order of events occurs."""
    async with running_gateway("vllm", ranks=3, **LOCKSTEP) as stack, many_stream(stack.client()) as many:
        for burst in range(60):
            requests = [make_request(make_prompt(3, burst * 7 + n), 1 + burst % 3) for n in range(1 + burst % 4)]
            outcomes = await asyncio.wait_for(asyncio.gather(*map(many.start, requests)), 10.0)
            for request, outcome in zip(requests, outcomes, strict=True):
                outcome.assert_complete(request)
            for _ in range(burst % 5):
                await asyncio.sleep(0)
        waves = starts(stack.ranks[0])
        assert waves == sorted(set(waves))


async def test_the_load_of_every_rank_is_reported_also_when_it_becomes_idle():
    async with running_gateway("vllm", ranks=2, **SLOW) as stack:
        request = make_request(make_prompt(40), 20, data_parallel_rank=1)
        (await generate(stack.client(), request)).assert_complete(request)
        await until(lambda: not any(rank.live_ids for rank in stack.ranks))
        await until(lambda: stack.table.kv_usage[1] == 0.0, "the idle report")
        assert stack.gateway.link.counters.reports > 2
        assert stack.table.reported_running == [0, 0]


async def test_the_loss_of_one_rank_is_the_loss_of_all_and_a_new_group_starts_anew():
    async with running_gateway("vllm", ranks=2, **SLOW) as stack:
        generations = [
            Generation(stack.client(), make_request(make_prompt(4, rank), 5000, data_parallel_rank=rank))
            for rank in (0, 1)
        ]
        for generation in generations:
            await generation.first_token()
        await stack.ranks[1].kill()
        for generation in generations:
            (await generation.done()).assert_prefix(generation.request)
        for rank in stack.ranks:
            await rank.restart()
        await stack.group.ready()
        await stack.all_ready()
        request = make_request(make_prompt(4), 6, data_parallel_rank=0)
        (await generate(stack.client(), request)).assert_complete(request)


@pytest.mark.parametrize("auto_step", [False])
async def test_a_request_that_comes_as_its_wave_ends_starts_the_next_one(auto_step):
    """Step by step: the group sleeps already when the request comes, and the gateway doesn't know yet."""
    async with running_gateway("vllm", ranks=2, auto_step=auto_step, **LOCKSTEP) as stack:
        zero, one = stack.ranks

        async def step_all(times):
            for _ in range(times):
                for rank in (zero, one):
                    await rank.step()
                await asyncio.sleep(0.002)

        async def finish(generation):
            while not generation.task.done():
                await step_all(1)
            (await generation.done()).assert_complete(generation.request)

        first = Generation(stack.client(), make_request(make_prompt(3), 2, data_parallel_rank=0))
        await zero.wait_until(lambda: zero.records.adds == 1)
        await finish(first)
        assert starts(one) == [0]
        # The gateway hears that the wave is over, forgets it, and takes the group for one that runs.
        await until(lambda: stack.router._waves._wave[0] == 1)
        stack.router._waves._wave[0], stack.router._waves._is_running[0] = 0, True
        late = Generation(stack.client(), make_request(make_prompt(4), 2, data_parallel_rank=1))
        await one.wait_until(lambda: one.records.adds == 1)
        assert list(one.records.received_add_waves) == [0], "a wave that is over"
        await finish(late)
        assert starts(zero) == [0, 1], "the rank woke by itself, and the gateway told the others"


async def test_a_restarted_gateway_takes_up_a_group_whose_waves_it_does_not_know():
    """It counts from 0 again; the ranks see an old wave, wake by themselves and say which one it is."""
    address = f"127.0.0.1:{free_port()}"
    config = gateway_config(
        "vllm",
        2,
        group={"coupled": True, "handshake": f"tcp://{address}"},
        state_dir=tempfile.mkdtemp(prefix="rg-"),
    )
    group = None
    try:
        async with running(config) as first:
            group = StubGroup("vllm", f"tcp://{address}", ranks=2, config=LOCKSTEP["stub"])
            await group.__aenter__()
            await first.all_ready()
            for number in range(3):
                request = make_request(make_prompt(5, number), 4, data_parallel_rank=number % 2)
                (await generate(first.client(), request)).assert_complete(request)
                await until(lambda: not any(rank.live_ids for rank in group.ranks))
                await until(lambda: not first.router._waves._is_running[0], "the end of the wave")
        before = starts(group.ranks[0])
        assert len(before) >= 2
        async with running(config) as second:
            await second.all_ready()
            assert [rank.incarnation for rank in group.ranks] == [1, 1], "no handshake"
            for number in range(4):
                request = make_request(make_prompt(6, number), 4, data_parallel_rank=number % 2)
                (await asyncio.wait_for(generate(second.client(), request), 10.0)).assert_complete(request)
                await until(lambda: not any(rank.live_ids for rank in group.ranks))
            after = starts(group.ranks[0])[len(before) :]
            assert [wave for wave in after if wave > before[-1]], "it has caught up"
    finally:
        if group is not None:
            await group.__aexit__(None, None, None)
        shutil.rmtree(config.state_dir)

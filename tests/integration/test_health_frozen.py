"""Ranks whose whole process is stopped (SIGSTOP) and goes on (SIGCONT): nothing of them moves, their sockets stay."""

import asyncio
import json
import signal
from contextlib import asynccontextmanager

import pytest
import zmq

from gateway.core.errors import Reason
from gateway.core.ranks import RankState
from gateway.edges.engine_link import channel
from tests.support.calls import Generation, make_prompt, make_request
from tests.support.processes import RankProcess
from tests.support.stack import MAX_CONTEXT_TOKENS, VOCAB_SIZE, gateway_config, observed, running, until

GREEDY = {"temperature": 0.0}
AFTER_S = 1.5
SILENCE = {"after_s": AFTER_S, "quiet_s": 0.3}
_ZERO = ("per_prefill_token_us", "per_decode_row_us", "per_context_token_ns", "per_prefill_context_ns")
STUB = {
    "model": {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_CONTEXT_TOKENS},
    "step_time": {"fixed_ms": 2.0} | dict.fromkeys(_ZERO, 0.0),
}


@asynccontextmanager
async def frozen_site(protocol, tmp_path, ranks=2, **config):
    """A gateway in this process, each rank in one of its own."""
    silence = {"silence": SILENCE | config.pop("silence", {})}
    settings = tmp_path / "ranks.yaml"
    settings.write_text(json.dumps(STUB))
    async with running(gateway_config(protocol, ranks, failure=silence, **config)) as stack:
        address = stack.gateway.link.handshake_addresses[0]
        arguments = ["--protocol", protocol, "--handshake", address, "--config", settings, "--ranks", 1]
        processes = [
            RankProcess(tmp_path, f"rank-{number}", *arguments, "--start-index", number) for number in range(ranks)
        ]
        try:
            await stack.all_ready()
            async with observed(stack, None):
                yield stack, processes
            idle = [process.total("live") for process in processes if process.is_running]
            assert not any(idle), "engines still work on something"
        finally:
            for process in processes:
                process.close()


async def until_state(stack, rank, state):
    await until(lambda: stack.table.state[rank] is state, f"rank {rank} to be {state}")


async def streams(stack, count, max_tokens, **fields):
    client = stack.client()
    requests = [make_request(make_prompt(6, n), max_tokens, sampling=GREEDY, **fields) for n in range(count)]
    generations = [Generation(client, request) for request in requests]
    await asyncio.gather(*(generation.first_token() for generation in generations))
    return generations


async def test_a_stopped_process_is_lost_by_its_silence_and_comes_back_on_its_sockets(protocol, tmp_path):
    async with frozen_site(protocol, tmp_path) as (stack, processes):
        moving = await streams(stack, 6, 2000)
        moved = stack.table.in_flight[0]
        assert moved
        processes[0].send(signal.SIGSTOP)
        await until_state(stack, 0, RankState.SUSPECT)
        await until_state(stack, 0, RankState.LOST)
        processes[0].send(signal.SIGCONT)
        await stack.all_ready()
        for generation in moving:
            (await generation.done()).assert_complete(generation.request)
        assert sorted(generation.outcome.finish.attempts for generation in moving) == [1] * (6 - moved) + [2] * moved
        assert stack.table.incarnation == [2, 1]
        states = [entry["new"] for entry in stack.logged("rank_state") if entry["rank"] == 0]
        assert states == ["READY", "SUSPECT", "LOST", "JOINING", "READY"]
        (back,) = await streams(stack, 1, 20, data_parallel_rank=0)
        (await back.done()).assert_complete(back.request)


async def test_one_that_is_stopped_for_so_long_that_its_connection_ends_comes_back_as_well(
    protocol, tmp_path, monkeypatch
):
    """First silence, then the heartbeats' time-out, then it goes on."""
    for name in ("_INPUT", "_OUTPUT"):
        options = getattr(channel, name) | {zmq.HEARTBEAT_IVL: 500, zmq.HEARTBEAT_TIMEOUT: 3000}
        monkeypatch.setattr(channel, name, options)
    async with frozen_site(protocol, tmp_path) as (stack, processes):
        moving = await streams(stack, 6, 1500)
        processes[0].send(signal.SIGSTOP)
        await until_state(stack, 0, RankState.LOST)
        assert stack.router.counters.silence_losses == [1, 0]
        await until(lambda: stack.gateway.link.counters.lost.get("disconnected") == 1, "the disconnect")
        processes[0].send(signal.SIGCONT)
        await stack.all_ready()
        assert stack.table.incarnation == [3, 1]
        for generation in moving:
            (await generation.done()).assert_complete(generation.request)
        (back,) = await streams(stack, 1, 20, data_parallel_rank=0)
        (await back.done()).assert_complete(back.request)


async def test_a_stopped_process_with_a_backlog_holds_up_nobody(protocol, tmp_path, monkeypatch):
    options = channel._INPUT | {zmq.SNDHWM: 4, zmq.SNDBUF: 65536}
    monkeypatch.setattr(channel, "_INPUT", options)
    slow = {"prefill_tokens_per_s": 100_000_000, "after_s": 4.0}
    async with frozen_site(protocol, tmp_path, silence=slow, filters={"kv_fit": "off"}) as (stack, processes):
        client = stack.client()
        processes[0].send(signal.SIGSTOP)
        stuck, counters = [], stack.router.counters
        while not stack.table.is_blocked[0]:
            assert len(stuck) < 400
            prompt = make_prompt(16_000, len(stuck))
            stuck.append(Generation(client, make_request(prompt, 3, data_parallel_rank=0)))
            # The word of the I/O thread that the rank is blocked may be faster than this request, which then is refused.
            await until(lambda: counters.accepted >= len(stuck) or stuck[-1].task.done(), "its acceptance or refusal")
        if stuck[-1].task.done():
            assert (await stuck.pop().done()).reason is Reason.PINNED_RANK_UNAVAILABLE
        fine = await streams(stack, 8, 100)
        for generation in fine:
            outcome = await generation.done()
            outcome.assert_complete(generation.request)
            assert (outcome.finish.rank, outcome.finish.attempts) == (1, 1)
        for generation in stuck:
            assert (await generation.done()).reason is Reason.RANK_LOST
        processes[0].send(signal.SIGCONT)
        await stack.all_ready()
        await until(lambda: not stack.table.is_blocked[0], "room")
        (back,) = await streams(stack, 1, 20, data_parallel_rank=0)
        (await back.done()).assert_complete(back.request)


@pytest.mark.parametrize("when", ["stopped", "going"])
async def test_one_that_is_killed_and_replaced_after_a_silence_joins_like_any_other(protocol, tmp_path, when):
    async with frozen_site(protocol, tmp_path) as (stack, processes):
        moving = await streams(stack, 4, 1500)
        processes[0].send(signal.SIGSTOP)
        await until_state(stack, 0, RankState.LOST)
        if when == "going":
            processes[0].send(signal.SIGCONT)
            await until_state(stack, 0, RankState.JOINING)
        processes[0].kill()
        await until_state(stack, 0, RankState.LOST)
        address = stack.gateway.link.handshake_addresses[0]
        arguments = ["--protocol", protocol, "--handshake", address, "--config", tmp_path / "ranks.yaml", "--ranks", 1]
        processes.append(RankProcess(tmp_path, "successor", *arguments, "--start-index", 0))
        await stack.all_ready()
        for generation in moving:
            (await generation.done()).assert_complete(generation.request)
        (back,) = await streams(stack, 1, 20, data_parallel_rank=0)
        (await back.done()).assert_complete(back.request)

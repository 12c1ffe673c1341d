"""Real ranks that die, end in order and come back; a gateway that is killed and comes back to them."""

import asyncio
import signal

import grpc
import pytest

from gateway.core.errors import Reason
from gateway.v1 import gateway_pb2
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.real_vllm.conftest import connect
from tests.real_vllm.test_streams import greedy
from tests.support.calls import Generation, generate, make_request
from tests.support.processes import WAIT_S
from tests.support.vllm_site import EOS, VllmSite

pytestmark = pytest.mark.real_vllm

PROMPT = [11, 400, 3, 77, 250]
LONG = 1800
"""Tokens that take a rank a few seconds: longer than a test needs to do what it does meanwhile."""


async def started(client, request, count=5):
    """A stream with some of its tokens."""
    generation = Generation(client, request)
    async with asyncio.timeout(WAIT_S):
        while len(generation.outcome.text) < count:
            generation.outcome.progress.clear()
            await generation.first_token()
    return generation


async def test_a_stream_of_a_killed_rank_goes_on_at_the_other_one_with_the_same_tokens(site, client, direct):
    wanted = await asyncio.to_thread(direct.generate, PROMPT, LONG, _eos_token_id=EOS)
    generation = await started(client, greedy(PROMPT, LONG))
    ranks = (await client.ListRanks(gateway_pb2.ListRanksRequest())).ranks
    (doomed,) = [number for number, rank in enumerate(ranks) if rank.in_flight]
    site.processes[doomed].kill()
    outcome = await generation.done()
    assert outcome.status is None, outcome.status
    assert outcome.text == wanted
    assert (outcome.finish.rank, outcome.finish.attempts) == (1 - doomed, 2)
    assert outcome.finish.completion_tokens == len(wanted)
    assert outcome.finish.prompt_tokens == len(PROMPT)


async def test_a_rank_that_ends_in_order_gives_its_requests_up(site, client, waited):
    """On SIGTERM a rank aborts what it has by itself, with rows; then it is gone."""
    generation = await started(client, greedy(PROMPT, LONG, data_parallel_rank=0))
    site.processes[0].send(signal.SIGTERM)
    outcome = await generation.done()
    assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.ENGINE_REJECTED)
    assert 0 < len(outcome.text) < LONG
    await waited(lambda: not site.processes[0].is_running, "the rank's process to end")
    await waited(lambda: site.states()[0] == "LOST", "the loss")


async def test_what_a_rank_gives_up_goes_on_at_the_other_one(site, client, direct):
    wanted = await asyncio.to_thread(direct.generate, PROMPT, LONG, _eos_token_id=EOS)
    generation = await started(client, greedy(PROMPT, LONG))
    ranks = (await client.ListRanks(gateway_pb2.ListRanksRequest())).ranks
    (ending,) = [number for number, rank in enumerate(ranks) if rank.in_flight]
    site.processes[ending].send(signal.SIGTERM)
    outcome = await generation.done()
    assert outcome.status is None, outcome.status
    assert outcome.text == wanted
    assert (outcome.finish.rank, outcome.finish.attempts) == (1 - ending, 2)


async def test_what_cant_be_resumed_ends_with_its_exact_prefix(site, client):
    """Sampled without a seed: another rank would go on with another distribution than the client's."""
    request = make_request(PROMPT, LONG, sampling={"temperature": 1.0, "ignore_eos": True}, data_parallel_rank=1)
    generation = await started(client, request)
    site.processes[1].kill()
    outcome = await generation.done()
    assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.RANK_LOST)
    assert not outcome.finishes
    assert 0 < len(outcome.text) < LONG


async def test_a_rank_that_comes_back_is_a_new_incarnation_and_serves(site, client, direct, waited):
    before = (await client.ListRanks(gateway_pb2.ListRanksRequest())).ranks[0].incarnation
    site.processes[0].kill()
    await waited(lambda: site.states()[0] == "LOST", "the loss")
    pinned = greedy(PROMPT, 12, data_parallel_rank=0)
    refused = await generate(client, pinned)
    assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.PINNED_RANK_UNAVAILABLE)
    assert (await generate(client, greedy(PROMPT, 12))).finish.rank == 1
    site.start_rank(0)
    await asyncio.to_thread(site.wait_ready)
    after = (await client.ListRanks(gateway_pb2.ListRanksRequest())).ranks[0]
    assert (after.incarnation, after.in_flight) == (before + 1, 0)
    assert (await generate(client, pinned)).text == await asyncio.to_thread(direct.generate, PROMPT, 12)


async def test_a_gateway_that_was_killed_takes_up_its_running_ranks(rank_server, direct, waited):
    """No handshake: the ranks don't notice. What they still generate for the dead one is aborted."""
    with VllmSite(rank_server, keeps_state=True, group={"min_ready": 2}) as site:
        await asyncio.to_thread(site.start)
        pids = [process.pid for process in site.processes]
        channel = connect(site)
        client = GatewayServiceStub(channel)
        requests = [greedy(PROMPT, LONG, data_parallel_rank=rank) for rank in (0, 1)]
        orphans = await asyncio.gather(*(started(client, request, 1) for request in requests))
        site.gateway.kill()
        for generation in orphans:
            assert (await generation.done()).code is grpc.StatusCode.UNAVAILABLE
        await channel.close()

        site.start_gateway()
        await asyncio.to_thread(site.wait_ready)
        changes = site.gateway.events("rank_state")
        assert [(change["cause"], change["incarnation"]) for change in changes] == [("reattached", 2)] * 2
        channel = connect(site)
        client = GatewayServiceStub(channel)
        wanted = await asyncio.to_thread(direct.generate, PROMPT, 30)
        for rank in (0, 1):
            outcome = await generate(client, greedy(PROMPT, 30, data_parallel_rank=rank), timeout=20.0)
            assert outcome.text == wanted, outcome.status
        # The old requests are aborted, or have ended already: on a quiet machine a rank is faster than a gateway starts.
        await waited(
            lambda: not any(rank.get("kv_usage") for rank in site.call("ListRanks", {}).message["ranks"]), "rest"
        )
        assert [process.pid for process in site.processes] == pids
        assert all(process.is_running for process in site.processes)
        await channel.close()
        assert await asyncio.to_thread(site.gateway.stop) == 0

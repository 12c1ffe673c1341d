"""Real ranks report to the gateway as to their coordinator: every change of their load, also the one to idle."""

import asyncio

import pytest

from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.real_vllm.conftest import connect, watch
from tests.real_vllm.test_streams import greedy
from tests.support.calls import Generation, generate
from tests.support.vllm_site import VllmSite

pytestmark = pytest.mark.real_vllm


def link_events(site, name):
    (line,) = [line for line in site.scrape().splitlines() if f'event="{name}"' in line]
    return float(line.rpartition(" ")[2])


async def test_ranks_that_log_no_statistics_report_their_load_all_the_same(rank_server, direct):
    """Their batches carry none: what is known of the load was pushed."""
    with VllmSite(rank_server, group={"min_ready": 2}, settings={"log_stats": False, "max_num_seqs": 2}) as site:
        await asyncio.to_thread(site.start)
        channel = connect(site)
        client = GatewayServiceStub(channel)
        (rank,) = [rank for rank in (await watch(client, lambda _: True)) if rank.rank == 1]
        assert not rank.HasField("kv_usage")
        busy = [Generation(client, greedy([5 + n, 6, 7], 1200, data_parallel_rank=1)) for n in range(4)]
        ranks = await watch(client, lambda ranks: ranks[1].reported_running == 2 and ranks[1].reported_waiting == 2)
        assert ranks[1].kv_usage > 0.0
        assert not ranks[0].HasField("kv_usage"), "nothing has changed there"
        for generation in busy[:2]:
            generation.call.cancel()
            await generation.done()
        await watch(client, lambda ranks: (ranks[1].reported_running, ranks[1].reported_waiting) == (2, 0))
        for generation in busy[2:]:
            await generation.done()
        # The last batch of a rank says nothing about its KV cache here: this is the report of an idle rank.
        await watch(client, lambda ranks: ranks[1].HasField("kv_usage") and ranks[1].kv_usage == 0.0)
        assert await asyncio.to_thread(link_events, site, "reports") >= 4
        await channel.close()


async def test_without_the_coordinator_batches_tell_the_load(rank_server, direct):
    group = {"min_ready": 1, "coordinator": {"enabled": False}}
    with VllmSite(rank_server, ranks=1, group=group) as site:
        await asyncio.to_thread(site.start)
        channel = connect(site)
        client = GatewayServiceStub(channel)
        wanted = await asyncio.to_thread(direct.generate, [5, 6, 7, 8], 20)
        outcome = await generate(client, greedy([5, 6, 7, 8], 20))
        assert outcome.text == wanted
        await watch(client, lambda ranks: ranks[0].HasField("kv_usage") and ranks[0].kv_usage == 0.0)
        assert await asyncio.to_thread(link_events, site, "reports") == 0
        await channel.close()

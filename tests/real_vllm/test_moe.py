"""A mixture of experts on real ranks: they step together, and the gateway starts their waves."""

import asyncio

import pytest

from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.real_vllm.conftest import connect
from tests.real_vllm.test_streams import greedy
from tests.support.calls import generate
from tests.support.processes import wait_until
from tests.support.vllm_site import VllmSite

pytestmark = pytest.mark.real_vllm


@pytest.fixture(scope="module")
def moe_site(rank_server):
    group = {"min_ready": 2, "coupled": True}
    with VllmSite(rank_server, is_moe=True, group=group, observability={"log_level": "debug"}) as site:
        try:
            yield site.start()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{site.rank_logs()}") from None


async def test_every_rank_of_a_lockstep_group_serves_and_sleeps_and_wakes(moe_site):
    channel = connect(moe_site)
    client = GatewayServiceStub(channel)
    texts = []
    for number in range(6):
        request = greedy([5, 6, 7, 8], 8, data_parallel_rank=number % 2)
        outcome = await generate(client, request, timeout=30.0)
        assert outcome.status is None, (outcome.status, moe_site.rank_logs())
        texts.append(outcome.text)
        if number == 2:
            await asyncio.sleep(0.5)  # the group goes to sleep, and the next request has to wake it
    assert all(text == texts[0] for text in texts)
    assert len(texts[0]) == 8
    await channel.close()


async def test_requests_that_race_with_the_end_of_a_wave_are_all_served(moe_site):
    """One token each: every wave is about to end when the next request comes."""
    channel = connect(moe_site)
    client = GatewayServiceStub(channel)
    for burst in range(25):
        requests = [
            greedy([5 + burst, 6, 7 + n], 1 + burst % 2, data_parallel_rank=(burst + n) % 2)
            for n in range(1 + burst % 3)
        ]
        outcomes = await asyncio.gather(*(generate(client, request, timeout=30.0) for request in requests))
        assert all(outcome.status is None for outcome in outcomes), (burst, [o.status for o in outcomes])
    await channel.close()


async def test_a_group_that_lost_a_rank_starts_anew_and_meets_elsewhere(moe_site):
    """The gateway gives it other ports for every start; the ranks count their waves from 0 again."""
    channel = connect(moe_site)
    client = GatewayServiceStub(channel)
    moe_site.processes[1].kill()
    await asyncio.to_thread(wait_until, lambda: moe_site.states() == ["LOST", "LOST"], "the loss of both")
    moe_site.processes[0].kill()
    await asyncio.to_thread(moe_site.restart_unready)
    for rank in (1, 0):
        outcome = await generate(client, greedy([5, 6, 7, 8], 8, data_parallel_rank=rank), timeout=30.0)
        assert outcome.status is None, (outcome.status, moe_site.rank_logs())
        assert len(outcome.text) == 8
    await channel.close()

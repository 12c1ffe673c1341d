"""One server with vLLM in it, one gateway with two ranks for the tests that leave both as they were."""

import asyncio

import grpc
import pytest

from gateway.v1 import gateway_pb2
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.support.processes import WAIT_S, wait_until
from tests.support.vllm_direct import DirectRank
from tests.support.vllm_site import RANKS, VLLM_BIN, RankServer, VllmSite

EXPECTED = frozenset({"rank_lost", "rank_state", "send_refused", "request_ended"})
"""What a test that takes a rank away makes the gateway say."""


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory):
    if not (VLLM_BIN / "python").exists():
        pytest.fail(f"there is no vLLM in {VLLM_BIN.parent}: run `make test-vllm`, which installs it first")
    server = RankServer(tmp_path_factory.mktemp("vllm"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def direct(rank_server):
    """A rank without a gateway."""
    rank = DirectRank(rank_server)
    yield rank
    rank.close()


@pytest.fixture(scope="session")
def shared_site(rank_server):
    group = {"min_ready": RANKS}
    with VllmSite(rank_server, group=group, observability={"log_level": "debug"}) as site:
        yield site.start()


@pytest.fixture
def site(shared_site):
    """The gateway with both ranks READY and at rest, before the test and after it."""
    shared_site.restart_unready()
    begin = len(shared_site.gateway.events())
    yield shared_site
    assert_at_rest(shared_site, begin)


def assert_at_rest(site, begin=0):
    """Nothing is charged, no rank holds anything by its own word, no complaint in the log."""
    wait_until(lambda: all(rank.get("in_flight", 0) == 0 for rank in listed(site)), "the charges to return to 0")
    alive = [index for index, process in enumerate(site.processes) if process is not None and process.is_running]
    wait_until(
        lambda: not any(listed(site)[index].get("kv_usage") for index in alive),
        "every rank to say that its KV cache is empty",
    )
    assert site.gateway.is_running
    lines = [line for line in site.gateway.events()[begin:] if line["level"] not in ("debug", "info")]
    assert not [line for line in lines if line["event"] not in EXPECTED]


def listed(site):
    """ListRanks as the operator's tool shows it."""
    return site.call("ListRanks", {}).message["ranks"]


@pytest.fixture
async def client(site):
    """The gateway's own service on a connection of its own."""
    channel = connect(site)
    yield GatewayServiceStub(channel)
    await channel.close()


def connect(site):
    return grpc.aio.insecure_channel(site.ports.grpc, options=[("grpc.use_local_subchannel_pool", 1)])


async def watch(client, is_wanted):
    """The gateway's list of ranks, once it is as wanted."""
    async with asyncio.timeout(WAIT_S):
        while True:
            ranks = (await client.ListRanks(gateway_pb2.ListRanksRequest())).ranks
            if is_wanted(ranks):
                return ranks
            await asyncio.sleep(0.005)


@pytest.fixture
def eventually(client):
    """Waits until what the gateway lists for a rank is as wanted."""

    async def wait(is_wanted, number=0):
        await watch(client, lambda ranks: is_wanted(ranks[number]))

    return wait


@pytest.fixture
def waited():
    async def wait(condition, what):
        await asyncio.to_thread(wait_until, condition, what)

    return wait

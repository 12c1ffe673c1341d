"""Deployments that the tests of this folder share: one per engine family, started when the first test wants it."""

import asyncio
import signal
from contextlib import ExitStack

import grpc
import pytest

from tests.support.deployment import Deployment

PROTOCOLS = ("vllm", "tokenspeed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and the processes under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=PROTOCOLS)
def protocol(request):
    """Every test that takes it runs once per engine family."""
    return request.param


@pytest.fixture(scope="session")
def shared_sites():
    """Starts a family's deployment once. Ends them all with the session."""
    running = {}
    with ExitStack() as cleanup:

        def of(protocol):
            if protocol not in running:
                site = cleanup.enter_context(
                    Deployment(protocol, ranks=3, group={"min_ready": 3}, observability={"log_level": "debug"})
                )
                running[protocol] = site.start()
            return running[protocol]

        yield of


@pytest.fixture
def site(shared_sites, protocol):
    """A running gateway with three ranks that tests share: leave it as it was."""
    return shared_sites(protocol)


@pytest.fixture
async def connect():
    """Makes gRPC channels to a deployment, each with a connection of its own; they end with the test."""
    channels = []

    def open_channel(site):
        unshared = ("grpc.use_local_subchannel_pool", 1)
        channels.append(grpc.aio.insecure_channel(site.ports.grpc, options=[unshared]))
        return channels[-1]

    yield open_channel
    await asyncio.gather(*(channel.close() for channel in channels))

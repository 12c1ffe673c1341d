"""SIGTERM: readiness off first, then a delay, then no new requests, then the live ones end; and what cuts it short."""

import asyncio
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.core.errors import Reason
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.support.calls import Generation, generate, make_prompt, make_request
from tests.support.deployment import Deployment, health
from tests.support.engine_edge import SERVICE_NAMES
from tests.support.processes import WAIT_S, wait_until

pytestmark = pytest.mark.e2e

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = 300
"""Tokens of a stream that a rank has to be held in the middle of: some seconds at the pace of these tests."""


async def waited(condition, what):
    await asyncio.to_thread(wait_until, condition, what)


async def midway(client, count=2, rank=None, max_tokens=LONG):
    """Streams that have had their first tokens."""
    generations = [
        Generation(client, make_request(make_prompt(7, number), max_tokens, data_parallel_rank=rank))
        for number in range(count)
    ]
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(generation.first_token() for generation in generations))
    return generations


async def watching(channel, name):
    """A health watch that has said SERVING."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
    assert (await watch.read()).status == SERVING
    return watch


async def test_streams_finish_while_new_requests_are_turned_away(connect):
    with Deployment("vllm", step_ms=8.0, drain={"delay_s": 2.0, "grace_s": 120.0}) as site:
        site.start()
        client, channel = GatewayServiceStub(connect(site)), connect(site)
        watches = [await watching(channel, name) for name in ("", "readiness", SERVICE_NAMES[site.protocol])]
        held, going = await midway(client, rank=0), await midway(client, rank=1)
        site.engines[0].ask("faults", 0, stall=True)
        site.gateway.send(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 3
        # Whoever has not looked at the readiness yet is still served, and the process is alive.
        assert health(site.ports.grpc, "liveness") == "SERVING"
        assert site.call(f"{SERVICE_NAMES[site.protocol]}/HealthCheck").message.get("healthy", False) is False
        late = make_request(data_parallel_rank=1)
        (await generate(client, late)).assert_complete(late)
        assert not any(generation.task.done() for generation in held)

        async with asyncio.timeout(WAIT_S):
            while (refused := await generate(client, late)).status is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.DRAINING)
        assert refused.facts["retryable"] == "true"
        assert health(site.ports.grpc, "liveness") == "SERVING"
        for generation in going:
            (await generation.done()).assert_complete(generation.request)
        assert site.gateway.is_running

        site.engines[0].ask("faults", 0, stall=False)
        for generation in held:
            (await generation.done()).assert_complete(generation.request)
        assert await asyncio.to_thread(site.gateway.wait) == 0
        order = [event["event"] for event in site.gateway.events()]
        assert order.index("draining") < order.index("readiness", order.index("draining")) < order.index("stopped")
        assert "drain_incomplete" not in order
        (stopped,) = site.gateway.events("stopped")
        assert sum(stopped["ended"].values()) == stopped["accepted"] == stopped["ended"]["OK"]


async def test_a_hundred_open_streams_all_complete_inside_the_grace(protocol, connect):
    with Deployment(protocol, step_ms=8.0, drain={"grace_s": 120.0}) as site:
        site.start()
        client, channel = GatewayServiceStub(connect(site)), connect(site)
        watch = await watching(channel, "readiness")
        generations = await midway(client, count=100, max_tokens=600)
        ends = []
        for generation in generations:
            generation.task.add_done_callback(lambda _: ends.append("stream"))
        site.gateway.send(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert (await watch.read()).status == NOT_SERVING
        assert len(ends) < len(generations), "readiness goes off first"
        for generation in generations:
            (await generation.done()).assert_complete(generation.request)
        assert await asyncio.to_thread(site.gateway.wait) == 0
        (draining,) = site.gateway.events("draining")
        assert draining["live"] == 100
        (stopped,) = site.gateway.events("stopped")
        assert stopped["ended"]["OK"] == stopped["accepted"] == 100
        assert not site.gateway.events("drain_incomplete")


async def test_what_outlives_the_grace_is_ended_and_aborted_at_its_rank(connect):
    with Deployment("tokenspeed", drain={"grace_s": 0.5}) as site:
        site.start()
        client = GatewayServiceStub(connect(site))
        generations = await midway(client, count=3, max_tokens=10_000)
        site.engines[0].ask("faults", silent=True)
        site.gateway.send(signal.SIGTERM)
        assert await asyncio.to_thread(site.gateway.wait) == 0
        await assert_drained_out(site, generations)
        (incomplete,) = site.gateway.events("drain_incomplete")
        assert incomplete["live"] == 3


@pytest.mark.parametrize(
    ("protocol", "numbers"),
    [("vllm", (signal.SIGTERM, signal.SIGTERM)), ("tokenspeed", (signal.SIGINT, signal.SIGTERM))],
)
async def test_a_second_signal_waits_for_nothing(protocol, numbers, connect):
    with Deployment(protocol, drain={"delay_s": 600.0, "grace_s": 600.0}) as site:
        site.start()
        client, channel = GatewayServiceStub(connect(site)), connect(site)
        watch = await watching(channel, "readiness")
        generations = await midway(client, count=3, max_tokens=10_000)
        site.engines[0].ask("faults", silent=True)
        site.gateway.send(numbers[0])
        assert (await watch.read()).status == NOT_SERVING
        assert site.gateway.is_running
        site.gateway.send(numbers[1])
        assert await asyncio.to_thread(site.gateway.wait) == 0
        await assert_drained_out(site, generations)


async def assert_drained_out(site, generations):
    """Clients got an exact prefix and a reason, ranks an ABORT each; the log has one end per request."""
    for generation in generations:
        outcome = await generation.done()
        outcome.assert_prefix(generation.request)
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.DRAINING)
        assert outcome.text
    (engine,) = site.engines
    await waited(lambda: engine.total("live") == 0, "the ranks to be empty")
    assert engine.total("aborts_received") == len(generations)
    ends = site.gateway.ends(len(generations))
    assert [event["outcome"] for event in ends] == ["DRAINING"] * len(generations)

"""Another configuration in a gateway under load: no request notices, and ranks that stay keep their connections."""

import asyncio
import itertools

import grpc
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine_stub.backend.synthetic import StepTime
from engine_stub.group import StubGroup
from gateway.config.changes import refusals
from gateway.core.errors import Reason
from gateway.v1 import admin_pb2, gateway_pb2
from tests.support.calls import Generation, Many, generate, make_prompt, make_request
from tests.support.engine_edge import PROTOS
from tests.support.stack import gateway_config, running_gateway, stub_config, until

TICKING = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=2.0))
MODES = {
    "direct": {"mode": "direct"},
    "queue": {"mode": "queue", "queue": {"max_in_flight_per_rank": 3}},
    "batch": {"mode": "batch", "batch": {"max_requests": 4}},
}


def reconfigure(stack, protocol, ranks=2, **sections):
    """What a reload does once it has read the file."""
    gateway = stack.gateway
    config = gateway_config(protocol, ranks, **sections)
    assert refusals(config, gateway.config, stack.router.layout) == []
    gateway.reconfigure(config)
    stack.router.check()


def transports(stack, ranks):
    """What must not change for ranks that stay."""
    channels = [stack.gateway.link._ranks[rank]._channel for rank in ranks]
    return [
        (id(channel), channel.input.address, stack.table.incarnation[rank])
        for rank, channel in zip(ranks, channels, strict=True)
    ]


class Load:
    """Requests one after another in several lanes and on one stream, until it is told to end."""

    def __init__(self, client, lanes=6):
        self.done = []
        self._numbers = itertools.count()
        self._ending = asyncio.Event()
        self._many = Many(client)
        self._tasks = [asyncio.create_task(self._lane(client, number % 3 == 0)) for number in range(lanes)]

    async def _lane(self, client, is_many):
        while not self._ending.is_set():
            number = next(self._numbers)
            request = make_request(make_prompt(4 + number % 30, number), 3 + number % 20)
            outcome = await (self._many.start(request) if is_many else generate(client, request))
            self.done.append((request, outcome))

    async def more(self, count=12):
        """Wait until so many more have ended."""
        wanted = len(self.done) + count
        await until(lambda: len(self.done) >= wanted or any(task.done() for task in self._tasks), "load")

    async def end(self):
        self._ending.set()
        await asyncio.gather(*self._tasks)
        await self._many.end()
        for request, outcome in self.done:
            outcome.assert_complete(request)


@pytest.mark.parametrize("mode", MODES)
async def test_no_request_notices(protocol, mode):
    base = {"scheduling": MODES[mode]}
    async with running_gateway(protocol, stub=TICKING, **base) as stack:
        load = Load(stack.client())
        await load.more()
        before = transports(stack, [0, 1])
        predictor = {"prefill_ms": "0.01 * total_new_tokens", "calibrate": True}
        tenants = {"named": {"a": {"weight": 2.0}}}
        for sections in (
            {"policy": {"preset": "p2c"}},
            {"policy": {"preset": "predicted"}, "predictor": predictor},
            {"predictor": predictor, "admission": {"max_prompt_tokens": 10_000, "tenants": tenants}},
            {"group": {"budget": {"max_kv_tokens": 10_000}}, "limits": {"max_n": 3}},
            {"failure": {"max_attempts": 2}, "load": {"foreign_ttl_s": 1.0}, "gateways": 2},
            {
                "filters": {"kv_fit": "soft"},
                "slo": {"mode": "shadow", "ttft": [{"ttft_ms": 1.0}]},
                "predictor": predictor,
            },
            {},
        ):
            reconfigure(stack, protocol, **base | sections)
            await load.more()
        address = stack.gateway.link.handshake_addresses[0]
        reconfigure(stack, protocol, 4, **base, group={"min_ready": 2})
        assert stack.gateway.is_ready
        async with StubGroup(protocol, address, ranks=2, start_index=2, config=TICKING) as added:
            await added.ready()
            await until(lambda: stack.ready_ranks() == [0, 1, 2, 3], "the added ranks")
            await load.more(40)
            assert all(stack.router.counters.decisions[rank] for rank in (2, 3))
            reconfigure(stack, protocol, 2, **base)
            await load.more(20)
            await until(lambda: stack.table.size == 2, "the removed ranks to be gone")
            assert not any(rank.live_ids for rank in added.ranks)
        await load.end()
        assert transports(stack, [0, 1]) == before
        assert len(stack.logged("rank_state")) == 2 + 2 + 4, "joins, joins, drains and removals"


@pytest.mark.parametrize("queue", [{"order": "spf"}, {"order": "hrrn", "fair": False}, {"max_in_flight_per_rank": 30}])
async def test_what_is_queued_stays_queued(protocol, queue):
    base = {"mode": "queue", "queue": {"max_in_flight_per_rank": 1}}
    async with running_gateway(protocol, stub=TICKING, scheduling=base) as stack:
        client = stack.client()
        calls = [Generation(client, make_request(make_prompt(5 + number, number), 10)) for number in range(40)]
        await until(lambda: stack.router.queue_depth > 20, "a queue")
        reconfigure(stack, protocol, scheduling={"mode": "queue", "queue": {"max_in_flight_per_rank": 1} | queue})
        for call in calls:
            (await call.done()).assert_complete(call.request)


async def test_limits_of_the_edge_follow(protocol):
    async with running_gateway(protocol, stub=TICKING) as stack:
        client, engine = stack.client(), stack.engine_client()
        reconfigure(stack, protocol, 3, limits={"default_deadline_s": 0.05})
        late = await generate(client, make_request(max_tokens=10_000))
        assert late.reason is Reason.DEADLINE_EXCEEDED
        refused = await generate(client, make_request(data_parallel_rank=7))
        assert (refused.reason, refused.facts["valid_max"]) == (Reason.INVALID_RANK, "2")
        assert len(await stack.list_ranks()) == 3
        info = await engine.GetServerInfo(PROTOS[protocol].GetServerInfoRequest())
        assert "3" in str(info)
        reconfigure(stack, protocol)


async def test_bounds_of_streams_follow(protocol):
    async with running_gateway(protocol, stub=TICKING) as stack:
        client = stack.client()
        idle = Many(client)
        outcome = idle.start(make_request())
        (await outcome).assert_complete(make_request())
        reconfigure(stack, protocol, limits={"max_streams": 1})
        refused = await generate(client, make_request())
        assert refused.reason is Reason.TOO_MANY_STREAMS
        reconfigure(stack, protocol, limits={"idle_stream_timeout_s": 0.05})
        with pytest.raises(grpc.aio.AioRpcError, match="idle"):
            await idle.task
        idle.half_close()
        (await generate(client, make_request())).assert_complete(make_request())


async def test_a_long_stream_on_a_removed_rank_ends_in_its_own_time(protocol):
    async with running_gateway(protocol, ranks=3, stub=TICKING) as stack:
        client = stack.client()
        long = Generation(client, make_request(max_tokens=300, data_parallel_rank=2))
        await long.first_token()
        reconfigure(stack, protocol, 2)
        refused = await generate(client, make_request(data_parallel_rank=2))
        assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.PINNED_RANK_UNAVAILABLE)
        assert [rank.state for rank in await stack.list_ranks()][2] == gateway_pb2.RANK_STATE_DRAINING
        for number in range(10):
            request = make_request(make_prompt(9, number))
            (await generate(client, request)).assert_complete(request)
        assert stack.table.in_flight[2] == 1
        (await long.done()).assert_complete(long.request)
        await until(lambda: stack.table.size == 2, "it to be gone")
        assert len(await stack.list_ranks()) == 2
        # Its numbers stay with it: the page must not fail for a rank that is gone.
        registry = CollectorRegistry()
        registry.register(stack.gateway.metrics)
        page = generate_latest(registry).decode()
        assert 'rankgate_rank_requests_in_flight{rank="1"}' in page
        assert 'rankgate_rank_requests_in_flight{rank="2"}' not in page
        stack.group.ranks[2].engine.scheduler.check()


async def test_an_address_that_is_taken_changes_nothing(protocol):
    async with running_gateway(protocol, stub=TICKING) as stack:
        gateway = stack.gateway
        (group,) = gateway.config.groups
        taken = gateway.link.handshake_addresses[0]
        bad = msgspec.structs.replace(group, name="other", handshake=taken)
        before = gateway.config
        wanted = msgspec.structs.replace(
            before, groups=(group, bad), policy=msgspec.structs.replace(before.policy, preset="p2c")
        )
        with pytest.raises(OSError, match="can't bind"):
            gateway.reconfigure(wanted)
        assert gateway.config is before
        assert stack.router.layout is before
        assert stack.router._parts.policy.resolved.picker == "argmin"
        request = make_request()
        (await generate(stack.client(), request)).assert_complete(request)


async def test_the_running_configuration_is_shown(protocol):
    async with running_gateway(protocol) as stack:
        admin = stack.admin()
        before = await admin.GetEffectiveConfig(admin_pb2.GetEffectiveConfigRequest())
        assert not before.HasField("last_reload")
        reconfigure(stack, protocol, policy={"preset": "p2c"})
        after = await admin.GetEffectiveConfig(admin_pb2.GetEffectiveConfigRequest())
        assert after.config["policy"]["preset"] == "p2c"
        assert after.sha256 != before.sha256
        with pytest.raises(grpc.aio.AioRpcError, match="not started from a configuration file"):
            await admin.ReloadConfig(admin_pb2.ReloadConfigRequest())


async def test_a_gateway_that_stops_takes_no_other_configuration(protocol):
    async with running_gateway(protocol) as stack:
        stack.gateway.driver.is_stopping = True
        with pytest.raises(OSError, match="stopping"):
            reconfigure(stack, protocol, 3)
        stack.gateway.driver.is_stopping = False

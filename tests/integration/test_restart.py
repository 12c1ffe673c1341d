"""A gateway that is killed and started again on the same ports: the ranks don't notice."""

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import msgspec
import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.group import StubGroup
from engine_stub.rank import RankPhase
from gateway.v1 import gateway_pb2_grpc
from tests.support.calls import Generation, generate, make_prompt, make_request
from tests.support.stack import gateway_config, observed, running, stub_config, until

REPOSITORY = Path(__file__).parents[2]
RANKS = 3


@pytest.fixture
def state_dir():
    """A short path: it holds unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="rg-"))
    yield path / "state"
    shutil.rmtree(path)


def free_addresses(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


class GatewayProcess:
    """`rankgate serve` as a process of its own, to be killed."""

    def __init__(self, config, directory):
        path = directory / "gateway.json"
        path.write_bytes(msgspec.json.encode(config))
        self._log = (directory / "gateway.log").open("wb")
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(path)]
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdout=self._log, stderr=self._log)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._log.close()


async def test_a_killed_gateway_re_attaches_aborts_its_orphans_and_serves_on(protocol, state_dir, tmp_path):
    grpc_address, admin_address, handshake = free_addresses(3)
    config = gateway_config(
        protocol,
        RANKS,
        listen={"grpc": grpc_address, "admin": admin_address},
        group={"handshake": f"tcp://{handshake}"},
        state_dir=str(state_dir),
    )
    stub = stub_config(strict_vllm=True, time_scale=1.0, step_time=StepTime(fixed_ms=2.0))
    first = GatewayProcess(config, tmp_path)
    try:
        async with StubGroup(protocol, f"tcp://{handshake}", ranks=RANKS, config=stub, record_limit=4096) as group:
            orphans = await killed_in_mid_stream(first, group, grpc_address)
            assert {wire_id for rank in group.ranks for wire_id in rank.live_ids} == orphans, "the ranks go on"
            async with running(config) as stack:
                await stack.all_ready()
                async with observed(stack, group):
                    await serves_on(stack, orphans)
                handshakes = stack.gateway.link.counters.handshakes
                assert handshakes["reattached"] == RANKS
                assert "hello" not in handshakes
            assert [rank.incarnation for rank in group.ranks] == [1] * RANKS
            assert all(rank.phase is RankPhase.SERVING for rank in group.ranks)
            assert [rank.records.bad for rank in group.ranks] == [0] * RANKS
    finally:
        first.kill()


async def killed_in_mid_stream(first, group, address):
    """Let requests run, kill the gateway, and return the ids that it left at the ranks."""
    await group.ready()
    async with grpc.aio.insecure_channel(address, options=[("grpc.initial_reconnect_backoff_ms", 100)]) as channel:
        client = gateway_pb2_grpc.GatewayServiceStub(channel)
        warm = make_request(make_prompt(3), 2)
        (await generate(client, warm, wait_for_ready=True)).assert_complete(warm)
        running_calls = [Generation(client, make_request(make_prompt(4, n), 10_000)) for n in range(9)]
        await asyncio.gather(*(call.first_token() for call in running_calls))
        orphans = {wire_id for rank in group.ranks for wire_id in rank.live_ids}
        assert len(orphans) == 9
        first.kill()
        for call in running_calls:
            outcome = await call.done()
            assert outcome.code is grpc.StatusCode.UNAVAILABLE
            outcome.assert_prefix(call.request)
    return orphans


async def serves_on(stack, orphans):
    client = stack.client()
    requests = [make_request(make_prompt(5, n), 12) for n in range(30)]
    outcomes = await asyncio.gather(*(generate(client, request) for request in requests))
    for request, outcome in zip(requests, outcomes, strict=True):
        outcome.assert_complete(request)
    assert {outcome.finish.rank for outcome in outcomes} == set(range(RANKS))
    await until(lambda: not any(rank.live_ids for rank in stack.ranks), "the orphans to be aborted")
    assert orphans <= {wire_id for rank in stack.ranks for wire_id in rank.received_aborts}
    counters = stack.router.counters
    assert counters.orphan_rows > 0
    assert counters.reaborts >= len(orphans)
    adds = [request.id for rank in stack.ranks for request in rank.received_adds]
    assert len(set(adds)) == len(adds)

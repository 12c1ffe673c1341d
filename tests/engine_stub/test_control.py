import asyncio

import msgspec
import pytest
import zmq

from engine_stub.config import StubConfig
from engine_stub.control import ControlServer
from engine_stub.control_client import ControlUnreachable, ask
from engine_stub.group import StubGroup
from engine_stub.rank import RankPhase
from tests.support.raw_gateway import RawGateway


@pytest.fixture
async def served():
    async with (
        RawGateway("tokenspeed") as gateway,
        StubGroup("tokenspeed", gateway.address, ranks=2, config=StubConfig(time_scale=0.0)) as group,
        ControlServer(group, "tcp://127.0.0.1:*") as server,
    ):
        await group.ready()
        await gateway.registered(2)
        task = asyncio.create_task(server.run())
        yield gateway, group, server
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def asked(server, **request):
    return await asyncio.to_thread(ask, server.address, request, 10)


async def test_state_shows_every_rank(served):
    gateway, group, server = served
    await gateway.add(1, "a", [1, 2, 3], 5)
    await gateway.abort(1, "b")
    await gateway.send(1, b"\x09", b"")
    await gateway.collect(1, "a")
    await group.ranks[1].wait_until(lambda: group.ranks[1].records.bad == 1)
    reply = await asked(server, op="state")
    assert reply["ok"]
    idle, used = reply["ranks"]
    assert (idle["rank"], idle["phase"], idle["tokens_generated"], idle["live"]) == (0, "serving", 0, [])
    assert (used["tokens_generated"], used["adds_received"], used["aborts_received"], used["steps"]) == (5, 1, 1, 5)
    assert used["kv_blocks"] == {"used": 0, "total": 25000, "high_water": 1}
    assert used["bad_inputs"]["count"] == 1
    assert "09" in used["bad_inputs"]["latest"][0]["reason"]
    assert (await asked(server, op="state", rank=1))["ranks"] == [used]


async def test_faults_can_be_switched_on_one_rank_or_all(served):
    _, group, server = served
    reply = await asked(server, op="faults", rank=0, set={"silent": True, "die_at_token": 7})
    assert reply["ranks"][0]["faults"]["silent"] is True
    assert (group.ranks[0].faults.die_at_token, group.ranks[1].faults.silent) == (7, False)
    await asked(server, op="faults", set={"silent": False})
    assert [rank.faults.silent for rank in group.ranks] == [False, False]
    assert group.ranks[0].faults.die_at_token == 7


async def test_kill_and_restart(served):
    gateway, group, server = served
    assert (await asked(server, op="kill", rank=1))["ranks"][0]["phase"] == "dead"
    assert group.ranks[0].phase is RankPhase.SERVING
    assert (await asked(server, op="restart", rank=1))["ranks"][0]["incarnation"] == 2
    await group.ranks[1].ready()
    await gateway.registered(3)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"op": "state", "rank": 2}, "no rank 2: 0..1"),
        ({"op": "kill"}, "kill needs a rank"),
        ({"op": "reboot"}, "op"),
        ({"op": "state", "extra": 1}, "extra"),
        ({"op": "faults", "rank": 0, "set": {"stal": True}}, "stal"),
    ],
)
async def test_bad_requests_are_answered(served, request_, message):
    _, group, server = served
    reply = await server.handle(msgspec.json.encode(request_))
    assert not reply.ok
    assert message in reply.error
    assert not (await server.handle(b"{")).ok
    assert all(rank.phase is RankPhase.SERVING for rank in group.ranks)


def test_only_local_addresses_are_bound():
    with pytest.raises(ValueError, match="not local"):
        ControlServer(None, "tcp://0.0.0.0:5555")


async def test_an_address_in_use_is_an_error(served):
    _, group, server = served
    with pytest.raises(zmq.ZMQError, match="in use"):
        ControlServer(group, server.address)


def test_nobody_there():
    with pytest.raises(ControlUnreachable, match="no answer"):
        ask("tcp://127.0.0.1:1", {"op": "state"}, 0.05)

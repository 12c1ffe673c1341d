"""A restarted gateway finds its running ranks without a handshake."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.core.events import BatchReceived
from gateway.edges.engine_link import LinkState
from gateway.edges.state_store import StateStore, StateStoreError
from tests.support.link_harness import LinkHarness, make_config, nothing_left_behind, request
from tests.support.raw_engine import RawEngine, unpack, until

REPOSITORY = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def gateway(tmp_path, **settings) -> AsyncIterator[LinkHarness]:
    """One gateway process's life; the engines live on."""
    harness = LinkHarness(make_config(**settings), StateStore(tmp_path / "state"))
    await harness.start()
    try:
        yield harness
    finally:
        await harness.close()


@pytest.fixture
def engines():
    started: list[RawEngine] = []
    yield started
    for engine in started:
        engine.close()


async def joined(harness, engines, index=0, address=None) -> RawEngine:
    engine = RawEngine(address or harness.link.handshake_addresses[0], index, harness.config.groups[0].protocol)
    engines.append(engine)
    count = len(harness.joins)
    await engine.join()
    await until(lambda: len(harness.joins) > count)
    return engine


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("family", ["tokenspeed", "vllm"])
async def test_running_ranks_are_re_attached_with_a_new_incarnation(tmp_path, engines, family, transport):
    settings = {"family": family, "transport": transport}
    async with gateway(tmp_path, **settings) as first:
        running = [await joined(first, engines, index) for index in (0, 1)]
        info = first.joins[0].info
    for engine in running:
        engine.push_rows([(f"orphan-{engine.index}", [1], "")])
    async with gateway(tmp_path, **settings) as second:
        await until(lambda: len(second.joins) == 2)
        assert {(join.rank, join.incarnation, join.reattached) for join in second.joins} == {(0, 2, True), (1, 2, True)}
        assert second.joins[0].info == info
        assert "hello" not in second.link.counters.handshakes
        for engine in running:
            engine.push_rows([(f"late-{engine.index}", [1], "")])
            second.link.send(engine.index, 2, request(f"new-{engine.index}"))
            frames = await engine.receive()
            assert unpack(frames[1])[1 if family == "tokenspeed" else 0] == f"new-{engine.index}"
        await until(lambda: {"late-0", "late-1"} <= set(second.rows))
        assert {event.incarnation for event in second.of(BatchReceived)} == {2}
        running[0].close()
        await until(lambda: len(second.losses) == 1)
    async with gateway(tmp_path, **settings) as third:
        await until(lambda: len(third.joins) == 1)
        assert (third.joins[0].rank, third.joins[0].incarnation) == (1, 3)
        assert third.link.state_of(0) is LinkState.DETACHED


async def test_a_rank_that_was_restarted_meanwhile_shakes_hands(tmp_path, engines):
    async with gateway(tmp_path) as first:
        engine = await joined(first, engines)
        old = set(engine.addresses)
    engine.close()
    async with gateway(tmp_path) as second:
        assert second.link.state_of(0) is LinkState.DETACHED
        successor = await joined(second, engines)
        assert not old & set(successor.addresses)
        assert [(join.incarnation, join.reattached) for join in second.joins] == [(2, False)]


async def test_one_connection_alone_re_attaches_nobody(tmp_path, engines):
    async with gateway(tmp_path) as first:
        engine = await joined(first, engines)
    engine.input.close()
    async with gateway(tmp_path) as second:
        await until(lambda: second.link._ranks[0]._channel.output.connections.is_up)
        engine.push_rows([("a", [1], "")])
        await until(lambda: second.link.counters.early_frames == 1)
        assert not second.joins
        engine.connect_input()
        await until(lambda: len(second.joins) == 1)


async def test_a_rank_that_was_loading_its_model_goes_on_with_its_handshake(tmp_path, engines):
    handshake = f"ipc://{tmp_path}/h"
    async with gateway(tmp_path, family="vllm", handshake=handshake):
        engine = RawEngine(handshake, 0, "vllm")
        engines.append(engine)
        engine.hello()
        await engine.init()
    async with gateway(tmp_path, family="vllm", handshake=handshake) as second:
        engine.register()
        await until(lambda: second.link.counters.handshakes.get("registered") == 1)
    async with gateway(tmp_path, family="vllm", handshake=handshake) as third:
        engine.connect_output()
        engine.ready()
        await until(lambda: len(third.joins) == 1)
        assert (third.joins[0].incarnation, third.joins[0].reattached) == (1, False)
        third.link.send(0, 1, request("a"))
        await engine.receive()


async def test_a_rank_that_announced_its_end_is_not_awaited_and_its_number_stays_used(tmp_path, engines):
    async with gateway(tmp_path) as first:
        engine = await joined(first, engines)
        engine.push(b"ENGINE_CORE_DEAD")
        await until(lambda: len(first.losses) == 1)
    async with gateway(tmp_path) as second:
        assert second.link.state_of(0) is LinkState.EMPTY
        await joined(second, engines)
        assert second.joins[0].incarnation == 2


def edit_record(tmp_path, change) -> None:
    (path,) = (tmp_path / "state").glob("rank-main-*-0.json")
    record = msgspec.json.decode(path.read_bytes())
    change(record)
    path.write_bytes(msgspec.json.encode(record))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda record: record.update(format=99), "corrupt"),
        (lambda record: record.update(incarnation="many"), "corrupt"),
        (lambda record: record.update(surprise=1), "corrupt"),
        (lambda record: record.update(protocol="vllm"), "foreign"),
        (lambda record: record.update(engine_index=7), "foreign"),
        (lambda record: record.update(group="other"), "foreign"),
        (lambda record: record.update(registration="wQ=="), "not_restored"),
        (lambda record: record.update(input_address="tcp://0.0.0.0:1"), "not_restored"),
        (lambda record: record.update(input_address="tcp://nowhere"), "not_restored"),
        (lambda record: record.update(output_address="udp://?"), "not_restored"),
        (lambda record: record.update(input_address="ipc:///proc/self/x"), "not_restored"),
        (lambda record: record.update(input_address="ipc:///tmp/x"), "not_restored"),
    ],
)
async def test_a_record_that_cant_be_used_is_reported_and_the_rank_shakes_hands(tmp_path, engines, change, fault):
    async with gateway(tmp_path) as first:
        engine = await joined(first, engines)
    engine.close()
    edit_record(tmp_path, change)
    with nothing_left_behind():
        async with gateway(tmp_path) as second:
            assert second.link.counters.state_faults == {fault: 1}
            assert second.link.state_of(0) is LinkState.EMPTY
    async with gateway(tmp_path) as third:
        await joined(third, engines)


async def test_a_truncated_record_is_reported(tmp_path, engines):
    async with gateway(tmp_path) as first:
        await joined(first, engines)
    (path,) = (tmp_path / "state").glob("rank-main-*-0.json")
    path.write_bytes(path.read_bytes()[:40])
    async with gateway(tmp_path) as second:
        assert second.link.counters.state_faults == {"corrupt": 1}
        assert "rank-main" in second.logged("state_record_ignored")[0]["problem"]


async def test_a_recorded_port_that_is_taken_costs_only_that_rank(tmp_path, engines):
    async with gateway(tmp_path, transport="tcp") as first:
        taken = await joined(first, engines, 0)
        await joined(first, engines, 1)
        host, port = taken.addresses[0].removeprefix("tcp://").split(":")
    taken.close()
    with socket.create_server((host, int(port))):
        async with gateway(tmp_path, transport="tcp") as second:
            await until(lambda: len(second.joins) == 1)
            assert second.joins[0].rank == 1
            assert second.link.state_of(0) is LinkState.EMPTY
            await joined(second, engines, 0)


async def test_a_state_directory_serves_one_gateway(tmp_path):
    async with gateway(tmp_path):
        with nothing_left_behind(), pytest.raises(StateStoreError, match="another gateway"):
            async with gateway(tmp_path):
                pass
    async with gateway(tmp_path):
        pass


async def test_a_record_that_cant_be_written_is_counted_and_the_rank_joins(tmp_path, engines):
    async with gateway(tmp_path) as first:

        def full(record):
            raise OSError(28, "No space left on device")

        first.link._store.save = full
        await joined(first, engines)
        assert first.link.counters.state_faults["not_written"] >= 1


GATEWAY_PROCESS = """
import asyncio, sys
from pathlib import Path
from gateway.edges.state_store import StateStore
from tests.support.link_harness import LinkHarness, make_config

async def live():
    harness = LinkHarness(make_config(transport=sys.argv[2]), StateStore(Path(sys.argv[1])))
    await harness.start()
    print(harness.link.handshake_addresses[0], flush=True)
    while not harness.joins:
        await asyncio.sleep(0.005)
    print("joined", flush=True)
    await asyncio.sleep(60)

asyncio.run(live())
"""


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_killed_gateways_ranks_are_re_attached(tmp_path, engines, transport):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        GATEWAY_PROCESS,
        str(tmp_path / "state"),
        transport,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    try:
        address = (await process.stdout.readline()).decode().strip()
        engine = RawEngine(address)
        engines.append(engine)
        await engine.join()
        assert await process.stdout.readline() == b"joined\n"
    finally:
        process.kill()
        await process.communicate()
    async with gateway(tmp_path, transport=transport) as second:
        await until(lambda: len(second.joins) == 1)
        assert (second.joins[0].incarnation, second.joins[0].reattached) == (2, True)
        engine.push_rows([("a", [1], "")])
        await until(lambda: second.rows == ["a"])

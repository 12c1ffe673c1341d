"""What a process that starts again is asked for, with processes that the test plays."""

import asyncio
import json
import tempfile
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from gateway.processes import supervisor as module
from gateway.processes.plan import handshake_address
from gateway.processes.source import Source
from gateway.v1 import admin_pb2
from gateway.wire.handshake import encode_init
from tests.support.fake_children import FakeChild
from tests.support.grpc_edge import until

HELLO = msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": True})
READY = msgspec.msgpack.encode({"status": "READY", "local": True, "headless": True})
RANKS = 4


class Site:
    """A supervisor of two fake processes that all have all ranks."""

    def __init__(self, directory):
        self.directory = directory
        self.path = directory / "gateway.yaml"
        self.write(RANKS)
        source = Source(path=str(self.path))
        self.supervisor = module.Supervisor(source.load(), source, source.read(), directory)
        self.children = self.supervisor._children
        self._running = None

    def write(self, ranks):
        group = {"name": "g", "protocol": "vllm", "handshake": f"ipc://{self.directory}/front", "ranks": ranks}
        model = {"name": "m", "max_context_tokens": 4096, "vocab_size": 100}
        listen = {"transport": "fast", "grpc": "127.0.0.1:0", "metrics": None}
        config = {"version": 1, "processes": 2, "listen": listen, "model": model, "groups": [group]}
        self.path.write_text(json.dumps(config))

    async def start(self):
        await self.supervisor.start()
        self._running = asyncio.create_task(self.supervisor.run())

    async def close(self):
        self.supervisor.on_stop()
        assert await asyncio.wait_for(self._running, 20) == 0
        await self.supervisor.close()

    async def tell(self, method, rank):
        """The first process was called with it."""
        request = getattr(admin_pb2, f"{method}Request")(rank=rank).SerializeToString()
        body = {"method": method, "request": request, "rank": rank}
        await self.children[0].handlers["everywhere"](body)

    async def scale_in(self, ranks):
        self.write(ranks)
        outcome = await self.supervisor.reload("SIGHUP")
        assert outcome.result == "applied"

    def kill(self, process):
        """Once it is up again, `restarted` holds."""
        self.children[process].kill()

    async def restarted(self, process, starts=2):
        await until(lambda: self.children[process].starts == starts)
        await asyncio.sleep(0.05)
        assert self.children[process].starts == starts, "and it stays up"


@pytest.fixture
async def site(monkeypatch):
    monkeypatch.setattr(module, "Child", FakeChild)
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.001)
    with tempfile.TemporaryDirectory(prefix="rgs-") as directory:
        made = Site(Path(directory))
        await made.start()
        yield made
        await made.close()


async def test_what_is_drained_is_so_in_a_process_that_starts_again(site):
    await site.tell("DrainRank", 1)
    await site.tell("DrainRank", 3)
    await site.tell("UndrainRank", 1)
    site.kill(1)
    await site.restarted(1)
    assert site.children[1].drained == [3]


async def test_a_process_starts_again_after_a_drained_rank_was_removed(site, monkeypatch):
    await site.tell("DrainRank", 1)
    await site.tell("DrainRank", 3)
    await site.scale_in(3)
    monkeypatch.setattr(FakeChild, "rank_count", 3)
    site.kill(1)
    await site.restarted(1)
    assert site.children[1].drained == [1]


async def test_a_process_starts_again_after_a_removed_rank_was_drained(site, monkeypatch):
    """Those that run know the rank for as long as it ends its work."""
    await site.scale_in(3)
    await site.tell("DrainRank", 3)
    monkeypatch.setattr(FakeChild, "rank_count", 3)
    site.kill(1)
    await site.restarted(1)
    assert site.children[1].drained == []


async def test_a_drain_ends_with_the_restart_of_its_rank(site):
    await site.tell("DrainRank", 1)
    await site.tell("DrainRank", 2)
    context = zmq.asyncio.Context()
    try:
        listening = []
        for process in range(2):
            listening.append(context.socket(zmq.ROUTER))
            listening[-1].bind(handshake_address(site.directory, 0, process))
        identity = (2).to_bytes(2, "little")
        rank = context.socket(zmq.DEALER)
        rank.setsockopt(zmq.IDENTITY, identity)
        rank.connect(f"ipc://{site.directory}/front")
        async with asyncio.timeout(20):
            await rank.send(HELLO)
            for socket in listening:
                assert await socket.recv_multipart() == [identity, HELLO]
                await socket.send_multipart([identity, encode_init(["ipc://in"], ["ipc://out"])])
            await rank.recv()
            await rank.send(READY)
            for socket in listening:
                assert await socket.recv_multipart() == [identity, READY]
    finally:
        context.destroy(0)
    site.kill(1)
    await site.restarted(1)
    assert site.children[1].drained == [1]


async def test_a_rank_that_leaves_and_comes_back_is_still_drained(site):
    """In the processes that run it is, unless a new engine has it."""
    await site.tell("DrainRank", 3)
    await site.scale_in(3)
    await site.scale_in(4)
    site.kill(1)
    await site.restarted(1)
    assert site.children[1].drained == [3]


async def test_a_process_that_starts_drains_before_it_waits_for_a_reload(site):
    """It serves already: what is drained must not get work for as long as a reload takes."""
    await site.tell("DrainRank", 1)
    gate = site.children[0].gates["check"] = asyncio.Event()
    site.write(RANKS + 1)
    reload = asyncio.create_task(site.supervisor.reload("SIGHUP"))
    await until(lambda: "check" in [what for what, _ in site.children[0].asked])
    site.kill(1)
    await until(lambda: site.children[1].starts == 2 and site.children[1].drained == [1])
    assert not reload.done()
    gate.set()
    await reload
    await site.restarted(1)
    assert site.children[1].drained == [1]


async def test_a_drain_that_is_refused_ends_no_process(site):
    await site.tell("DrainRank", 0)
    await site.tell("DrainRank", 2)
    site.children[1].rank_count = 1  # it has taken a reload that the others have not
    site.kill(1)
    await site.restarted(1)
    assert site.children[1].drained == [0, 2]


async def test_a_process_that_hangs_keeps_the_others_from_no_stop(site):
    gate = site.children[0].gates["stop"] = asyncio.Event()
    site.supervisor.on_stop()
    await until(lambda: ("stop", False) in site.children[1].asked)
    assert site.children[0].is_up
    gate.set()


async def test_drains_come_and_go_while_a_process_is_told_of_them(site):
    await site.tell("DrainRank", 0)
    await site.tell("DrainRank", 1)
    child = site.children[1]
    gate = child.gates["apply"] = asyncio.Event()
    site.kill(1)
    await until(lambda: child.starts == 2 and child.drained == [0])
    others = [asyncio.create_task(site.tell("DrainRank", 2)), asyncio.create_task(site.tell("UndrainRank", 1))]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*others)
    await site.restarted(1)
    assert set(child.drained) == {0, 2}
    site.kill(1)
    await site.restarted(1, starts=3)
    assert set(child.drained) == {0, 2}

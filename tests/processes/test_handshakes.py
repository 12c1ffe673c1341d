"""The supervisor's part of a rank's handshake, between a rank and processes that the test plays."""

import asyncio
import errno
import tempfile
from pathlib import Path

import msgspec
import pytest
import structlog
import zmq
import zmq.asyncio

from gateway.config.checks import MAX_RANKS
from gateway.edges.engine_link.connections import source_fd
from gateway.processes.handshakes import HandshakeRelay
from gateway.processes.plan import handshake_address
from gateway.wire.handshake import encode_init
from tests.processes.test_plan import config_of
from tests.support.grpc_edge import until

HELLO = msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": True})
READY = msgspec.msgpack.encode({"status": "READY", "local": True, "headless": True})
WAIT_S = 20.0
QUIET_S = 0.3


class Site:
    """A relay for two processes; `listen` plays one of them, `rank` an engine. `started_ranks` are those that it tells."""

    def __init__(self, protocol):
        self._temporary = tempfile.TemporaryDirectory(prefix="rgp-")
        self.directory = Path(self._temporary.name)
        self.context = zmq.asyncio.Context()
        self._sockets = []
        config = config_of(protocol)
        group = msgspec.structs.replace(config.groups[0], handshake=f"ipc://{self.directory}/front")
        self.started_ranks = []
        config = msgspec.structs.replace(config, groups=(group, *config.groups[1:]))
        self.relay = HandshakeRelay(config, self.directory, self.started_ranks.append)
        self.relay.configure(self.relay.config)

    async def close(self):
        await self.relay.close()
        for socket in self._sockets:
            socket.close(0)
        self.context.destroy(0)
        self._temporary.cleanup()

    def open(self, kind):
        self._sockets.append(self.context.socket(kind))
        return self._sockets[-1]

    def listen(self, process, number=0):
        socket = self.open(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(handshake_address(self.directory, number, process))
        self.relay.started(process)
        return socket

    def stop(self, process, socket):
        socket.close(0)
        Path(handshake_address(self.directory, 0, process).removeprefix("ipc://")).unlink(missing_ok=True)
        self.relay.died(process)

    def rank(self, index=0, number=0):
        socket = self.open(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, index.to_bytes(2, "little"))
        socket.connect(self.relay.addresses[number])
        return socket


@pytest.fixture
async def make_site():
    sites = []

    def make(protocol):
        sites.append(Site(protocol))
        return sites[-1]

    yield make
    for site in sites:
        await site.close()


async def heard(socket):
    return await asyncio.wait_for(socket.recv_multipart(), WAIT_S)


async def is_quiet(socket):
    return not await socket.poll(QUIET_S * 1000)


def answer(name, **more):
    return encode_init([f"ipc://{name}-in"], [f"ipc://{name}-out"], **more)


async def inputs_of(rank):
    (init,) = await heard(rank)
    return msgspec.msgpack.decode(init)["addresses"]["inputs"]


async def test_a_rank_is_answered_when_all_have_answered_in_their_order(make_site):
    site = make_site("vllm")
    first, second, rank = site.listen(0), site.listen(1), site.rank(3)
    await rank.send(HELLO)
    identity = (3).to_bytes(2, "little")
    assert await heard(first) == [identity, HELLO]
    assert await heard(second) == [identity, HELLO]
    await second.send_multipart([identity, answer("b")])
    assert await is_quiet(rank)
    await first.send_multipart([identity, answer("a", coordinator_input="ipc://c", coordinator_output="ipc://d")])
    assert await inputs_of(rank) == ["ipc://a-in", "ipc://b-in"]
    await rank.send(READY)
    assert await heard(first) == [identity, READY]
    assert await heard(second) == [identity, READY]


async def test_a_tokenspeed_rank_is_its_own_process_business(make_site):
    site = make_site("tokenspeed")
    first, second, rank = site.listen(0), site.listen(1), site.rank(3)
    await rank.send(HELLO)
    identity, _ = await heard(second)
    init = answer("b")
    await second.send_multipart([identity, init])
    assert await heard(rank) == [init], "as it is"
    await rank.send(READY)
    assert await heard(second) == [identity, READY]
    assert await is_quiet(first)


async def test_who_starts_later_hears_of_a_rank_that_waits_once(make_site):
    site = make_site("vllm")
    rank, first = site.rank(), site.listen(0)
    await rank.send(HELLO)
    identity, _ = await heard(first)
    await first.send_multipart([identity, answer("a")])
    second = site.listen(1)
    assert await heard(second) == [identity, HELLO]
    site.stop(1, second)
    second = site.listen(1)
    assert await heard(second) == [identity, HELLO]
    assert await is_quiet(second), "twice would change its addresses"
    assert await is_quiet(first), "it has answered"
    await second.send_multipart([identity, answer("b")])
    assert await inputs_of(rank) == ["ipc://a-in", "ipc://b-in"]


async def test_what_waited_for_a_process_that_was_dying_does_not_arrive_as_well(make_site):
    site = make_site("vllm")
    first, second, rank = site.listen(0), site.listen(1), site.rank()
    site.stop(1, second)
    site.relay.started(1)  # nobody has noticed yet
    await rank.send(HELLO)
    identity, _ = await heard(first)
    site.relay.died(1)
    second = site.listen(1)
    assert await heard(second) == [identity, HELLO]
    assert not await second.poll(1500), "twice would change its addresses"


async def shake_hands(site, rank, listening):
    await rank.send(HELLO)
    for process, socket in listening.items():
        identity, _ = await heard(socket)
        await socket.send_multipart([identity, answer(process)])
    await inputs_of(rank)
    return identity


async def test_a_rank_that_has_started_is_told_once(make_site):
    site = make_site("vllm")
    listening = {process: site.listen(process) for process in range(2)}
    ranks = [site.rank(index) for index in (2, 4)]
    for rank in ranks:
        identity = await shake_hands(site, rank, listening)
        for _ in range(2):
            await rank.send(READY)
            for socket in listening.values():
                assert await heard(socket) == [identity, READY]
    assert site.started_ranks == [2], "place 4 is none of the group's, and could be another group's first rank"
    again = site.rank(2)
    await again.send(HELLO)
    for socket in listening.values():
        await heard(socket)
    await again.send(READY)
    for socket in listening.values():
        await heard(socket)
    assert site.started_ranks == [2], "who was told no addresses has not started"
    await shake_hands(site, again, listening)
    await again.send(READY)
    for socket in listening.values():
        await heard(socket)
    assert site.started_ranks == [2, 2]


async def test_a_rank_is_told_by_its_number_through_all_groups(make_site):
    site = make_site("vllm")
    config = site.relay.config
    more = msgspec.structs.replace(config.groups[0], name="more", handshake=f"ipc://{site.directory}/second")
    site.relay.configure(msgspec.structs.replace(config, groups=(*config.groups, more)))
    listening = {process: site.listen(process, number=1) for process in range(2)}
    rank = site.rank(3, number=1)
    await shake_hands(site, rank, listening)
    await rank.send(READY)
    for socket in listening.values():
        await heard(socket)
    assert site.started_ranks == [7]


async def test_ready_is_repeated_to_who_was_not_there(make_site):
    site = make_site("vllm")
    first, second, rank = site.listen(0), site.listen(1), site.rank()
    identity = await shake_hands(site, rank, {0: first, 1: second})
    site.stop(1, second)
    await rank.send(READY)
    assert await heard(first) == [identity, READY]
    second = site.listen(1)
    assert await heard(second) == [identity, READY]
    site.relay.started(1)
    assert await is_quiet(second), "once"
    assert await is_quiet(first)


async def test_ready_is_repeated_to_who_died_over_it_but_not_to_who_had_it_for_long(make_site, monkeypatch):
    site = make_site("vllm")
    first, second, rank = site.listen(0), site.listen(1), site.rank()
    identity = await shake_hands(site, rank, {0: first, 1: second})
    await rank.send(READY)
    assert await heard(first) == await heard(second) == [identity, READY]
    site.stop(1, second)
    second = site.listen(1)
    assert await heard(second) == [identity, READY]
    monkeypatch.setattr("gateway.processes.handshakes._SETTLE_S", 0.0)
    site.stop(1, second)
    second = site.listen(1)
    assert await is_quiet(second)


async def test_another_engine_comes_over_another_connection(make_site):
    """By that a process tells a second HELLO of one engine from the HELLO of the next one."""
    site = make_site("tokenspeed")
    listening = site.listen(0)

    async def connection():
        frames = await asyncio.wait_for(listening.recv_multipart(copy=False), WAIT_S)
        return source_fd(frames[0])

    rank = site.rank()
    await rank.send(HELLO)
    before = await connection()
    await rank.send(HELLO)
    assert await connection() == before
    other = site.rank()
    await other.send(HELLO)
    assert await connection() != before
    await listening.send_multipart([(0).to_bytes(2, "little"), answer("a")])
    assert await inputs_of(other) == ["ipc://a-in"]


@pytest.mark.parametrize(
    "frames", [[b"\xff"], [HELLO[:-1]], [b""], [b"x" * 70_000], [READY], [HELLO, b"trailing garbage"]]
)
async def test_what_is_no_handshake_reaches_nobody(make_site, frames):
    site = make_site("vllm")
    first, second, stray = site.listen(0), site.listen(1), site.rank(1)
    await stray.send_multipart(frames)
    rank = site.rank(2)
    await rank.send(HELLO)
    assert (await heard(first))[0] == (2).to_bytes(2, "little")
    assert (await heard(second))[0] == (2).to_bytes(2, "little")


async def test_an_index_that_no_rank_can_have_opens_nothing(make_site):
    site = make_site("vllm")
    first = site.listen(0)
    with structlog.testing.capture_logs() as lines:
        for index in (MAX_RANKS, 0xFFFF):
            await site.rank(index).send(HELLO)
        await site.rank(MAX_RANKS - 1).send(HELLO)
        assert (await heard(first))[0] == (MAX_RANKS - 1).to_bytes(2, "little")
        assert await is_quiet(first)
    assert [line["event"] for line in lines] == ["handshake_ignored"], "and is logged once in a while"
    assert lines[0]["why"] == "an index that no rank of the group can have"


async def test_what_is_ignored_is_logged_once_in_a_while(make_site, monkeypatch):
    site = make_site("vllm")
    first, stray = site.listen(0), site.rank(1)
    with structlog.testing.capture_logs() as lines:
        for _ in range(20):
            await stray.send(b"\xff")
        await stray.send(HELLO)
        await heard(first)
        assert len(lines) == 1
        monkeypatch.setattr(site.relay.limited_log, "_interval_s", 0.0)
        await stray.send(b"\xff")
        await stray.send(HELLO)
        await heard(first)
    assert [line.get("suppressed") for line in lines] == [None, 19]


@pytest.mark.parametrize("kind", ["new", "anew"])
async def test_a_socket_that_can_not_be_opened_ends_nothing(make_site, monkeypatch, kind):
    site = make_site("vllm")
    first, second = site.listen(0), site.listen(1)
    rank = site.rank(1)
    if kind == "anew":
        await rank.send(HELLO)
        await heard(first)
        await heard(second)
    failures = []
    with structlog.testing.capture_logs() as lines, monkeypatch.context() as patch:

        def fail(*_):
            failures.append(errno.EMFILE)
            raise zmq.ZMQError(errno.EMFILE)

        patch.setattr(site.relay.context, "socket", fail)
        if kind == "anew":
            site.relay.died(1)
            site.relay.started(1)
        else:
            await rank.send(HELLO)
            async with asyncio.timeout(WAIT_S):
                await until(lambda: len(failures) == 2)
            site.relay.died(0)
    assert {line["event"] for line in lines} == {"handshake_not_passed_on"}
    if kind == "new":
        site.relay.started(0)
        assert (await heard(first))[1] == HELLO
    site.relay.died(1)
    site.relay.started(1)
    assert (await heard(second))[1] == HELLO, "it is repeated"


async def test_an_address_in_use_changes_nothing(make_site):
    site = make_site("vllm")
    config = site.relay.config
    more = msgspec.structs.replace(config.groups[0], name="more", handshake=site.relay.addresses[0])
    with pytest.raises(OSError, match="in use"):
        site.relay.configure(msgspec.structs.replace(config, groups=(*config.groups, more)))
    assert len(site.relay.addresses) == 1
    assert site.relay.config is config
    more = msgspec.structs.replace(more, handshake=f"ipc://{site.directory}/second")
    site.relay.configure(msgspec.structs.replace(config, groups=(*config.groups, more)))
    assert len(site.relay.addresses) == 2
    site.relay.configure(config)
    assert len(site.relay.addresses) == 1

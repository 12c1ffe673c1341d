"""Messages over a pair of sockets."""

import asyncio
import socket

import pytest

from gateway.processes.peer import Peer, PeerError


@pytest.fixture
async def peers():
    async def double(number):
        return 2 * number

    async def fail(_):
        raise PeerError("no")

    async def break_down(_):
        raise ZeroDivisionError("defect")

    async def hang(_):
        await asyncio.Event().wait()

    left, right = socket.socketpair()
    handlers = {"double": double, "fail": fail, "break_down": break_down, "hang": hang}
    one, other = await Peer.open(left, {}), await Peer.open(right, handlers)
    yield one, other
    await one.close()
    await other.close()


async def test_answers_come_back_to_who_asked(peers):
    one, _ = peers
    assert await asyncio.gather(*(one.ask("double", number) for number in range(50))) == [2 * n for n in range(50)]


async def test_a_large_body_passes_whole(peers):
    one, _ = peers
    assert await one.ask("double", "x" * 3_000_000) == "x" * 6_000_000


@pytest.mark.parametrize(
    ("what", "text"), [("fail", "fail: no"), ("break_down", "ZeroDivisionError"), ("none", "none")]
)
async def test_what_goes_wrong_there_is_said_here(peers, what, text):
    one, _ = peers
    with pytest.raises(PeerError, match=text):
        await one.ask(what)
    assert await one.ask("double", 1) == 2, "the others go on"


async def test_who_asks_does_not_wait_for_ever(peers):
    one, _ = peers
    with pytest.raises(PeerError, match="no answer within"):
        await one.ask("hang", timeout_s=0.05)


async def test_the_end_of_the_other_side_ends_what_was_asked(peers):
    one, other = peers
    asked = asyncio.create_task(one.ask("hang"))
    await asyncio.sleep(0.05)
    await other.close()
    with pytest.raises(PeerError, match="gone"):
        await asked
    await asyncio.wait_for(one.closed.wait(), 5)
    with pytest.raises(PeerError, match="gone"):
        await one.ask("double", 1)

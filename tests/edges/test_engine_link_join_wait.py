"""What the log says of ranks that don't join, and of those that join with less than is configured."""

import asyncio
from pathlib import Path

import pytest
import structlog

from gateway.edges.engine_link import LinkState, join_wait
from gateway.edges.engine_link.channel import Addresses
from gateway.edges.engine_link.join_wait import HINT, JoinWait
from tests.support.link_harness import running_link
from tests.support.raw_engine import ready_response, until

STILL = "rank_still_joining"
ADDRESSES = Addresses("ipc://in", "ipc://out")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def wait_of(clock):
    logs = structlog.testing.LogCapture()
    log = structlog.wrap_logger(None, processors=[logs], wrapper_class=structlog.BoundLogger)
    return JoinWait(clock, log), logs.entries


def look_at(clock, wait, *seconds):
    for second in seconds:
        clock.now = 1000.0 + second
        wait.look(ADDRESSES, is_ready=True, is_registered=False)


def test_a_wait_is_told_after_a_minute_and_then_every_ten():
    clock = Clock()
    wait, lines = wait_of(clock)
    wait.begin()
    look_at(clock, wait, 0, 59.9)
    assert lines == []
    look_at(clock, wait, 60.04, 61, 660)
    assert lines == [
        {
            "log_level": "warning",
            "event": STILL,
            "waited_s": 60.0,
            "addresses": ["ipc://in", "ipc://out"],
            "ready": True,
            "registered": False,
            "hint": HINT,
        }
    ]
    look_at(clock, wait, 661, 1260, 1262)
    assert [line["waited_s"] for line in lines] == [60.0, 661.0, 1262.0]


def test_new_addresses_begin_a_new_wait():
    clock = Clock()
    wait, lines = wait_of(clock)
    wait.begin()
    look_at(clock, wait, 50)
    wait.begin()
    look_at(clock, wait, 70, 109)
    assert lines == []
    look_at(clock, wait, 110)
    assert [line["waited_s"] for line in lines] == [60.0]


def test_who_was_told_nothing_does_not_wait():
    clock = Clock()
    wait, lines = wait_of(clock)
    look_at(clock, wait, 1e6)
    assert lines == []


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(join_wait, "FIRST_S", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_a_rank_that_does_not_connect_is_reported_with_what_it_was_told():
    async with running_link(family="vllm", start_index=4) as harness:
        engine = harness.engine(5)
        engine.hello()
        addresses = await engine.init()
        await until(lambda: harness.logged(STILL))
        (line,) = harness.logged(STILL)
        assert (line["rank"], line["group"], line["engine_index"]) == (1, "main", 5)
        assert set(addresses) <= set(line["addresses"])
        assert len(line["addresses"]) == 4, "the coordinator's too"
        assert line["waited_s"] >= 0
        assert (line["ready"], line["registered"]) == (False, False)
        engine.register()
        engine.ready()
        await until(lambda: harness.joins)


@pytest.mark.usefixtures("impatient")
async def test_the_line_says_which_word_is_missing():
    async with running_link() as harness:
        ready, registered = harness.engine(0), harness.engine(1)
        for engine in (ready, registered):
            engine.hello()
            await engine.init()
        ready.ready()
        registered.register()
        await until(lambda: len(harness.logged(STILL)) == 2)
        assert {(line["rank"], line["ready"], line["registered"]) for line in harness.logged(STILL)} == {
            (0, True, False),
            (1, False, True),
        }


async def test_ranks_that_joined_were_lost_or_never_dialled_do_not_wait(monkeypatch):
    async with running_link(ranks=3) as harness:
        await harness.joined_engine(0)
        lost = await harness.joined_engine(1)
        lost.close()
        await until(lambda: harness.link.state_of(1) is LinkState.DETACHED)
        monkeypatch.setattr(join_wait, "FIRST_S", 0.0)
        for rank in harness.link._ranks:
            rank._wait.begin()
        await asyncio.sleep(0.05)
        assert not harness.logged(STILL)


@pytest.mark.usefixtures("impatient")
async def test_a_restarted_gateway_goes_on_waiting(tmp_path: Path):
    async with running_link(tmp_path / "state", ranks=1) as first:
        engine = first.engine(0)
        engine.hello()
        told = await engine.init()
    async with running_link(tmp_path / "state", ranks=1) as second:
        assert second.link.state_of(0) is LinkState.JOINING
        await until(lambda: second.logged(STILL))
        assert set(told) <= set(second.logged(STILL)[0]["addresses"])


@pytest.mark.parametrize(("tokens", "lines"), [(4095, 1), (4096, 0), (5000, 0)])
async def test_a_rank_with_a_smaller_context_than_is_configured_is_a_warning(tokens, lines):
    async with running_link() as harness:
        await harness.engine(1).join(ready_response("tokenspeed", max_model_len=tokens))
        await until(lambda: harness.joins)
        found = harness.logged("rank_context_smaller")
        assert len(found) == lines
        for line in found:
            assert (line["rank"], line["max_model_len"], line["max_context_tokens"]) == (1, tokens, 4096)

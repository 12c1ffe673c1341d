"""The driver: nested events wait, and one defect stays with the one it belongs to."""

import asyncio

import pytest

from gateway.core.effects import RankStateChanged
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import BatchReceived, RankJoined, RankLost, SendFailed
from gateway.core.router import Router
from gateway.edges.driver import Driver
from gateway.types import EngineBatch
from tests.support.core import NONCE, Bench, make_config, make_info


class Sink:
    def __init__(self, *, fails=False):
        self.fails = fails
        self.tokens = []
        self.ended = []

    def flush(self, sequence):
        if self.fails:
            raise RuntimeError("broken sink")
        self.tokens += sequence.take()[0]

    def end(self, request):
        self.ended.append(request)
        if self.fails:
            raise RuntimeError("broken sink")


class Link:
    def __init__(self, driver):
        self.driver = driver
        self.sent = []
        self.aborted = []
        self.fails_at = None

    def send(self, rank, incarnation, request):
        self.sent.append(request.wire_id)
        if self.fails_at == len(self.sent):
            self.driver.emit(SendFailed(rank, incarnation, request.wire_id, "unreachable"))

    def abort(self, rank, incarnation, wire_ids):
        self.aborted += wire_ids


class Site:
    def __init__(self, ranks=2):
        self.defects = []
        self.changes = []
        router = Router(make_config(ranks), nonce=NONCE, rng=lambda: 0.0)
        self.driver = Driver(
            router,
            on_defect=lambda where, error: self.defects.append((where, str(error))),
            on_rank_change=self.changes.append,
        )
        self.driver.link = self.link = Link(self.driver)
        for rank in range(ranks):
            self.driver.emit(RankJoined(rank=rank, incarnation=1, info=make_info()))

    def submit(self, sink, **more):
        return self.driver.submit(Bench(1, join=False).arrived(request_id=f"r{id(sink)}", sink=sink, **more))

    def batch(self, rank, *rows):
        ids, tokens, finish = zip(*rows, strict=True)
        self.driver.emit(BatchReceived(rank, 1, EngineBatch(ids=ids, token_ids=tokens, finish=finish)))


async def turn():
    for _ in range(3):
        await asyncio.sleep(0)


async def test_tokens_of_one_turn_leave_in_one_flush_and_the_end_follows():
    site = Site(1)
    sink = Sink()
    request = site.submit(sink)
    (wire_id,) = site.link.sent
    site.batch(0, (wire_id, [1], ""))
    site.batch(0, (wire_id, [2], "stop"))
    assert sink.tokens == []
    await turn()
    assert sink.tokens == [1, 2]
    assert sink.ended == [request]


async def test_a_send_that_fails_at_once_waits_for_the_other_dispatches():
    site = Site(2)
    site.link.fails_at = 1
    sink = Sink()
    request = site.submit(sink, n=2)
    await turn()
    # Both were handed to the link before the failure ended the request, so the second one is aborted after it.
    assert len(site.link.sent) == 2
    assert site.link.aborted == [site.link.sent[1]]
    assert request.error.reason is Reason.SEND_FAILED
    site.driver.router.check()


async def test_a_broken_sink_ends_its_own_request_only():
    site = Site(1)
    broken, healthy = Sink(fails=True), Sink()
    bad, good = site.submit(broken), site.submit(healthy)
    first, second = site.link.sent
    site.batch(0, (first, [1], ""), (second, [2], ""))
    await turn()
    assert bad.error.reason is Reason.INTERNAL
    assert site.link.aborted == [first]
    assert healthy.tokens == [2]
    site.batch(0, (second, [3], "stop"))
    await turn()
    assert healthy.tokens == [2, 3]
    assert good.error is None
    assert {where for where, _ in site.defects} == {"flush", "end"}
    site.driver.router.check()


async def test_one_failing_effect_does_not_swallow_the_next(monkeypatch):
    site = Site(1)
    sink = Sink()

    def refuse(change: RankStateChanged):
        raise RuntimeError("no log")

    monkeypatch.setattr(site.driver, "_on_rank_change", refuse)
    request = site.submit(sink)
    site.driver.emit(RankLost(0, 1, "disconnected"))
    await turn()
    assert sink.ended == [request]
    assert site.defects == [("RankStateChanged", "no log")]


async def test_ticks_go_on_after_a_defect(monkeypatch):
    site = Site(1)
    calls = []
    three = asyncio.Event()
    monkeypatch.setattr("gateway.edges.driver.TICK_INTERVAL_S", 0.001)

    def emit(event):
        calls.append(event)
        if len(calls) == 3:
            three.set()
        raise RuntimeError("tick failed")

    monkeypatch.setattr(site.driver, "emit", emit)
    task = asyncio.create_task(site.driver.run_ticks())
    await three.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(site.defects) >= 2


async def test_a_refused_request_holds_nothing():
    site = Site(1)
    with pytest.raises(GatewayError):
        site.submit(Sink(), pinned_rank=7)
    assert site.driver.router.live_count == 0
    assert site.link.sent == []

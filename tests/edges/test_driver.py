"""The driver: nested events wait, defects stay with the one they belong to, the core gets its early ticks."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.core.effects import AuditFound, RankStateChanged
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RankLost, RankRenewed, Tick
from gateway.h2.server.writes import Writes
from tests.support.core import Bench
from tests.support.driver_site import Sink, Site, turn


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


async def test_output_and_ends_are_written_before_they_are_accounted_for_and_who_answered_may_let_go(monkeypatch):
    site, order = Site(1), []

    class Writes:
        def hold(self):
            order.append("hold")

        def write_all(self):
            order.append("write")

    def account(request):
        order.append(("account", len(request.sequences)))
        raise ValueError("a defect")

    site.driver.writes = Writes()
    monkeypatch.setattr(site.driver, "_on_ended", account)
    sink = Sink()
    monkeypatch.setattr(sink, "end", lambda request: order.append("end") or request.answered())
    request = site.submit(sink)
    site.batch(0, (site.link.sent[0], [1], "stop"))
    await turn()
    assert order == ["hold", "end", "write", ("account", 1)]
    assert site.defects == [("end", "a defect")]
    assert request.sequences == [], "both are through with it"


async def test_two_defects_at_once_silence_nobody_else(monkeypatch):
    site = Site(1)
    writes = site.driver.writes = Writes(asyncio.get_running_loop())
    broken, healthy = Sink(fails=True), Sink()
    site.submit(broken)
    good = site.submit(healthy)
    first, second = site.link.sent
    handle = site.driver.router.handle
    site.batch(0, (first, [1], ""), (second, [2], "stop"))

    def fail(*_):
        raise AssertionError("the core is broken too")

    monkeypatch.setattr(site.driver.router, "handle", fail)
    await turn()
    monkeypatch.setattr(site.driver.router, "handle", handle)
    assert [where for where, _ in site.defects] == ["flush", "cancel"]
    assert (healthy.tokens, healthy.ended, site.reported) == ([2], [good], [good])
    site.submit(Sink(fails=True))
    site.batch(0, (site.link.sent[-1], [1], ""))
    monkeypatch.setattr(site.driver, "_on_defect", fail)
    await turn()
    written = []
    writes.soon(SimpleNamespace(write_out=lambda: written.append(1)))
    await turn()
    assert written, "whatever went wrong before"


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


async def test_a_rank_that_is_silent_is_aborted_renewed_and_asked_through_the_link():
    site = Site(1, failure={"silence": {"after_s": 0.4}})
    site.submit(Sink())
    (wire_id,) = site.link.sent
    now = 100.0
    site.driver.clock = lambda: now
    for _ in range(10):
        now += 0.1
        site.driver.emit(Tick())
    assert site.link.aborted == [wire_id]
    assert site.link.renewed == [(0, 1)]
    assert [change.new for change in site.changes] == ["READY", "SUSPECT", "LOST"]
    site.driver.emit(RankRenewed(0, 2))
    assert len(site.link.sent) == 2, "a probe"
    assert not site.defects


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

    def emit(event):
        calls.append(event)
        if len(calls) == 3:
            three.set()
        raise RuntimeError("tick failed")

    monkeypatch.setattr(site.driver, "emit", emit)
    site.driver.ticks.start()
    await three.wait()
    site.driver.ticks.stop()
    assert len(site.defects) >= 2


async def test_a_refused_request_holds_nothing():
    site = Site(1)
    with pytest.raises(GatewayError):
        site.submit(Sink(), pinned_rank=7)
    assert site.driver.router.live_count == 0
    assert site.link.sent == []


async def test_what_the_audit_finds_is_passed_on(monkeypatch):
    site = Site(1)
    finding = AuditFound("kind", 0, 1, 2, "subject")
    monkeypatch.setattr(site.driver.router, "handle", lambda event, now: [finding])
    site.driver.emit(RankLost(0, 9, "nothing"))
    assert site.findings == [finding]


async def test_a_refusal_does_not_swallow_what_the_same_event_let_go(monkeypatch):
    """With a queue any event may send queued requests to a rank: they are charged, so they must be sent."""
    site = Site(1)
    handle = site.driver.router.handle
    late = []

    def refusing(event, now):
        effects = handle(event, now)
        return [*effects, *late]

    monkeypatch.setattr(site.driver.router, "handle", refusing)
    site.submit(Sink())
    late += handle(Bench(1, join=False).arrived(request_id="queued", sink=Sink()), 0.0)[1:]
    with pytest.raises(GatewayError):
        site.submit(Sink(), pinned_rank=7)
    assert len(site.link.sent) == 2


class TestEarlyTicks:
    """The core may want the time before the next regular tick, e.g. when a batch's window ends."""

    @pytest.fixture
    def site(self, monkeypatch):
        site = Site(1)
        site.now, site.due, site.ticks = 100.0, [], []
        site.driver.clock = lambda: site.now
        handle = site.driver.router.handle

        def watched(event, now):
            if isinstance(event, Tick):
                site.ticks.append(now)
            return handle(event, now)

        monkeypatch.setattr(site.driver.router, "handle", watched)
        monkeypatch.setattr(site.driver.router, "next_due", lambda: site.due[0] if site.due else None)
        site.timers = []

        class Timer:
            def __init__(self, delay, function):
                self.delay, self.fire, self.is_cancelled = delay, function, False
                site.timers.append(self)

            def cancel(self):
                self.is_cancelled = True

        monkeypatch.setattr(site.driver, "_running_loop", lambda: SimpleNamespace(call_later=Timer))
        return site

    def poke(self, site):
        site.driver.emit(RankLost(0, 99, "nothing"))

    async def test_it_comes_when_the_core_named_it_and_once(self, site):
        site.due = [100.01]
        self.poke(site)
        self.poke(site)
        (timer,) = site.timers
        assert timer.delay == pytest.approx(0.01)
        site.now, site.due = 100.01, []
        timer.fire()
        assert site.ticks == [100.01]
        assert len(site.timers) == 1

    async def test_an_earlier_moment_replaces_a_later_one_and_not_the_other_way(self, site):
        for due in (100.04, 100.02, 100.03):
            site.due = [due]
            self.poke(site)
        assert [(round(timer.delay, 3), timer.is_cancelled) for timer in site.timers] == [(0.04, True), (0.02, False)]

    async def test_the_next_moment_is_asked_for_at_each_tick(self, site):
        site.due = [100.01]
        self.poke(site)
        site.now, site.due = 100.01, [100.02]
        site.timers[0].fire()
        assert len(site.timers) == 2
        assert site.timers[1].delay == pytest.approx(0.01)

    async def test_what_was_due_already_does_not_make_it_spin(self, site):
        site.due = [99.0]
        self.poke(site)
        assert site.timers == []

    async def test_a_timer_is_never_shorter_than_what_event_loops_can_tell_apart(self, site):
        site.due = [100.0001]
        self.poke(site)
        assert site.timers[0].delay == pytest.approx(0.001)

    async def test_a_tick_that_fails_is_a_defect_and_no_end(self, site, monkeypatch):
        site.due = [100.01]
        self.poke(site)

        def fail(event):
            raise RuntimeError("tick failed")

        monkeypatch.setattr(site.driver, "emit", fail)
        site.timers[0].fire()
        assert site.defects == [("tick", "tick failed")]


async def test_a_collecting_batch_leaves_when_its_window_ends_not_at_the_next_regular_tick():
    """No regular ticks here: only the core's own moment can send the second request."""
    batch = {"max_requests": 8, "window_ms": 5.0}
    site = Site(1, scheduling={"mode": "batch", "batch": batch})
    site.submit(Sink())
    assert len(site.link.sent) == 1  # an idle rank takes at once
    site.submit(Sink())
    assert len(site.link.sent) == 1  # a busy one collects
    async with asyncio.timeout(5):
        while len(site.link.sent) < 2:  # noqa: ASYNC110 - the timer sends no event
            await asyncio.sleep(0.001)
    site.driver.router.check()

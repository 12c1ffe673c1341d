"""The driver passes output and ends on in the core's order, whatever the sinks do meanwhile."""

import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RankLost
from gateway.core.lifecycle import Phase
from tests.support.driver_site import Shared, Sink, Site, turn

PRESERVE = {"ordering": "preserve"}


class TestOrder:
    async def test_output_and_ends_leave_in_the_order_of_the_cores_list(self):
        site, shared = Site(1), Shared()
        for name in ("a", "b", "c"):
            site.submit(shared.sink(name))
        a, b, c = site.link.sent
        site.batch(0, (a, [1], ""), (b, [2], "stop"))
        site.batch(0, (a, [3], "stop"), (c, [4], ""))
        await turn()
        # One output each; `b` ended before `c` had any.
        assert shared.seen == [("a", [1, 3]), ("b", [2]), ("b", "ok"), ("c", [4]), ("a", "ok")]

    async def test_a_preserved_order_reaches_the_sinks_undisturbed(self):
        site, shared = Site(1, **PRESERVE), Shared()
        for name in ("a", "b", "c"):
            site.submit(shared.sink(name))
        a, b, c = site.link.sent
        site.batch(0, (c, [3], "stop"), (b, [2], "error"))
        await turn()
        assert shared.seen == []
        site.batch(0, (a, [1], "stop"))
        await turn()
        assert shared.seen == [("a", [1]), ("a", "ok"), ("b", [2]), ("b", "ENGINE_ERROR"), ("c", [3]), ("c", "ok")]
        site.driver.router.check()

    async def test_each_end_is_told_once_to_the_log_and_to_the_sink(self):
        site, shared = Site(1), Shared()
        requests = [site.submit(shared.sink(name)) for name in ("a", "b")]
        site.batch(0, *((wire_id, [1], "stop") for wire_id in site.link.sent))
        await turn()
        assert site.reported == requests
        assert [entry for entry in shared.seen if entry[1] == "ok"] == [("a", "ok"), ("b", "ok")]


class TestHeldRequests:
    """With a preserved order a request can be settled and still wait for its turn."""

    async def test_cancelling_one_ends_it_and_lets_the_others_go_on(self):
        site, shared = Site(1, **PRESERVE), Shared()
        head, held, last = (site.submit(shared.sink(name)) for name in ("head", "held", "last"))
        first, second, third = site.link.sent
        site.batch(0, (second, [2], "stop"), (third, [3], "stop"))
        await turn()
        assert (held.phase, held.is_ended) == (Phase.SETTLED, False)
        site.driver.cancel(held, Reason.CANCELLED)
        assert held.is_ended
        await turn()
        assert shared.seen == [("held", "CANCELLED")]
        site.batch(0, (first, [1], "stop"))
        await turn()
        assert shared.seen[1:] == [("head", [1]), ("head", "ok"), ("last", [3]), ("last", "ok")]
        assert all(request.is_ended for request in (head, held, last))
        site.driver.router.check()

    async def test_cancelling_an_ended_one_is_no_event(self, monkeypatch):
        site = Site(1)
        request = site.submit(Sink())
        site.batch(0, (site.link.sent[0], [1], "stop"))
        assert request.is_ended
        monkeypatch.setattr(site.driver, "emit", lambda event: pytest.fail(f"emitted {event}"))
        site.driver.cancel(request, Reason.CANCELLED)


class TestReentrance:
    """A sink may turn to the driver while it is flushed: what comes of it belongs to a later turn."""

    @pytest.mark.parametrize("when", ["flush", "end"])
    async def test_a_request_that_is_submitted_then_loses_nothing(self, when):
        site, shared = Site(1), Shared()

        def submit_next(now):
            if now == when and len(site.link.sent) < 3:
                site.submit(shared.sink("next"))
                site.batch(0, (site.link.sent[-1], [7], "stop"))

        site.submit(shared.sink("first", submit_next))
        site.submit(shared.sink("second"))
        for wire_id in list(site.link.sent):
            site.batch(0, (wire_id, [1], "stop"))
        await turn()
        assert shared.seen == [
            *(("first", [1]), ("first", "ok"), ("second", [1]), ("second", "ok")),
            *(("next", [7]), ("next", "ok")),
        ]
        assert site.defects == []
        site.driver.router.check()

    async def test_a_cancel_during_a_flush_leaves_in_a_later_turn(self):
        site, shared = Site(1), Shared()
        other = site.submit(shared.sink("other"))
        site.submit(shared.sink("first", lambda when: site.driver.cancel(other, Reason.ABORTED)))
        site.batch(0, (site.link.sent[1], [1], "stop"), (site.link.sent[0], [2], ""))
        site.driver._flush()
        assert shared.seen == [("first", [1]), ("other", [2]), ("first", "ok")]
        await turn()
        assert shared.seen[3:] == [("other", "ABORTED")]

    async def test_submitting_from_within_an_effect_is_refused(self):
        site = Site(1)
        refusals = []

        def submit(_):
            with pytest.raises(GatewayError) as caught:
                site.submit(Sink())
            refusals.append(caught.value.reason)

        site.driver._on_rank_change = submit
        site.driver.emit(RankLost(0, 1, "test"))
        assert refusals == [Reason.INTERNAL]


async def test_a_sink_that_breaks_in_between_does_not_silence_what_follows_in_the_list():
    site, shared = Site(1), Shared()

    def fail(when):
        raise RuntimeError(when)

    site.submit(shared.sink("bad", fail))
    site.submit(shared.sink("good"))
    for wire_id in site.link.sent:
        site.batch(0, (wire_id, [1], "stop"))
    await turn()
    assert shared.seen == [("bad", [1]), ("bad", "ok"), ("good", [1]), ("good", "ok")]
    assert site.defects == [("flush", "flush"), ("end", "end")]

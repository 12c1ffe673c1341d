"""Tokens that wait for others of their sequence: which, for how long, and that none stays behind."""

import asyncio

import pytest

from gateway.core.errors import Reason
from gateway.core.events import Reconfigured
from tests.support.core import make_config
from tests.support.driver_site import Shared, Site, turn
from tests.support.grpc_edge import until

DELAY_S = 0.05


def paced(tokens=4, delay_s=DELAY_S):
    return {"listen": {"stream_interval_tokens": tokens, "max_flush_delay_ms": 1000 * delay_s}}


class Paced:
    """One request's way through the driver: rows go in, what its sink saw comes out."""

    def __init__(self, **settings):
        self.site = Site(1)
        self.site.driver.configure(make_config(1, **paced(**settings)))
        self.shared = Shared()
        self.request = self.site.submit(self.shared.sink("a"))
        (self.wire_id,) = self.site.link.sent

    async def row(self, *tokens, finish=""):
        """What the sink saw in the turn of a row with these tokens."""
        before = len(self.shared.seen)
        self.site.batch(0, (self.wire_id, tokens, finish))
        await turn()
        return self.shared.seen[before:]


async def test_the_first_tokens_and_the_last_ones_never_wait():
    site = Paced(delay_s=60.0)
    assert await site.row(1) == [("a", [1])]
    assert await site.row(2) == []
    assert await site.row(3, finish="stop") == [("a", [2, 3]), ("a", "ok")]
    site.site.driver.router.check()


async def test_tokens_leave_when_there_are_enough():
    site = Paced(delay_s=60.0)
    await site.row(0)
    seen = [await site.row(token) for token in range(1, 9)]
    assert seen == [[], [], [], [("a", [1, 2, 3, 4])], [], [], [], [("a", [5, 6, 7, 8])]]
    assert await site.row(9, 10, 11, 12, 13) == [("a", [9, 10, 11, 12, 13])]


async def test_no_token_waits_for_longer_than_the_delay_and_those_that_came_later_go_along():
    site = Paced(tokens=100)
    loop = asyncio.get_running_loop()
    await site.row(1)
    began_at = loop.time()
    await site.row(2)
    await asyncio.sleep(DELAY_S / 2)
    assert await site.row(3) == []
    await until(lambda: len(site.shared.seen) == 2)
    assert site.shared.seen[1:] == [("a", [2, 3])]
    assert loop.time() - began_at >= DELAY_S
    assert await site.row(4) == [], "the next ones have a delay of their own"


async def test_a_row_in_the_turn_of_the_delays_end_makes_it_no_longer():
    site = Paced(tokens=100, delay_s=0.01)
    await site.row(1)
    await site.row(2)
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.02
    while loop.time() < until:
        pass  # the timer is due, and did not run
    loop.call_soon(site.site.batch, 0, (site.wire_id, [3], ""))  # runs before it, the flush after it
    await turn()
    assert site.shared.seen[1:] == [("a", [2, 3])]


async def test_what_waits_leaves_before_an_end_without_a_finish():
    site = Paced(delay_s=60.0)
    await site.row(1)
    await site.row(2)
    site.site.driver.cancel(site.request, Reason.ABORTED)
    await turn()
    assert site.shared.seen[1:] == [("a", [2]), ("a", "ABORTED")]
    assert not site.site.driver._pacing._held


async def test_every_sequence_waits_for_itself():
    site = Site(1)
    site.driver.configure(make_config(1, **paced(tokens=2, delay_s=0.02)))
    shared = Shared()
    site.submit(shared.sink("a"))
    site.submit(shared.sink("b"))
    first, second = site.link.sent
    site.batch(0, (first, [1], ""), (second, [1], ""))
    await turn()
    site.batch(0, (first, [2], ""), (second, [2, 3], ""))
    await turn()
    assert shared.seen[2:] == [("b", [2, 3])]
    site.batch(0, (second, [4], ""))
    await until(lambda: len(shared.seen) == 5)
    assert shared.seen[3:] == [("a", [2]), ("b", [4])]
    assert site.driver._pacing._timer is None, "nobody waits"


async def test_what_waits_is_not_held_against_the_reader():
    site = Site(1, limits={"max_stream_buffer_bytes": 600})
    site.driver.configure(make_config(1, **paced(tokens=1000, delay_s=60.0)))
    shared = Shared()
    request = site.submit(shared.sink("a"), max_tokens=2000)
    (wire_id,) = site.link.sent
    for token in range(400):
        site.batch(0, (wire_id, [token], ""))
        if token % 100 == 0:
            await turn()
    await turn()
    assert request.error is None
    assert shared.seen == [("a", [0])]


@pytest.mark.parametrize("after", [1, 2])
async def test_a_reload_lets_go_what_waits_by_the_old_settings(after):
    site = Paced(delay_s=60.0)
    await site.row(1)
    await site.row(2)
    config = make_config(1, **(paced(tokens=after) if after > 1 else {}))
    site.site.driver.emit(Reconfigured(config))
    site.site.driver.configure(config)
    assert site.shared.seen[1:] == [("a", [2])]
    assert await site.row(3) == ([("a", [3])] if after == 1 else [])
    assert await site.row(4) == ([("a", [4])] if after == 1 else [("a", [3, 4])])

"""Preserved order under load: random schedules over whole routers, and bounds that hold in an overload."""

import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.types import Sampling
from tests.support.core import Bench
from tests.support.schedules import Play

ROUTERS, SCHEDULES = 40, 50
GREEDY = Sampling(max_tokens=8, temperature=0.0)


def test_two_thousand_schedules_break_no_order():
    """40 routers of all modes and domains play 50 schedules each, one after the other, and end quiet every time."""
    violations = []
    for seed in range(ROUTERS):
        play = Play(seed)
        for schedule in range(SCHEDULES):
            violations += [(seed, schedule, text) for text in play.run(requests=8)]
    assert violations == []


def test_the_same_schedules_without_an_order_break_it():
    assert sum(bool(Play(seed, "none").run(requests=8)) for seed in range(ROUTERS)) > ROUTERS / 2


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
def test_an_overload_with_many_hits_is_bounded_and_drains(mode):
    """Ten times what the ranks can do, most of it hits that wait behind misses: refused at the door, never stuck."""
    places, held_bytes = 32, 2000
    bench = Bench(
        2,
        scheduling={"mode": mode, "queue": {"order": "fcfs", "max_in_flight_per_rank": 4}}
        if mode != "direct"
        else {"mode": mode},
        ordering="preserve",
        limits={"default_deadline_s": 60},
        preserve={"max_places": places, "max_held_bytes": held_bytes},
        response_cache={},
    )
    bench.finish(bench.request([1], sampling=GREEDY))
    refused, seen, most = 0, 0, 0
    for number in range(600):
        is_hit = number % 5 < 3
        found = bench.offer([1] if is_hit else [2, number % 997], sampling=GREEDY if is_hit else None)
        refused += isinstance(found, GatewayError)
        assert not isinstance(found, GatewayError) or found.reason in (Reason.ORDER_FULL, Reason.RANKS_FULL)
        most = max(most, bench.router.ordering.places)
        assert bench.router.ordering.held_bytes <= held_bytes
        if number % 10 == 0:
            seen += finish_oldest(bench)
    assert most <= places
    assert refused > 300
    while bench.router.live_count:
        assert finish_oldest(bench), "stuck"
    bench.flush()
    bench.assert_quiet()


def finish_oldest(bench):
    """The attempt that is out longest ends. Whether there was one."""
    attempt = next(iter(bench.router._attempts.ledger.live.values()), None)
    if attempt is not None:
        bench.finish(attempt.sequence.request)
    bench.flush()
    return attempt is not None


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
def test_without_preserved_order_no_place_is_made(mode):
    bench = Bench(2, scheduling={"mode": mode}, response_cache={})
    assert bench.router.ordering is None
    for number in range(300):
        request = bench.request([number % 50], sampling=GREEDY)
        if not request.is_ended:
            bench.finish(request)
        assert request.place is None
        bench.flush()
    assert bench.router.response_cache.hits == 250
    bench.assert_quiet()

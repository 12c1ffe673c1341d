"""When nothing is under way that time alone would change: only then may a tick be late."""

import pytest

from gateway.core.events import LoadReported, SendBlocked, SendUnblocked
from gateway.core.ranks import RankState
from tests.support.core import Bench, load


def test_with_nothing_under_way():
    bench = Bench(2, join=False)
    assert bench.router.is_resting, "who is not there yet is waited for by nobody's clock"
    bench.join(0)
    bench.join(1)
    assert bench.router.is_resting


@pytest.mark.parametrize("mode", ["direct", "queue"])
def test_not_from_a_request_s_arrival_to_its_end(mode):
    bench = Bench(1, scheduling={"mode": mode})
    request = bench.request()
    assert not bench.router.is_resting
    bench.finish(request)
    assert bench.router.is_resting


def test_not_while_a_request_waits():
    bench = Bench(1, join=False, scheduling={"mode": "queue"})
    bench.request()
    assert not bench.router.is_resting


def test_not_while_other_gateways_load_has_to_be_confirmed():
    bench = Bench(1)
    bench.send(LoadReported(0, 1, load(3, 0)))
    assert bench.router._load.foreign
    assert not bench.router.is_resting


def test_not_while_a_rank_takes_no_messages():
    bench = Bench(2)
    bench.send(SendBlocked(1, 1))
    assert not bench.router.is_resting
    bench.send(SendUnblocked(1, 1))
    assert bench.router.is_resting


def test_not_while_a_rank_is_neither_ready_nor_absent():
    bench = Bench(2)
    bench.lose(0)
    assert bench.router.ranks.state[0] is RankState.LOST
    assert not bench.router.is_resting

"""What an operator sees of a rank: what is not known is None, never a zero."""

from math import inf, nan

import pytest

from gateway.core.rank_row import RankRow
from gateway.core.ranks import RankTable
from gateway.core.views import rank_view
from tests.support.core import make_config

REPORTED = ("reported_running", "reported_waiting", "running", "waiting", "foreign", "kv_usage", "snapshot_age_ms")
NOW = 50.0


def view(cost=1.5, **columns):
    table = RankTable(make_config(2, "tokenspeed"))
    table.restore(RankRow(rank=1, **columns), NOW, 4096)
    return rank_view(table, 1, NOW, cost)


def test_a_rank_that_never_reported():
    seen = view(in_flight=3, incarnation=2)
    assert (seen.rank, seen.group, seen.group_rank, seen.state, seen.incarnation) == (1, "g", 1, "READY", 2)
    assert seen.in_flight == 3
    assert [getattr(seen, name) for name in REPORTED] == [None] * len(REPORTED)


def test_a_rank_that_reported_nothing_to_do():
    seen = view(snapshot_age_ms=20.0)
    assert [getattr(seen, name) for name in REPORTED] == [0, 0, 0, 0, 0, 0.0, pytest.approx(20.0)]


def test_raw_and_normalised_counts_are_both_shown():
    seen = view(in_flight=1, reported_running=5, reported_waiting=2, kv_usage=0.25)
    assert (seen.reported_running, seen.reported_waiting, seen.running, seen.waiting) == (5, 2, 3, 2)
    assert (seen.foreign, seen.kv_usage) == (4, 0.25)


@pytest.mark.parametrize(("cost", "shown"), [(0.0, 0.0), (-1.5, -1.5), (inf, None), (-inf, None), (nan, None)])
def test_a_cost_that_is_no_number_is_unknown(cost, shown):
    assert view(cost).cost == shown

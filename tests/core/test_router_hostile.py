"""Ranks that send what no rank should: nothing wrong reaches a client, and every cost is bounded."""

import pytest

from gateway.core.errors import Reason
from tests.support.core import Bench, wire_id


@pytest.mark.parametrize(("protocol", "counted"), [("vllm", False), ("tokenspeed", True)])
def test_nothing_of_a_sequence_is_delivered_after_its_end_in_the_same_batch(protocol, counted):
    bench = Bench(1, protocol)
    request = bench.request()
    rows = [(wire_id(request), [5], "stop", 1), (wire_id(request), [6, 7], "", 3), (wire_id(request), [8], "length", 4)]
    bench.batch(0, rows if counted else [row[:3] for row in rows])
    assert request.error is None
    assert list(request.sequences[0].take()[0]) == [5]
    assert request.sequences[0].finish == "stop"
    assert bench.router.counters.late_rows == 2
    bench.assert_quiet()


def test_nothing_is_delivered_after_a_miscounted_row_in_the_same_batch():
    bench = Bench(1, "tokenspeed")
    request = bench.request()
    bench.batch(0, [(wire_id(request), [5], "", 2), (wire_id(request), [6], "", 1)])
    assert request.error.reason is Reason.DATA_LOSS
    assert list(request.sequences[0].take()[0]) == []
    bench.assert_quiet()


def test_an_engine_that_does_not_stop_is_stopped():
    bench = Bench(1)
    request, other = bench.request(max_tokens=3), bench.request()
    bench.batch(0, [(wire_id(request), [1, 2])])
    bench.batch(0, [(wire_id(request), [3, 4]), (wire_id(other), [9])])
    assert request.error.reason is Reason.ENGINE_ERROR
    assert list(request.sequences[0].take()[0]) == [1, 2]
    assert [effect.wire_ids for effect in bench.aborted] == [(wire_id(request),)]
    assert not other.is_ended
    bench.finish(other)
    bench.assert_quiet()


def test_a_flood_of_strays_costs_a_bounded_number_of_aborts_and_ids():
    bench = Bench(1)
    bench.batch(0, [(f"feed-{number}", [9]) for number in range(5000)])
    assert len(bench.aborted[0].wire_ids) == 1024
    bench.batch(0, [("x" * 1_000_000, [9])] * 3)
    assert len(bench.aborted) == 1
    bench.join(0)
    bench.batch(0, [("feed-0", [9])])
    assert bench.aborted[1].wire_ids == ["feed-0"]

"""Load semantics and the clamp: each rule of the load book, through the router."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import LoadReported, SendFailed, Tick
from tests.support.core import Bench, load, make_info, wire_id


def table(bench: Bench):
    return bench.router.ranks


def counts(bench: Bench, rank: int) -> tuple[int, int, float]:
    ranks = table(bench)
    return ranks.reported_running[rank], ranks.reported_waiting[rank], ranks.kv_usage[rank]


def test_a_snapshot_is_stored_verbatim_and_kv_becomes_a_ratio():
    bench = Bench(2, "tokenspeed")
    request = bench.request(pinned_rank=0)
    bench.batch(0, [(wire_id(request), [9])], load(2, 5, 100 / 400))
    assert counts(bench, 0) == (2, 5, 0.25)
    assert table(bench).snapshot_at[1] is None


@pytest.mark.parametrize(("raw", "stored"), [(2.0, 1.0), (-0.5, 0.0), (0.4, 0.4)])
def test_kv_usage_is_clamped_to_a_ratio(raw, stored):
    bench = Bench(1)
    bench.request()
    bench.batch(0, [], load(1, 0, raw))
    assert table(bench).kv_usage[0] == stored


def test_resident_counts_are_normalised_and_disjoint_ones_are_not():
    for protocol, expected in (("tokenspeed", (4, 6)), ("vllm", (10, 6))):
        bench = Bench(1, protocol)
        request = bench.request()
        bench.batch(0, [(wire_id(request), [9])], load(10, 6))
        assert (table(bench).running[0], table(bench).waiting[0]) == expected
        assert counts(bench, 0)[:2] == (10, 6)


def test_no_report_is_not_an_empty_one():
    bench = Bench(1, "tokenspeed")
    request = bench.request()
    bench.batch(0, [(wire_id(request), [9])], load(3, 1, 0.5))
    bench.batch(0, [(wire_id(request), [9])])
    assert counts(bench, 0) == (3, 1, 0.5)


def test_load_is_stored_before_the_batchs_own_finish_releases():
    """The terminal snapshot of a rank is stale the moment it arrives; KV is not."""
    bench = Bench(1, "tokenspeed")
    request = bench.request()
    bench.batch(0, [(wire_id(request), [9], "length")], load(7, 9, 0.75))
    assert counts(bench, 0) == (0, 0, 0.75)
    assert table(bench).snapshot_at[0] is not None
    assert bench.router.counters.clamped[0] == 1


def test_a_release_that_leaves_work_in_flight_does_not_clamp():
    bench = Bench(1, "tokenspeed")
    first, second = bench.request(), bench.request()
    bench.batch(0, [(wire_id(first), [9], "stop")], load(7, 9, 0.75))
    assert counts(bench, 0) == (7, 9, 0.75)
    bench.finish(second)
    assert counts(bench, 0) == (0, 0, 0.75)


def test_a_cancel_that_empties_the_rank_clamps():
    bench = Bench(1)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [9])], load(1, 3, 0.5))
    bench.cancel(request, Reason.CANCELLED)
    assert counts(bench, 0) == (0, 0, 0.5)


def test_late_rows_after_an_abort_are_clamped():
    bench = Bench(1)
    request = bench.request()
    late = wire_id(request)
    bench.cancel(request, Reason.CANCELLED)
    bench.now += 30
    bench.batch(0, [(late, [9])], load(1, 4, 0.6))
    assert counts(bench, 0) == (0, 0, 0.6)
    assert bench.router.counters.late_rows == 1


def test_a_stats_only_report_just_after_an_abort_is_clamped_and_a_later_one_is_foreign():
    bench = Bench(1)
    request = bench.request()
    bench.cancel(request, Reason.CANCELLED)
    bench.now += 0.9
    bench.batch(0, [], load(1, 0, 0.5))
    assert counts(bench, 0) == (0, 0, 0.5)
    bench.now += 0.2
    bench.batch(0, [], load(3, 1, 0.5))
    assert counts(bench, 0) == (3, 1, 0.5)
    assert table(bench).foreign[0] == 4


def test_foreign_load_counts_until_its_ttl_without_a_fresh_report():
    bench = Bench(1)
    bench.batch(0, [], load(3, 1, 0.5))
    bench.now += 1.5
    bench.batch(0, [], load(2, 1, 0.5))
    bench.now += 1.9
    assert bench.router.rank_views(bench.now)[0].foreign == 3
    bench.now += 0.2
    bench.send(Tick())
    view = bench.router.rank_views(bench.now)[0]
    assert (view.reported_running, view.reported_waiting, view.foreign, view.kv_usage) == (0, 0, 0, 0.5)
    assert bench.router.counters.foreign_expired == 1


def test_foreign_load_expires_even_if_we_send_work_to_the_rank_meanwhile():
    bench = Bench(1)
    bench.batch(0, [], load(3, 1, 0.5))
    bench.request()
    bench.now += 2.1
    bench.request()
    assert counts(bench, 0) == (0, 0, 0.5)


def test_an_idle_report_of_zero_stays_what_it_is():
    bench = Bench(1)
    bench.batch(0, [], load(0, 0, 0.1))
    assert counts(bench, 0) == (0, 0, 0.1)
    assert bench.router.counters.foreign_reports == 0


def test_several_gateways_keep_the_others_share():
    bench = Bench(1, gateways=2)
    first, second = bench.request(), bench.request()
    bench.batch(0, [(wire_id(first), [9])], load(3, 2))
    bench.batch(0, [(wire_id(first), [9], "stop"), (wire_id(second), [9], "stop")])
    # Five were there, two of them ours: three remain, taken from the running ones first.
    assert counts(bench, 0)[:2] == (1, 2)


def test_several_gateways_resident_share():
    bench = Bench(1, "tokenspeed", gateways=2)
    first, second = bench.request(), bench.request()
    rows = [(wire_id(first), [9], "stop"), (wire_id(second), [9], "stop")]
    bench.batch(0, rows, load(5, 4))
    assert counts(bench, 0)[:2] == (3, 3)


def test_step_counter_regressions_are_dropped_per_rank_and_incarnation():
    bench = Bench(2)
    bench.request(pinned_rank=0)
    bench.request(pinned_rank=1)
    bench.batch(0, [], load(1, 0, step_counter=10))
    bench.batch(0, [], load(5, 5, step_counter=9))
    bench.batch(1, [], load(2, 0, step_counter=3))
    assert counts(bench, 0)[:2] == (1, 0)
    assert counts(bench, 1)[:2] == (2, 0)
    bench.batch(0, [], load(6, 0, step_counter=1, source="coordinator"))
    assert counts(bench, 0)[:2] == (6, 0)
    bench.join(0)
    assert table(bench).snapshot_at[0] is None
    bench.request(pinned_rank=0)
    bench.batch(0, [], load(4, 0, step_counter=1))
    assert counts(bench, 0)[:2] == (4, 0)


def test_a_new_incarnation_starts_without_a_report_or_charges():
    bench = Bench(1)
    bench.request()
    bench.batch(0, [], load(8, 8, 0.9))
    bench.join(0)
    assert table(bench).in_flight == [0]
    assert counts(bench, 0) == (0, 0, 0.0)
    assert bench.router.rank_views(bench.now)[0].kv_usage is None
    assert bench.ended[0].error.reason is Reason.RANK_LOST
    bench.assert_quiet()


@pytest.mark.parametrize("preset", ["smg", "vllm"])
def test_an_emptied_rank_is_preferred_despite_its_stale_heavy_terminal_snapshot(preset):
    bench = Bench(2, "tokenspeed", policy={"preset": preset})
    busy = bench.request(pinned_rank=1)
    bench.batch(1, [(wire_id(busy), [9])], load(1, 0, 0.1))
    last = bench.request(pinned_rank=0)
    bench.batch(0, [(wire_id(last), [9], "length")], load(40, 20, 0.75))
    assert counts(bench, 0) == (0, 0, 0.75)
    for _ in range(2):
        probe = bench.request()
        assert probe.last_rank == 0
        bench.finish(probe)


def test_an_idle_rank_with_full_kv_still_gets_work():
    bench = Bench(1, info=make_info(kv_capacity_tokens=1000))
    request = bench.request([1] * 100)
    bench.batch(0, [(wire_id(request), [9], "stop")], load(1, 0, 0.98))
    assert table(bench).kv_usage[0] == 0.98
    assert bench.request([1] * 100).last_rank == 0


def test_a_busy_rank_with_full_kv_gets_nothing_while_another_is_eligible():
    bench = Bench(2, info=make_info(kv_capacity_tokens=100_000))
    request = bench.request(pinned_rank=0)
    bench.batch(0, [(wire_id(request), [9])], load(1, 0, 0.97))
    heavy = [bench.request([1] * 1000, pinned_rank=1) for _ in range(3)]
    assert [bench.request().last_rank for _ in range(20)] == [1] * 20
    for other in heavy:
        bench.finish(other)


def test_the_soft_kv_filter_is_relaxed_when_every_rank_is_over_it():
    bench = Bench(2, info=make_info(kv_capacity_tokens=100_000))
    for rank in (0, 1):
        request = bench.request(pinned_rank=rank)
        bench.batch(rank, [(wire_id(request), [9])], load(1, 0, 0.97))
    assert bench.request().last_rank in (0, 1)
    assert bench.router.counters.relaxed_filters == {"kv_usage": 1, "tried": 0, "kv_fit": 0}


def test_a_report_next_to_a_request_that_never_left_does_not_stick():
    bench = Bench(1)
    request = bench.request()
    bench.batch(0, [], load(3, 1, 0.5))
    bench.send(SendFailed(0, 1, wire_id(request), "unreachable"))
    assert counts(bench, 0)[:2] == (3, 1)
    bench.now += 2.1
    bench.send(Tick())
    assert counts(bench, 0) == (0, 0, 0.5)


def test_the_others_share_expires_too():
    bench = Bench(1, gateways=2)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [9], "stop")], load(9, 3))
    assert counts(bench, 0)[:2] == (8, 3)
    bench.now += 2.1
    bench.send(Tick())
    assert counts(bench, 0)[:2] == (0, 0)


def test_looking_changes_nothing():
    bench = Bench(1)
    bench.batch(0, [], load(3, 1, 0.5))
    bench.now += 99
    bench.router.rank_views(bench.now)
    bench.router.explain(bench.arrived(), bench.now)
    assert counts(bench, 0)[:2] == (3, 1)
    assert bench.router.counters.foreign_expired == 0


def test_a_report_that_was_all_our_own_leaves_nothing_to_expire():
    bench = Bench(1, gateways=2)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [9], "stop")], load(1, 0, 0.5))
    assert counts(bench, 0) == (0, 0, 0.5)
    bench.now += 99
    bench.send(Tick())
    assert bench.router.counters.foreign_expired == 0


def report(bench: Bench, rank: int, *counts: float, incarnation: int | None = None, **more) -> None:
    """A report that comes by itself, over the coordinator's socket."""
    current = table(bench).incarnation[rank]
    more = {"source": "coordinator"} | more
    bench.send(LoadReported(rank, incarnation or current, load(*counts, **more)))


def test_a_report_that_comes_by_itself_is_a_snapshot_like_any_other():
    bench = Bench(2)
    bench.request(pinned_rank=1)
    assert table(bench).sent_since_snapshot[1] == 1
    bench.now += 3.0
    report(bench, 1, 1, 2, 0.5)
    assert counts(bench, 1) == (1, 2, 0.5)
    assert (table(bench).snapshot_at[1], table(bench).sent_since_snapshot[1]) == (103.0, 0)
    assert bench.router.counters.snapshots[1] == 1
    assert bench.router.counters.batches[1] == 0
    assert table(bench).snapshot_at[0] is None


def test_an_idle_rank_says_so_by_itself():
    """What the last batch left standing, KV usage above all, doesn't stay."""
    bench = Bench(1)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [9], "length")], load(1, 0, 0.75))
    assert counts(bench, 0) == (0, 0, 0.75)
    report(bench, 0, 0, 0, 0.0)
    assert counts(bench, 0) == (0, 0, 0.0)


def test_load_of_others_on_an_idle_rank_is_believed_until_it_is_old():
    bench = Bench(1)
    report(bench, 0, 3, 1, 0.5)
    assert (counts(bench, 0)[:2], table(bench).foreign[0]) == ((3, 1), 4)
    assert bench.router.counters.foreign_reports == 1
    bench.now += 1.0
    report(bench, 0, 2, 0, 0.5)
    bench.now += 1.5
    bench.send(Tick())
    assert counts(bench, 0)[0] == 2
    bench.now += 1.0
    bench.send(Tick())
    assert counts(bench, 0)[:2] == (0, 0)


def test_a_report_soon_after_our_abort_still_counts_what_was_aborted():
    bench = Bench(1)
    bench.cancel(bench.request(), Reason.CANCELLED)
    report(bench, 0, 1, 0, 0.5)
    assert (counts(bench, 0), table(bench).foreign[0]) == ((0, 0, 0.5), 0)


def test_of_two_reports_the_one_that_was_taken_later_stands():
    """Batches and reports come over two connections, so they overtake each other."""
    bench = Bench(1)
    request = bench.request()
    report(bench, 0, 1, 5, taken_at_s=50.25)
    bench.batch(0, [(wire_id(request), [9])], load(1, 9, taken_at_s=50.0))
    assert counts(bench, 0)[:2] == (1, 5)
    assert bench.router.counters.step_regressions == 1
    bench.batch(0, [(wire_id(request), [9])], load(1, 4, taken_at_s=50.25))
    assert counts(bench, 0)[:2] == (1, 4)
    report(bench, 0, 1, 3, taken_at_s=40.0)
    assert counts(bench, 0)[:2] == (1, 3), "that is no order of arrival: the clock is another one"


def test_steps_begin_anew_with_every_wave():
    bench = Bench(1)
    bench.request()
    report(bench, 0, 1, 7, step_counter=9, wave=2)
    report(bench, 0, 1, 6, step_counter=0, wave=3)
    assert counts(bench, 0)[:2] == (1, 6)
    report(bench, 0, 1, 5, step_counter=10, wave=2)
    assert counts(bench, 0)[:2] == (1, 6)


def test_a_report_of_an_earlier_incarnation_is_nobodys():
    bench = Bench(1)
    bench.request()
    report(bench, 0, 4, 4, incarnation=7)
    assert table(bench).snapshot_at[0] is None


def test_a_report_is_no_step_of_the_rank():
    """The time of a step is that between two batches with rows, whatever was reported in between."""
    bench = Bench(1)
    request = bench.request()
    for number in range(3):
        bench.now += 0.010
        bench.batch(0, [(wire_id(request), [number])])
        bench.now += 0.030
        report(bench, 0, 1, 0)
    assert table(bench).step_us[0] == pytest.approx(40_000, abs=2)

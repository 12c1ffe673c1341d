"""The audit: it finds what no event will end and sums that are wrong, cites what it saw, and changes nothing."""

import pytest

from gateway.core.audit import MAX_FINDINGS_PER_STEP, SILENT_AFTER_S
from gateway.core.effects import AuditFound
from tests.support.core import Bench, load, wire_id


def tick(bench, seconds=1.0):
    """Every rank once per second; what was found."""
    size = bench.router.ranks.size
    return [found for _ in range(size) for found in bench.tick(seconds / size) if isinstance(found, AuditFound)]


def work(bench, busy, seconds=SILENT_AFTER_S + 2):
    """Rank 0 goes on with one request for a while; what the audit found."""
    found = []
    for _ in range(round(seconds)):
        bench.batch(0, [(wire_id(busy), [9])])
        found += tick(bench)
    return found


def test_healthy_work_is_no_finding():
    bench = Bench(2)
    busy = [bench.request(max_tokens=100) for _ in range(4)]
    for _ in range(40):
        for request in busy:
            bench.batch(request.last_rank, [(wire_id(request), [9])])
        assert tick(bench) == []
    assert bench.router.counters.audit_findings == {"sums": 0, "silent": 0}


def test_an_attempt_that_gets_nothing_while_its_rank_works_is_told_once_with_what_was_seen():
    bench = Bench(1)
    busy, silent = bench.request(max_tokens=100), bench.request(max_tokens=100)
    found = work(bench, busy)
    assert len(found) == 1
    assert (found[0].kind, found[0].rank, found[0].incarnation, found[0].subject) == ("silent", 0, 1, wire_id(silent))
    assert SILENT_AFTER_S <= found[0].batches <= SILENT_AFTER_S + 2
    assert work(bench, busy) == []
    assert bench.router.counters.audit_findings["silent"] == 1


def test_a_finding_ends_nothing():
    bench = Bench(1)
    busy, silent = bench.request(max_tokens=100), bench.request(max_tokens=100)
    assert work(bench, busy)
    assert not silent.is_ended
    assert bench.aborted == []
    bench.finish(silent)
    assert silent.error is None
    bench.finish(busy)
    bench.assert_quiet()


def test_it_is_not_silent_while_the_rank_says_nothing_to_anyone():
    bench = Bench(1)
    bench.request()
    assert [found for _ in range(60) for found in tick(bench)] == []


def test_it_is_not_silent_while_it_waits_at_the_rank():
    bench = Bench(1)
    busy, _ = bench.request(max_tokens=200), bench.request()
    found = []
    for _ in range(60):
        bench.batch(0, [(wire_id(busy), [9])], load(1, 1))
        found += tick(bench)
    assert found == []


def test_each_token_starts_the_time_anew():
    bench = Bench(1)
    busy, slow = bench.request(max_tokens=200), bench.request(max_tokens=200)
    for _ in range(3):
        assert work(bench, busy, SILENT_AFTER_S - 5) == []
        bench.batch(0, [(wire_id(slow), [9])])
    assert len(work(bench, busy, SILENT_AFTER_S + 2)) == 1


def test_many_findings_are_told_in_turn_and_none_is_lost():
    bench = Bench(1)
    busy = bench.request(max_tokens=200)
    silent = {wire_id(bench.request()) for _ in range(MAX_FINDINGS_PER_STEP + 5)}
    found, most = [], 0
    for _ in range(40):
        bench.batch(0, [(wire_id(busy), [9])])
        now = tick(bench)
        most = max(most, len(now))
        found += now
    assert most == MAX_FINDINGS_PER_STEP
    assert {item.subject for item in found} == silent
    assert len(found) == len(silent) == bench.router.counters.audit_findings["silent"]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_sum_that_drifted_is_found_within_the_interval_and_named(rank):
    bench = Bench(3)
    bench.request()
    assert tick(bench) == []
    table = bench.router.ranks
    table.own_tokens[rank] += 1
    bench.router.check = lambda: None
    (found,) = tick(bench)
    assert (found.kind, found.rank, found.subject) == ("sums", rank, "own_tokens")
    assert bench.router.counters.audit_findings["sums"] == 1
    table.own_tokens[rank] -= 1
    assert tick(bench) == []


def test_a_step_looks_at_one_rank_however_many_there_are():
    bench = Bench(8)
    bench.router.check = lambda: None
    bench.router.ranks.own_tokens[:] = [1] * 8
    assert len(bench.tick(0.05)) == 1
    assert bench.tick(0.05) == [], "not more often than once per second and rank"
    assert len({found.rank for found in tick(bench)}) >= 7


def test_a_rank_that_comes_back_starts_without_a_past():
    bench = Bench(1)
    busy = bench.request(max_tokens=100)
    bench.request(max_tokens=100)
    work(bench, busy, SILENT_AFTER_S - 5)
    bench.lose(0)
    bench.join(0)
    busy, _ = bench.request(max_tokens=100), bench.request(max_tokens=100)
    assert work(bench, busy, 20) == []

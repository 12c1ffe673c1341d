"""Bugs that load balancers of this kind have had in their ledgers and life cycles, each pinned by one test.

`test_regressions_table.py` maps each of them to its test, here or elsewhere, or says why it can't happen here.
"""

import pytest

from gateway.core.effects import AuditFound
from gateway.core.errors import Reason
from gateway.core.events import AbortAll, DrainStarted, RankLost, SendFailed
from gateway.types import Sampling
from tests.support.core import Bench, load, make_info, wire_id

MODES = ["direct", "queue", "batch"]
GREEDY = Sampling(max_tokens=8, temperature=0.0)


def scheduled(mode, ranks=1, *, slots=64, queue=None, batch=None, **settings):
    scheduling = {"mode": mode}
    if mode != "direct":
        scheduling["queue"] = {"max_in_flight_per_rank": slots, "order": "fcfs"} | (queue or {})
    if mode == "batch":
        scheduling["batch"] = {"window_ms": 0} | (batch or {})
    return Bench(ranks, scheduling=scheduling, **settings)


def live(bench):
    return bench.router._attempts.ledger.live


@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_requests_are_charged_once_each_on_every_path(mode):
    bench = scheduled(mode, 4, batch={"max_in_flight_batches": 100})
    requests = [bench.request() for _ in range(100)]
    assert set(live(bench)) == {wire_id(request) for request in requests}
    assert sum(bench.router.ranks.in_flight) == bench.router._admission.sequences == 100
    for request in requests:
        bench.finish(request)
    bench.assert_quiet()


def test_the_charge_follows_the_path_taken():
    """A stored answer and one that is shared charge no rank; sequences charge one each."""
    bench = scheduled("queue", response_cache={"coalesce": True})
    bench.finish(bench.request([1], sampling=GREEDY))
    for request, charges in (
        ({"prompt": [1]}, 0),
        ({"prompt": [2]}, 1),
        ({"prompt": [2]}, 0),
        ({"prompt": [3], "n": 2}, 2),
    ):
        before = len(live(bench))
        bench.request(**request, sampling=GREEDY)
        assert len(live(bench)) - before == charges


def test_cancelled_batches_open_the_gate_again():
    bench = scheduled("batch", batch={"max_in_flight_batches": 2, "release_at": "finish"})
    for _ in range(10):
        pair = [bench.request(), bench.request()]
        assert bench.router.batches.count(0) == 2
        for request in pair:
            bench.cancel(request, Reason.CANCELLED)
        assert bench.router.batches.count(0) == 0
    assert bench.request().last_rank == 0


def test_a_batch_keeps_its_gate_shut_until_its_last_member_is_done():
    bench = scheduled(
        "batch", queue={"hold_until_queued": 3}, batch={"max_in_flight_batches": 1, "release_at": "finish"}
    )
    members = [bench.request() for _ in range(3)]
    waiting = bench.request()
    for number, member in enumerate(members):
        assert waiting.last_rank is None
        bench.now += 4
        bench.finish(member)
        assert bench.router.ranks.in_flight == [2 - number + (waiting.last_rank is not None)]
    assert waiting.last_rank == 0


def test_a_report_that_is_dropped_takes_no_finished_row_with_it():
    bench = Bench(1)
    first, second = bench.request(), bench.request()
    bench.batch(0, [(wire_id(first), [9], "stop")], load(1, 0, step_counter=5))
    bench.batch(0, [(wire_id(second), [9], "stop")], load(7, 7, step_counter=4))
    assert bench.router.counters.step_regressions == 1
    assert bench.ended == [first, second]
    bench.assert_quiet()


@pytest.mark.parametrize("mode", MODES)
def test_absence_is_no_evidence_and_the_audit_releases_nothing(mode):
    """A final row was lost: the audit cites it, the age ends it."""
    bench = scheduled(mode, slots=2, limits={"max_request_age_s": 100.0})
    busy, ghost = bench.request(max_tokens=100), bench.request(max_tokens=100)
    waiting = None if mode == "direct" else bench.request()
    found = []
    for _ in range(99):
        bench.batch(0, [(wire_id(busy), [9])])
        found += [effect for effect in bench.tick(1.0) if isinstance(effect, AuditFound)]
    assert [finding.subject for finding in found] == [wire_id(ghost)]
    assert not ghost.is_ended
    assert waiting is None or waiting.sequences[0].entry is not None
    bench.tick(1.0)
    assert ghost.error.reason is Reason.MAX_AGE_EXCEEDED
    assert wire_id(ghost) in [wire for effect in bench.aborted for wire in effect.wire_ids]


@pytest.mark.parametrize("mode", MODES)
def test_no_sign_of_life_extends_the_age(mode):
    bench = scheduled(mode, limits={"max_request_age_s": 10.0})
    zombie = bench.request(max_tokens=100)
    for _ in range(10):
        assert not zombie.is_ended
        bench.batch(0, [(wire_id(zombie), [9])], load(1, 0, 0.5))
        bench.tick(1.0)
    assert zombie.error.reason is Reason.MAX_AGE_EXCEEDED
    assert bench.router.counters.deadlines_expired == 0, "that is no deadline"
    bench.assert_quiet()


def test_a_batch_whose_callers_have_all_gone_is_released_although_the_engine_is_silent():
    bench = scheduled("batch", queue={"hold_until_queued": 3}, batch={"release_at": "finish"})
    members = [bench.request() for _ in range(3)]
    for member in members:
        bench.cancel(member, Reason.CANCELLED)
    assert bench.router.batches.count(0) == 0
    bench.assert_quiet()


def test_a_batch_that_only_takes_long_is_not_swept():
    bench = scheduled("batch", batch={"max_in_flight_batches": 1, "release_at": "finish"})
    running, waiting = bench.request(), bench.request()
    for _ in range(200):
        bench.tick(0.05)
    assert not running.is_ended
    assert (bench.router.batches.count(0), waiting.last_rank) == (1, None)


def test_a_rank_that_is_gone_is_not_told_to_abort_again():
    bench = Bench(1)
    request = bench.request()
    bench.cancel(request, Reason.CANCELLED)
    bench.batch(0, [(wire_id(request), [9])])
    bench.send(RankLost(0, 1, "disconnected"))
    told = len(bench.aborted)
    bench.join(0)
    for _ in range(20):
        bench.tick(1.0)
    assert len(bench.aborted) == told


def test_room_comes_back_without_any_report():
    bench = Bench(1, info=make_info(kv_capacity_tokens=2000), admission={"max_kv_tokens": 200})
    for _ in range(1000):
        bench.finish(bench.request([1] * 100, max_tokens=100))
    assert bench.router.ranks.snapshot_at == [None]
    assert bench.router.ranks.free_kv_tokens == [2000]
    bench.assert_quiet()


@pytest.mark.parametrize(("first", "second"), [("stop", "error"), ("error", "stop"), ("length", "abort")])
@pytest.mark.parametrize("together", [True, False])
def test_the_first_of_two_ends_counts(first, second, together):
    bench = Bench(1)
    request = bench.request(sampling=Sampling(max_tokens=1))
    rows = [(wire_id(request), [9], first), (wire_id(request), [9], second)]
    for batch in [rows] if together else [[row] for row in rows]:
        bench.batch(0, batch)
    assert bench.ended == [request]
    assert (request.error is None) is (first != "error")
    assert bench.router.counters.late_rows == 1
    bench.assert_quiet()


def test_a_failure_of_a_later_sequence_is_not_lost_behind_an_earlier_success():
    bench = Bench(1)
    request = bench.request(n=2)
    bench.batch(0, [(wire_id(request, 0), [9], "stop")])
    bench.batch(0, [(wire_id(request, 1), [9], "error")])
    assert request.error.reason is Reason.ENGINE_ERROR
    bench.assert_quiet()


@pytest.mark.parametrize("mode", ["queue", "batch"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "loss", "drain", "send"])
def test_a_sequence_waits_or_is_in_flight_and_is_never_both_or_neither(mode, how):
    bench = scheduled(mode, slots=1, queue={"no_rank_wait_s": 1.0})
    request = bench.request(n=3, deadline_at=bench.now + 50)

    def owners():
        waiting = {id(entry.sequence) for entry in bench.router._dispatcher.queue.entries()}
        running = {id(attempt.sequence) for attempt in live(bench).values()}
        assert not waiting & running
        return len(waiting | running)

    assert (owners(), bench.router.queue_depth) == (3, 2)
    bench.batch(0, [(wire_id(request, 0), [9])])
    assert owners() == 3
    if how == "cancel":
        bench.cancel(request, Reason.CANCELLED)
    elif how == "deadline":
        bench.tick(50.0)
    elif how == "loss":
        bench.lose(0)
    elif how == "drain":
        bench.send(DrainStarted())
        assert owners() == 3
        bench.send(AbortAll(Reason.DRAINING))
    else:
        bench.send(SendFailed(0, 1, wire_id(request, 0), "unreachable"))
    assert owners() == 0
    assert bench.ended == [request]
    bench.assert_quiet()


@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_a_request_is_counted_once_in_the_queue_and_once_on_its_rank(mode):
    bench = scheduled(mode, slots=1, predictor={"prefill_ms": "total_new_tokens"})
    bench.request()
    request = bench.request([1] * 10)
    account, dispatcher = request.account, bench.router._dispatcher
    assert (account.queued, account.in_flight, dispatcher.backlog_us) == (1, 2, 10_000)
    bench.finish(bench.router._registry.oldest())
    assert (account.queued, account.in_flight, dispatcher.backlog_us) == (0, 1, 0)
    assert bench.router.ranks.pending_us == [10_000]


@pytest.mark.parametrize("mode", MODES)
def test_five_hundred_at_once_never_exceed_a_bound_of_a_hundred(mode):
    bench = scheduled(mode, 2, admission={"max_in_flight": 100})
    bench.router.check = lambda: None
    most = 0
    for number in range(500):
        bench.offer(n=1 + number % 3)
        most = max(most, bench.router._admission.sequences)
    assert most == 100


def test_a_defect_between_the_pick_and_the_acceptance_leaves_no_charge(monkeypatch):
    bench = Bench(2)
    choose, calls = bench.router._attempts.choose, []

    def broken(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("a defect")
        return choose(*args)

    monkeypatch.setattr(bench.router._attempts, "choose", broken)
    with pytest.raises(RuntimeError):
        bench.request(n=3)
    bench.assert_quiet()


@pytest.mark.parametrize("mode", MODES)
def test_a_charge_is_the_requests_own_cost_not_what_it_waits_for(mode):
    predictor, batch = {"prefill_ms": "total_new_tokens"}, {"max_in_flight_batches": 100}
    bench = scheduled(mode, predictor=predictor, queue={"gate_ms": 1e6}, batch=batch)
    for number in range(10):
        bench.request([1] * 7)
        assert bench.router.ranks.pending_us == [7000 * (number + 1)]


def test_a_head_that_takes_longer_than_predicted_shortens_no_other_wait():
    bench = Bench(1, predictor={"prefill_ms": "total_new_tokens"})
    bench.request([1] * 100)
    bench.request([1] * 300)
    bench.now += 0.5
    assert bench.router.ranks.unstarted_us(0, bench.now) == 300_000


def test_one_refusal_by_the_engine_takes_one_member_out_of_its_batch():
    bench = scheduled("batch", queue={"hold_until_queued": 3}, batch={"release_at": "finish"})
    members = [bench.request() for _ in range(3)]
    bench.batch(0, [(wire_id(members[1]), [], "abort")])
    (batch,) = bench.router.batches.of_rank(0)
    assert (len(batch.members), bench.router.ranks.in_flight) == (2, [2])
    assert bench.aborted == []


def test_one_bad_row_undoes_none_of_the_others():
    bench = Bench(1)
    requests = [bench.request() for _ in range(10)]
    rows = [(wire_id(request), [9], "abort" if number == 4 else "stop") for number, request in enumerate(requests)]
    bench.batch(0, rows)
    assert [request.error is None for request in requests] == [number != 4 for number in range(10)]
    bench.assert_quiet()


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_duplicate_takes_nothing_from_the_original(mode):
    bench = scheduled(mode)
    original = bench.request(request_id="x")
    charged = dict(live(bench))
    assert bench.offer(request_id="x").reason is Reason.DUPLICATE_REQUEST_ID
    assert live(bench) == charged
    bench.finish(original)
    assert original.error is None
    bench.assert_quiet()

"""The life of a request as a table, and that nothing happens to it after its end, whatever ended it and whatever comes."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import (
    AbortAll,
    RankLost,
    RequestCancelled,
    SendFailed,
    Tick,
)
from gateway.core.lifecycle import TRANSITIONS, Evidence, Phase
from gateway.core.request import Request
from tests.support.core import Bench, wire_id

MODES = ["direct", "queue", "batch"]


def test_every_phase_is_in_the_table_and_leads_forward_to_the_end():
    assert set(TRANSITIONS) == set(Phase)
    for phase, following in TRANSITIONS.items():
        assert all(later > phase for later in following), "no step leads back"
        assert following or phase is Phase.ENDED, "only the end is the end"
    assert all(Phase.SETTLED in TRANSITIONS[phase] for phase in Phase if phase < Phase.SETTLED), (
        "it may end at any time"
    )


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("target", Phase)
def test_only_the_steps_of_the_table_can_be_taken(phase, target):
    request = Request(1, Bench(1, join=False).arrived(), 0.0)
    request.phase = phase
    if target in TRANSITIONS[phase]:
        request.advance(target)
        assert request.phase is target
    else:
        with pytest.raises(AssertionError):
            request.advance(target)
        assert request.phase is phase


def test_settled_and_ended_are_read_from_the_phase():
    request = Request(1, Bench(1, join=False).arrived(), 0.0)
    for phase in Phase:
        request.phase = phase
        assert request.is_settled is (phase in (Phase.SETTLED, Phase.ENDED))
        assert request.is_ended is (phase is Phase.ENDED)


@pytest.mark.parametrize("mode", MODES)
def test_the_phases_of_a_request_that_is_served(mode):
    bench = Bench(1, scheduling={"mode": mode} | ({"queue": {"max_in_flight_per_rank": 1}} if mode != "direct" else {}))
    first = bench.request()
    assert first.phase is Phase.IN_FLIGHT
    if mode != "direct":
        waiting = bench.request()
        assert waiting.phase is Phase.QUEUED
        bench.cancel(waiting, Reason.CANCELLED)
        assert waiting.phase is Phase.ENDED
    bench.batch(0, [(wire_id(first), [9])])
    assert first.phase is Phase.STREAMING
    bench.finish(first)
    assert first.phase is Phase.ENDED


def test_with_several_sequences_the_furthest_one_counts():
    bench = Bench(1, scheduling={"mode": "queue", "queue": {"max_in_flight_per_rank": 1}})
    request = bench.request(n=2)
    assert request.phase is Phase.IN_FLIGHT
    bench.batch(0, [(wire_id(request, 0), [9], "stop")])
    assert request.phase is Phase.STREAMING
    bench.batch(0, [(wire_id(request, 1), [9], "stop")])
    assert request.phase is Phase.ENDED


# ---- nothing after the end -----------------------------------------------------------------------------


def end_by_rank(bench, request):
    bench.finish(request)


def end_by_engine_error(bench, request):
    bench.batch(0, [(wire_id(request), [], "error")])


def end_by_caller(bench, request):
    bench.cancel(request, Reason.CANCELLED)


def end_by_deadline(bench, _):
    bench.tick(5.0)


def end_by_send(bench, request):
    bench.send(SendFailed(0, 1, wire_id(request), "unreachable"))


ENDS = {
    end_by_rank: Evidence.ENGINE,
    end_by_engine_error: Evidence.ENGINE,
    end_by_caller: Evidence.CALLER,
    end_by_deadline: Evidence.DEADLINE,
    end_by_send: Evidence.UNSENT,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ENDS)
def test_whatever_comes_after_the_end_changes_nothing(mode, end):
    bench = Bench(1, scheduling={"mode": mode})
    request = bench.request(deadline_at=bench.now + 5)
    attempt = request.sequences[0].attempt
    end(bench, request)
    assert bench.ended == [request]
    error, ended_at, evidence = request.error, request.ended_at, attempt.evidence
    assert evidence[0] is ENDS[end]
    bench.flush()
    for event in (
        RequestCancelled(request.handle, Reason.CANCELLED),
        SendFailed(0, 1, attempt.wire_id, "late"),
        Tick(),
        RankLost(0, 1, "disconnected"),
        AbortAll(Reason.DRAINING),
    ):
        bench.batch(0, [(attempt.wire_id, [1, 2], "stop")])
        bench.now += 10
        bench.send(event)
    assert bench.ended == [request]
    assert (request.error, request.ended_at, attempt.evidence) == (error, ended_at, evidence)
    assert bench.flush() == [], "no output either"
    assert len(bench.dispatched) == 1
    assert bench.router.counters.double_releases == 0
    assert sum(bench.router.counters.ended.values()) == 1
    bench.assert_quiet()


# ---- evidence ------------------------------------------------------------------------------------------


def evidence(request, index=0):
    return request.sequences[index].attempt.evidence


def test_evidence_names_its_kind_the_incarnation_and_how_much_of_the_rank_was_seen():
    bench = Bench(1)
    bench.join(0)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [9])])
    bench.batch(0, [(wire_id(request), [9], "stop")])
    assert evidence(request) == (Evidence.ENGINE, 2, 2)
    assert bench.router.counters.releases[Evidence.ENGINE] == 1


def test_a_lost_rank_is_evidence_for_what_it_ran_and_not_for_the_rest_of_the_request():
    bench = Bench(2)
    request = bench.request(n=2)
    lost = request.sequences[0].attempt.rank
    bench.lose(lost)
    assert evidence(request, 0)[0] is Evidence.RANK_LOST
    assert evidence(request, 1)[0] is Evidence.GATEWAY
    assert [(effect.rank, effect.wire_ids) for effect in bench.aborted] == [(1 - lost, (wire_id(request, 1),))]


@pytest.mark.parametrize("fault", ["unreadable", "too many tokens"])
def test_what_the_gateway_ends_for_a_bad_row_still_runs_at_its_rank(fault):
    """The engine has not ended it: it is told to, and the release says so."""
    bench = Bench(1)
    request = bench.request(max_tokens=1)
    if fault == "unreadable":
        bench.batch(0, [], failed_ids=[wire_id(request)], fault="ragged")
    else:
        bench.batch(0, [(wire_id(request), [9, 9])])
    assert evidence(request)[0] is Evidence.GATEWAY
    assert [effect.wire_ids for effect in bench.aborted] == [(wire_id(request),)]
    bench.assert_quiet()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.CANCELLED, Evidence.CALLER),
        (Reason.ABORTED, Evidence.CALLER),
        (Reason.SLOW_READER, Evidence.GATEWAY),
        (Reason.DRAINING, Evidence.GATEWAY),
    ],
)
def test_who_cut_a_request_short(reason, kind):
    bench = Bench(1)
    request = bench.request()
    bench.cancel(request, reason)
    assert evidence(request)[0] is kind


def test_what_was_charged_for_a_request_that_was_refused_was_never_sent():
    bench = Bench(2, admission={"max_in_flight_per_rank": 1})
    assert bench.offer(n=3).reason is Reason.RANKS_FULL
    assert bench.dispatched == []
    assert bench.router.counters.releases[Evidence.UNSENT] == 2
    bench.assert_quiet()

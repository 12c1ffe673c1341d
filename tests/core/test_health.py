"""Silent ranks: suspected, heard again, lost, and back on the sockets that were kept."""

from itertools import pairwise

import pytest

from gateway.core.effects import AbortOnRank, ProbeRank, RankStateChanged, RenewIncarnation
from gateway.core.errors import Reason
from gateway.core.events import (
    RankDrained,
    RankHeard,
    RankJoined,
    RankLost,
    RankRenewed,
    RankUndrained,
    SendBlocked,
)
from gateway.core.health import MAX_JOINING_S
from gateway.core.probes import FIRST_S, MAX_S
from gateway.core.silence import FIRST_STEP_S, MAX_STEP_S
from gateway.types import Sampling
from tests.support.core import Bench, load, make_info, wire_id

AFTER_S = 8.0
ON = {"reroute": True, "resume": True}
MODES = ["direct", "queue", "batch"]
GREEDY = Sampling(max_tokens=8, temperature=0.0)


def make(ranks=2, mode="direct", silence=None, failure=None, **more):
    settings = {"after_s": AFTER_S, "prefill_tokens_per_s": 100} | (silence or {})
    return Bench(ranks, scheduling={"mode": mode}, failure=ON | {"silence": settings} | (failure or {}), **more)


def state(bench, rank=0):
    return bench.router.ranks.state[rank].value


def moves(effects):
    return [(each.rank, each.old, each.new) for each in effects if isinstance(each, RankStateChanged)]


def silent(bench, rank=0):
    """The rank says nothing until it is lost; the others do, as far as they have anything to say."""
    effects = []
    for _ in range(1000):
        if state(bench, rank) == "LOST":
            return effects
        for other in range(bench.router.ranks.size):
            if other != rank and bench.router.ranks.in_flight[other]:
                bench.batch(other)
        effects += bench.tick(0.25)
    raise AssertionError("never lost")


def started(bench, rank=0, tokens=(7, 8), **more):
    """A request on the rank with its first tokens."""
    request = bench.request(sampling=GREEDY, **more)
    while request.sequences[0].attempt.rank != rank:
        request = bench.request(sampling=GREEDY, **more)
    bench.batch(rank, [(wire_id(request), tokens)])
    return request


# ---- suspicion ---------------------------------------------------------------------------------


def test_an_idle_rank_is_never_suspect():
    bench = make()
    bench.finish(bench.request())
    bench.pass_time(100 * AFTER_S, step_s=1.0)
    assert [state(bench, rank) for rank in (0, 1)] == ["READY", "READY"]
    assert not bench.probed


def test_time_at_rest_is_no_silence():
    """Steps are rare while nothing is in flight: the first one that finds work must not count what came before."""
    bench = make(1)
    bench.tick()
    bench.tick(MAX_STEP_S)
    bench.request()
    bench.tick(0.25)
    assert bench.router.ranks.silent_s == [FIRST_STEP_S]
    bench.tick(0.25)
    assert bench.router.ranks.silent_s == [pytest.approx(FIRST_STEP_S + 0.25)]


def test_requests_that_live_shortly_add_up_to_silence():
    bench = make(1)
    requests = 0
    while state(bench) == "READY":
        request = bench.request()
        requests += 1
        bench.tick(0.05)
        bench.cancel(request, Reason.CANCELLED)
        bench.tick(0.25)
    assert requests == pytest.approx(AFTER_S / 2 / FIRST_STEP_S, abs=2)


def test_a_silent_rank_with_work_is_suspect_and_gets_nothing_new_until_it_is_heard():
    bench = make()
    request = started(bench)
    bench.pass_time(AFTER_S / 2)
    assert state(bench) == "READY"
    effects = bench.pass_time(0.5)
    assert moves(effects) == [(0, "READY", "SUSPECT")]
    (change,) = [each for each in effects if isinstance(each, RankStateChanged)]
    assert "silent for 4." in change.cause
    assert {bench.request().sequences[0].attempt.rank for _ in range(4)} == {1}
    assert request.sequences[0].attempt.rank == 0, "it keeps what it has"
    effects = bench.batch(0, [(wire_id(request), [9])])
    assert moves(effects) == [(0, "SUSPECT", "READY")]
    assert bench.router.counters.suspects == [1, 0]
    assert list(request.sequences[0].take()[0]) == [7, 8, 9]


@pytest.mark.parametrize("message", ["batch", "report", "noise"])
def test_any_message_is_a_sign_of_life(message):
    bench = make()
    request = started(bench)
    for _ in range(10):
        bench.pass_time(AFTER_S / 2 - 0.5)
        if message == "batch":
            bench.batch(0, [(wire_id(request), [])])
        elif message == "report":
            bench.batch(0, [], load(1, 0))
        else:
            bench.send(RankHeard(0, 1))
    assert state(bench) == "READY"
    bench.send(RankHeard(0, 7))
    assert bench.router.counters.stale_events == 1


def test_time_without_work_does_not_count_and_time_with_work_adds_up():
    """Callers that give up early must not hide a rank that never answers."""
    bench = make()
    for _ in range(4):
        request = bench.request(pinned_rank=0)
        bench.pass_time(1.0, step_s=0.05)
        bench.cancel(request, Reason.CANCELLED)
        bench.pass_time(60.0, step_s=1.0)
        assert state(bench) == "READY"
    bench.request(pinned_rank=0)
    bench.pass_time(0.5)
    assert state(bench) == "SUSPECT"


def test_a_long_prefill_gets_its_time():
    bench = make()
    bench.request([1] * 3000, pinned_rank=0)
    bench.pass_time(30 + AFTER_S / 2)
    assert state(bench) == "READY"
    bench.pass_time(0.5)
    assert state(bench) == "SUSPECT"
    bench.pass_time(AFTER_S / 2)
    assert state(bench) == "LOST"


def test_what_was_aborted_meanwhile_has_had_its_time_too():
    bench = make()
    long, short = bench.request([1] * 2000, pinned_rank=0), bench.request([1], pinned_rank=0)
    bench.pass_time(15.0)
    bench.cancel(long, Reason.CANCELLED)
    bench.pass_time(5.0)
    assert state(bench) == "READY"
    bench.batch(0, [(wire_id(short), [4])])
    bench.pass_time(AFTER_S / 2 + 0.5)
    assert state(bench) == "SUSPECT", "a message ends that allowance"


def test_a_gateway_that_stood_still_blames_nobody():
    bench = make()
    started(bench)
    bench.tick()
    for _ in range(3):
        bench.tick(500.0)
        assert state(bench) == "READY"
    bench.tick(500.0)
    assert state(bench) == "SUSPECT"


def test_a_suspect_without_work_is_asked_once_and_its_answer_is_nobodys():
    bench = make()
    request = bench.request(pinned_rank=0)
    bench.pass_time(AFTER_S / 2 + 0.5)
    assert not bench.probed
    bench.cancel(request, Reason.CANCELLED)
    bench.pass_time(0.5)
    (probe,) = bench.probed
    assert (probe.rank, probe.incarnation) == (0, 1)
    assert probe.request.sampling.max_tokens == 1
    assert not bench.offer(pinned_rank=1).error
    bench.batch(0, [(probe.request.wire_id, [5], "length")])
    assert state(bench) == "READY"
    assert bench.router.counters.late_rows == 0
    assert not any(probe.request.wire_id in effect.wire_ids for effect in bench.aborted)


def test_a_suspect_that_does_not_answer_is_lost():
    bench = make()
    bench.cancel(started(bench, 0), Reason.CANCELLED)
    request = bench.request(pinned_rank=0)
    bench.pass_time(AFTER_S / 2 + 0.5)
    bench.cancel(request, Reason.CANCELLED)
    bench.pass_time(AFTER_S / 2)
    assert state(bench) == "LOST"
    bench.assert_quiet()


def test_a_rank_that_takes_no_messages_owes_a_sign_of_life():
    bench = make()
    bench.send(SendBlocked(0, 1))
    bench.pass_time(AFTER_S + 0.5)
    assert state(bench) == "LOST"


@pytest.mark.parametrize("settings", [{"silence": None}, {"silence": {"after_s": 1e9}}])
def test_the_rule_can_be_off(settings):
    bench = Bench(2, failure=ON | settings)
    started(bench)
    bench.pass_time(1000.0, step_s=1.0)
    assert state(bench) == "READY"


# ---- loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_stays_silent_is_lost_and_its_work_goes_on_elsewhere(mode):
    bench = make(mode=mode)
    request = started(bench)
    old = wire_id(request)
    effects = silent(bench)
    assert moves(effects) == [(0, "READY", "SUSPECT"), (0, "SUSPECT", "LOST")]
    aborts = [each for each in effects if isinstance(each, AbortOnRank)]
    assert [(each.rank, each.incarnation, list(each.wire_ids)) for each in aborts] == [(0, 1, [old])]
    renewals = [each for each in effects if isinstance(each, RenewIncarnation)]
    assert renewals == [RenewIncarnation(0, 1)]
    assert effects.index(aborts[0]) < effects.index(renewals[0]), "the abort is the old incarnation's"
    second = request.sequences[0].attempt
    assert (second.rank, second.number) == (1, 2)
    assert list(bench.dispatched[-1].request.prompt_token_ids) == [5, 6, 7, 7, 8]
    assert bench.router.counters.silence_losses == [1, 0]
    bench.finish(request)


def test_what_cannot_go_on_ends_with_what_it_has():
    bench = make()
    request = bench.request(pinned_rank=0, sampling=Sampling(max_tokens=8, temperature=1.0))
    bench.batch(0, [(wire_id(request), [7, 8])])
    silent(bench)
    assert request.error.reason is Reason.RANK_LOST
    assert "silent for" in request.error.message
    assert request.error.facts["delivered_tokens"] == 2
    bench.assert_quiet()


def test_a_draining_rank_is_lost_by_its_silence_and_drains_again_when_it_is_back():
    bench = make()
    started(bench)
    bench.send(RankDrained(0))
    silent(bench)
    bench.renew()
    bench.batch(0)
    effects = bench.pass_time(1.5)
    assert moves(effects) == [(0, "JOINING", "DRAINING")]


def test_one_rank_of_a_coupled_group_silences_them_all():
    group = {"name": "g", "protocol": "vllm", "handshake": "ipc:///g", "ranks": 2, "coupled": True}
    bench = make(groups=[group])
    started(bench)
    effects = silent(bench)
    assert {each.rank for each in effects if isinstance(each, RenewIncarnation)} == {0, 1}
    assert [state(bench, rank) for rank in (0, 1)] == ["LOST", "LOST"]
    assert bench.router.counters.silence_losses == [1, 0]
    bench.renew()
    assert {probe.rank for probe in bench.probed} == {0, 1}, "an idle engine says nothing by itself"
    for rank in (0, 1):
        bench.batch(rank)
    bench.pass_time(1.5)
    assert [state(bench, rank) for rank in (0, 1)] == ["READY", "READY"]


def test_the_others_of_a_coupled_group_come_back_on_their_sockets_after_one_was_lost():
    group = {"name": "g", "protocol": "vllm", "handshake": "ipc:///g", "ranks": 2, "coupled": True}
    bench = make(groups=[group])
    bench.send(RankLost(0, 1, "disconnected"))
    assert bench.renewals == [RenewIncarnation(1, 1)]
    bench.renew()
    bench.batch(1)
    bench.pass_time(1.5)
    assert [state(bench, rank) for rank in (0, 1)] == ["LOST", "READY"]


# ---- the way back ------------------------------------------------------------------------------


def lost(bench, **more):
    """A request that moved from rank 0, which is lost and renewed, to rank 1. Returns it and its old id."""
    request = started(bench, **more)
    old = wire_id(request)
    silent(bench)
    bench.renew()
    return request, old


def test_its_next_message_begins_its_next_incarnation_and_old_rows_go_to_nobody():
    bench = make()
    request, old = lost(bench)
    assert (state(bench), bench.router.ranks.incarnation[0]) == ("LOST", 2)
    request.sequences[0].take()
    assert moves(bench.batch(0, [(old, [99])], load(3, 0))) == [(0, "LOST", "JOINING")]
    assert {bench.request().sequences[0].attempt.rank for _ in range(4)} == {1}
    for _ in range(8):
        bench.pass_time(0.5)
        bench.batch(0, [(old, [99])])
        bench.batch(1)
        assert state(bench) == "JOINING", "not while rows of before come"
    aborts = [each for each in bench.aborted if each.rank == 0 and each.incarnation == 2]
    assert 3 <= len([each for each in aborts if old in each.wire_ids]) <= 5, "aborted again, at most once a second"
    assert moves(bench.pass_time(1.0)) == [(0, "JOINING", "READY")]
    bench.batch(0, [(old, [99])])
    assert bench.router.counters.late_rows == 10
    assert list(request.sequences[0].take()[0]) == []
    second = request.sequences[0].attempt
    bench.batch(1, [(second.wire_id, [9, 10, 11, 12, 13, 14], "length")])
    assert list(request.sequences[0].take()[0]) == [9, 10, 11, 12, 13, 14]
    assert (request.error, request.sequences[0].completion_tokens) == (None, 8)


def test_a_rank_that_never_stops_sending_old_rows_is_ready_all_the_same():
    bench = make()
    _, old = lost(bench)
    bench.batch(0, [(old, [99])])
    for _ in range(int(2 * MAX_JOINING_S)):
        bench.tick(0.5)
        bench.batch(0, [(old, [99])])
    effects = bench.tick(0.5)
    assert state(bench) == "READY"
    assert not effects


def test_a_lost_rank_is_asked_at_once_and_then_less_and_less_often():
    bench = make()
    lost(bench)
    assert [probe.incarnation for probe in bench.probed] == [2]
    at = [bench.now]
    while len(at) < 7:
        before = len(bench.probed)
        effects = bench.tick(0.5)
        if len(bench.probed) > before:
            at.append(bench.now)
            ids = [each.wire_ids for each in effects if isinstance(each, AbortOnRank) and each.rank == 0]
            assert ids == [(bench.probed[-2].request.wire_id,)], "one at a time"
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert gaps == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, MAX_S, MAX_S]
    assert len({probe.request.wire_id for probe in bench.probed}) == 7
    bench.batch(0, [(bench.probed[0].request.wire_id, [1], "length")])
    bench.pass_time(1.5)
    assert state(bench) == "READY"
    bench.pass_time(10 * MAX_S, step_s=1.0)
    assert len(bench.probed) == 7


def test_an_answer_to_a_probe_is_no_old_row():
    bench = make(silence={"quiet_s": 1.0})
    lost(bench)
    bench.batch(0)
    bench.pass_time(0.75)
    bench.batch(0, [(bench.probed[-1].request.wire_id, [1], "length")])
    bench.pass_time(0.5)
    assert state(bench) == "READY"


@pytest.mark.parametrize("when", ["before it is renewed", "renewed", "joining", "back"])
def test_a_connection_that_ends_after_all_and_a_new_process_in_any_order(when):
    """The link loses the rank; a new process dials. Whatever the core has been told before, it serves again."""
    bench = make()
    started(bench)
    silent(bench)
    incarnation = 1
    if when != "before it is renewed":
        bench.renew()
        incarnation = 2
    if when in ("joining", "back"):
        bench.pass_time(1.5)  # long enough after the aborts for its report to be believed
        bench.batch(0, [], load(3, 1))
        assert bench.router.ranks.reported_running[0] == 3
        bench.send(SendBlocked(0, 2))
    if when == "back":
        bench.pass_time(1.5)
    bench.renewals.clear()
    bench.send(RankLost(0, incarnation, "disconnected"))
    assert state(bench) == "LOST"
    assert (bench.router.ranks.reported_running[0], bench.router.ranks.is_blocked[0]) == (0, False)
    asked = len(bench.probed)
    bench.pass_time(100.0, step_s=1.0)
    assert len(bench.probed) == asked, "there is nobody to ask"
    bench.send(RankJoined(rank=0, incarnation=incarnation + 1, info=make_info()))
    assert state(bench) == "READY"
    bench.finish(bench.request(pinned_rank=0))


def test_a_renewal_that_comes_too_late_changes_nothing():
    bench = make()
    started(bench)
    silent(bench)
    bench.send(RankJoined(rank=0, incarnation=3, info=make_info()))
    bench.renew()
    assert (state(bench), bench.router.ranks.incarnation[0]) == ("READY", 3)
    assert bench.router.counters.stale_events == 1
    bench.send(RankRenewed(0, 9))
    assert state(bench) == "READY"
    bench.finish(bench.request(pinned_rank=0))


def test_a_new_process_replaces_one_that_is_joining():
    bench = make()
    lost(bench)
    bench.batch(0)
    assert state(bench) == "JOINING"
    bench.join(0)
    assert (state(bench), bench.router.ranks.incarnation[0]) == ("READY", 3)


def test_a_message_of_a_rank_that_was_not_renewed_is_stale():
    bench = make()
    request = started(bench)
    silent(bench)
    bench.batch(0, [(wire_id(request), [99])])
    assert state(bench) == "LOST"
    assert bench.router.counters.stale_events == 1


@pytest.mark.parametrize("at", ["LOST", "JOINING"])
@pytest.mark.parametrize("is_undrained", [False, True])
def test_a_rank_that_is_drained_on_its_way_back_is_draining_then_unless_it_is_undrained(at, is_undrained):
    bench = make()
    lost(bench)
    if at == "JOINING":
        bench.batch(0)
    bench.send(RankDrained(0))
    assert state(bench) == at
    if is_undrained:
        bench.send(RankUndrained(0))
    bench.batch(0)
    bench.pass_time(1.5)
    assert state(bench) == ("READY" if is_undrained else "DRAINING")


def test_a_new_process_in_the_place_of_one_that_was_drained_is_ready():
    bench = make()
    lost(bench)
    bench.send(RankDrained(0))
    bench.join(0)
    assert state(bench) == "READY"


def test_a_blocked_rank_stays_blocked_when_it_is_back():
    bench = make()
    lost(bench)
    bench.send(SendBlocked(0, 2))
    bench.batch(0)
    bench.pass_time(1.5)
    assert state(bench) == "READY"
    assert {bench.request().sequences[0].attempt.rank for _ in range(3)} == {1}


@pytest.mark.parametrize("mode", MODES)
def test_without_another_rank_the_work_waits_or_ends(mode):
    bench = make(1, mode)
    request = started(bench)
    silent(bench)
    if mode == "direct":
        assert request.error.reason is Reason.RANK_LOST
        return
    assert not request.is_settled
    bench.renew()
    bench.batch(0)
    bench.pass_time(1.5)
    bench.finish(request)
    assert request.error is None
    assert request.sequences[0].completion_tokens == 3


def test_probes_are_told_apart_by_their_effect():
    bench = make()
    dispatched = len(bench.dispatched)
    lost(bench)
    assert all(isinstance(each, ProbeRank) for each in bench.probed)
    assert len(bench.dispatched) - dispatched >= 2
    assert not {probe.request.wire_id for probe in bench.probed} & {each.request.wire_id for each in bench.dispatched}

"""Ranks that fail again and again: what counts, for how long they are ejected, and who is never."""

import pytest

from gateway.core.effects import AbortOnRank, Dispatch, RankStateChanged
from gateway.core.errors import Reason
from gateway.core.events import RankDrained, RankUndrained, SendFailed, SendUnblocked
from gateway.core.recovery import MAX_UNSENT
from gateway.types import Sampling
from tests.support.core import Bench, wire_id

EJECT = {"after_failures": 3, "base_s": 4.0, "max_s": 10.0, "max_ratio": 0.5, "young_s": 2.0}
GREEDY = Sampling(max_tokens=8, temperature=0.0)


def make(ranks=4, eject=None, failure=None, **more):
    return Bench(ranks, failure={"eject": EJECT | (eject or {})} | (failure or {}), **more)


def state(bench, rank=0):
    return bench.router.ranks.state[rank].value


def states(bench):
    return [state.value for state in bench.router.ranks.state]


def end(bench, rank=0, finish="error"):
    """A request that the rank ends so."""
    request = bench.request(pinned_rank=rank)
    bench.batch(rank, [(wire_id(request), [], finish)])
    return request


def fail(bench, rank=0, times=3):
    for _ in range(times):
        if state(bench, rank) == "READY":
            end(bench, rank)


def lose_young(bench, rank=0):
    bench.lose(rank)
    bench.join(rank)


def test_failures_in_a_row_eject_a_rank_and_time_brings_it_back():
    bench = make()
    fail(bench, times=2)
    assert state(bench) == "READY"
    effects = bench.send(bench.arrived(pinned_rank=0))
    held = next(each for each in effects if isinstance(each, Dispatch)).request.wire_id
    request = bench.request(pinned_rank=0)
    effects = bench.batch(0, [(wire_id(request), [], "error")])
    (change,) = [each for each in effects if isinstance(each, RankStateChanged)]
    assert (change.old, change.new) == ("READY", "EJECTED")
    assert change.cause == "for 4 s: 3 failures in a row, the last: engine error"
    assert 0 not in {bench.request().sequences[0].attempt.rank for _ in range(6)}
    assert bench.offer(pinned_rank=0).reason is Reason.PINNED_RANK_UNAVAILABLE
    effects = bench.batch(0, [(held, [5], "stop")])
    assert not [each for each in effects if isinstance(each, AbortOnRank)], "it ends what it has"
    assert bench.ended[-1].error is None
    bench.pass_time(3.75)
    assert state(bench) == "EJECTED"
    bench.pass_time(0.25)
    assert state(bench) == "READY"
    assert bench.router.counters.ejections == [1, 0, 0, 0]


def test_the_next_failure_ejects_again_for_twice_as_long_until_a_success():
    bench = make()
    fail(bench)
    spans = []
    for _ in range(4):
        before = bench.now
        while state(bench) == "EJECTED":
            bench.tick(0.5)
        spans.append(bench.now - before)
        fail(bench, times=1)
    assert spans == [4.0, 8.0, 10.0, 10.0]
    bench.pass_time(10.0)
    end(bench, finish="stop")
    fail(bench, times=2)
    assert state(bench) == "READY"
    fail(bench, times=1)
    bench.pass_time(4.0)
    assert state(bench) == "READY", "as the first time"


@pytest.mark.parametrize("finish", ["abort", "stop", "length"])
def test_what_the_engine_refuses_or_completes_is_no_failure(finish):
    bench = make()
    for _ in range(20):
        end(bench, finish=finish)
    assert bench.router.ranks.failures == [0] * 4


def test_neither_is_what_callers_or_the_gateway_end():
    bench = make()
    for reason in (Reason.CANCELLED, Reason.ABORTED, Reason.SLOW_READER, Reason.INTERNAL):
        bench.cancel(bench.request(pinned_rank=0), reason)
    bench.request(pinned_rank=0, deadline_at=bench.now + 1)
    bench.tick(2.0)
    bench.offer([1] * 5000, pinned_rank=0)
    for cause in ("overflow", "encode"):
        request = bench.request(pinned_rank=0)
        bench.send(SendFailed(0, 1, wire_id(request), cause))
    assert bench.router.ranks.failures == [0] * 4


def test_one_request_counts_once_however_many_sequences_of_it_fail():
    bench = make(1 + 2)
    request = bench.request(n=9)
    for sequence in list(request.sequences):
        attempt = sequence.attempt
        bench.batch(attempt.rank, [(attempt.wire_id, [], "error")])
    assert max(bench.router.ranks.failures) <= 1


def test_more_tokens_than_asked_for_are_a_failure():
    bench = make()
    for _ in range(3):
        request = bench.request(pinned_rank=0, max_tokens=2)
        bench.batch(0, [(wire_id(request), [1, 2, 3])])
    assert state(bench) == "EJECTED"


def test_a_rank_that_is_lost_as_often_as_it_joins_is_ejected_when_it_joins():
    bench = make()
    for _ in range(2):
        lose_young(bench)
        assert state(bench) == "READY"
    bench.lose(0)
    assert state(bench) == "LOST"
    bench.join(0)
    assert state(bench) == "EJECTED"
    bench.pass_time(4.0)
    assert state(bench) == "READY"


def test_a_loss_after_a_while_is_none_of_its_failures():
    bench = make()
    for _ in range(5):
        bench.pass_time(2.0)
        lose_young(bench)
    assert (state(bench), bench.router.ranks.failures[0]) == ("READY", 0)


def test_silences_count():
    bench = make(failure={"silence": {"after_s": 4.0, "quiet_s": 0.5}})
    for times in (1, 2, 3):
        bench.request(pinned_rank=0)
        bench.pass_time(6.0)
        assert state(bench) == "LOST"
        assert bench.router.ranks.failures[0] == times
        bench.renew()
        bench.batch(0)
        bench.pass_time(1.0)
    assert state(bench) == "EJECTED"


# ---- who stays ---------------------------------------------------------------------------------


def test_no_more_than_their_share_is_ejected_at_once():
    bench = make(5)
    for rank in range(5):
        fail(bench, rank, times=4)
    assert states(bench) == ["EJECTED"] * 2 + ["READY"] * 3
    assert bench.router.counters.ejections_capped == 6
    bench.pass_time(4.0)
    assert states(bench) == ["READY"] * 5
    fail(bench, 4, times=1)
    assert state(bench, 4) == "EJECTED", "its failures are remembered"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_last_ready_rank_of_a_group_stays(ranks):
    bench = make(ranks, {"max_ratio": 1.0})
    for rank in range(ranks):
        fail(bench, rank)
    assert states(bench) == ["EJECTED"] * (ranks - 1) + ["READY"]


@pytest.mark.parametrize("how", ["lost", "drained", "suspect"])
def test_a_group_without_a_ready_rank_takes_an_ejected_one_back(how):
    bench = make(3, {"max_ratio": 1.0}, {"silence": {"after_s": 4.0}, "reroute": True})
    fail(bench, 1)
    bench.now += 1.0
    fail(bench, 0)
    request = bench.request(pinned_rank=None)
    assert request.sequences[0].attempt.rank == 2
    if how == "lost":
        bench.lose(2)
        assert request.sequences[0].attempt.rank == 1, "and what was lost goes there"
    elif how == "drained":
        bench.send(RankDrained(2))
    else:
        bench.pass_time(2.5)
        assert state(bench, 2) == "SUSPECT"
    assert state(bench, 1) == "READY", "the one that would be back first"
    assert state(bench, 0) == "EJECTED"


def test_ranks_of_a_coupled_group_are_never_ejected():
    group = {"name": "g", "protocol": "vllm", "handshake": "ipc:///g", "ranks": 4, "coupled": True}
    bench = make(groups=[group])
    fail(bench, times=20)
    assert states(bench) == ["READY"] * 4


def test_groups_are_judged_by_themselves():
    groups = [
        {"name": name, "protocol": "vllm", "handshake": f"ipc:///{name}", "ranks": 2, "coupled": name == "c"}
        for name in "abc"
    ]
    bench = make(groups=groups)
    for rank in range(6):
        fail(bench, rank, times=4)
    assert states(bench) == ["EJECTED", "READY"] * 2 + ["READY"] * 2


def test_ejection_can_be_off():
    bench = Bench(4, failure={"eject": None})
    fail(bench, times=50)
    for _ in range(20):
        lose_young(bench)
    assert states(bench) == ["READY"] * 4


# ---- operators ---------------------------------------------------------------------------------


def test_an_operator_may_end_an_ejection_or_drain_an_ejected_rank():
    bench = make()
    fail(bench)
    bench.send(RankUndrained(0))
    assert (state(bench), bench.router.ranks.failures[0]) == ("READY", 0)
    fail(bench)
    bench.send(RankDrained(0))
    bench.pass_time(60.0)
    assert state(bench) == "DRAINING"
    bench.send(RankUndrained(0))
    assert state(bench) == "READY"


# ---- sends that fail ---------------------------------------------------------------------------


def unreachable(bench, request):
    attempt = request.sequences[0].attempt
    incarnation = bench.router.ranks.incarnation[attempt.rank]
    bench.send(SendFailed(attempt.rank, incarnation, attempt.wire_id, "unreachable"))
    bench.send(SendUnblocked(attempt.rank, incarnation))


def test_refused_sends_use_up_no_attempts_but_are_bounded():
    bench = make(failure={"max_attempts": 2, "reroute": True, "resume": True, "eject": None})
    request = bench.request(sampling=GREEDY)
    for _ in range(MAX_UNSENT):
        unreachable(bench, request)
    attempt = request.sequences[0].attempt
    bench.batch(attempt.rank, [(attempt.wire_id, [7])])
    bench.lose(attempt.rank)
    assert request.sequences[0].attempt.number == MAX_UNSENT + 2, "the second that left"
    bench.lose(request.sequences[0].attempt.rank)
    assert request.error.reason is Reason.RANK_LOST
    request = bench.request(sampling=GREEDY)
    for _ in range(MAX_UNSENT + 1):
        unreachable(bench, request)
    assert request.error.reason is Reason.SEND_FAILED
    assert request.error.facts["attempts"] == MAX_UNSENT + 1
    bench.assert_quiet()


def test_a_request_that_cannot_be_encoded_is_tried_as_often_as_any():
    bench = make(failure={"max_attempts": 2, "reroute": True})
    request = bench.request()
    for number in (1, 2):
        assert request.sequences[0].attempt.number == number
        bench.send(SendFailed(request.sequences[0].attempt.rank, 1, wire_id(request), "encode"))
    assert request.error.reason is Reason.SEND_FAILED


def test_a_burst_of_refused_sends_is_one_failure():
    bench = make(failure={"reroute": True})
    for _ in range(10):
        unreachable(bench, bench.request(pinned_rank=0))
    assert bench.router.ranks.failures[0] == 1
    for _ in range(2):
        bench.now += 1.0
        unreachable(bench, bench.request(pinned_rank=0))
    assert state(bench) == "EJECTED"

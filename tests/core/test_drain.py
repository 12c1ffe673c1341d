"""An operator's drain: what moves, what stays and ends in its own time, and what ends the drain."""

import pytest

from gateway.config.schema import Config
from gateway.core.effects import AbortOnRank, Dispatch
from gateway.core.errors import Reason
from gateway.core.events import RankDrained, RankJoined, RankUndrained, Reconfigured, SendBlocked, SendUnblocked
from gateway.types import Sampling
from tests.support.core import Bench, make_config, make_info, wire_id

ON = {"reroute": True, "resume": True}
MODES = ["direct", "queue", "batch"]
SLOTS = 4


def greedy(max_tokens=50):
    return Sampling(max_tokens=max_tokens, temperature=0.0)


def make(ranks=2, mode="direct", queue=None, batch=None, **more):
    scheduling = {"mode": mode}
    if mode != "direct":
        scheduling["queue"] = {"timeout_s": 2.0} | (queue or {})
    if mode == "batch":
        scheduling["batch"] = {"max_in_flight_batches": 2} | (batch or {})
    return Bench(ranks, failure=ON, scheduling=scheduling, **more)


def state(bench, rank=0):
    return bench.router.ranks.state[rank].value


def stream(bench, rank, count, sampling=None, **more):
    """Requests on one rank with their first tokens; the others take nothing meanwhile."""
    others = [other for other in range(bench.router.ranks.size) if other != rank]
    for other in others:
        bench.send(SendBlocked(other, bench.router.ranks.incarnation[other]))
    requests = []
    for _ in range(count):
        request = bench.request(sampling=sampling or greedy(), **more)
        bench.tick(0.02)
        bench.batch(rank, [(wire_id(request), [7, 8])])
        requests.append(request)
    for other in others:
        bench.send(SendUnblocked(other, bench.router.ranks.incarnation[other]))
    return requests


def on_rank(bench, rank):
    return bench.router.ranks.in_flight[rank]


# ---- what moves --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("free", [0, 1, 2])
def test_only_what_has_room_elsewhere_moves_and_the_rest_ends_where_it_is(mode, free):
    bench = make(mode=mode, admission={"max_in_flight_per_rank": SLOTS})
    mine = stream(bench, 0, SLOTS)
    stream(bench, 1, SLOTS - free)
    effects = bench.send(RankDrained(0, migrate=True))
    assert [on_rank(bench, 0), on_rank(bench, 1)] == [SLOTS - free, SLOTS]
    assert len([each for each in effects if isinstance(each, AbortOnRank)]) == free
    assert bench.router.queue_depth == 0
    bench.tick(100.0)
    assert not any(request.is_settled for request in mine), "nobody's stream ends for a drain"
    for request in mine:
        bench.finish(request)
        assert request.error is None
    assert [len(list(request.arrived.prompt_token_ids)) for request in mine] == [3] * SLOTS


@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_the_gate_of_the_other_rank_counts(mode):
    bench = make(mode=mode, queue={"gate_tokens": 4})
    (mine,) = stream(bench, 0, 1)
    busy = bench.request([5] * 9, pinned_rank=1)
    bench.send(RankDrained(0, migrate=True))
    assert mine.sequences[0].attempts == 1, "rank 1 has more than 4 prompt tokens that it has not started"
    bench.batch(1, [(wire_id(busy), [3])])
    bench.send(RankDrained(0, migrate=True))
    assert mine.sequences[0].attempt.rank == 1, "asked once more"


def test_room_for_kv_counts():
    bench = make(mode="queue", queue={"kv_limit": 0.5}, info=make_info(kv_capacity_tokens=100))
    (mine,) = stream(bench, 0, 1)
    bench.request([5] * 48, pinned_rank=1)
    bench.send(RankDrained(0, migrate=True))
    assert (mine.sequences[0].attempts, bench.router.queue_depth) == (1, 0)


def test_batches_of_the_other_rank_count():
    bench = make(mode="batch", batch={"max_in_flight_batches": 1, "release_at": "finish"})
    mine = stream(bench, 0, 1)
    bench.request(pinned_rank=1)
    bench.send(RankDrained(0, migrate=True))
    assert on_rank(bench, 0) == len(mine)


@pytest.mark.parametrize("mode", MODES)
def test_a_groups_budget_is_not_filled_by_what_leaves_it(mode):
    group = {"name": "g", "protocol": "vllm", "handshake": "ipc:///a", "ranks": 2}
    bench = make(mode=mode, groups=[group | {"budget": {"max_requests": 2, "max_kv_tokens": 106}}])
    mine = stream(bench, 0, 2)
    bench.send(RankDrained(0, migrate=True))
    assert [request.sequences[0].attempt.rank for request in mine] == [1, 1]
    assert bench.router.ranks.group_kv_tokens == [106]


def test_a_budget_that_is_full_without_it_keeps_it():
    groups = [
        {"name": name, "protocol": "vllm", "handshake": f"ipc:///{name}", "ranks": 1, "start_index": index}
        for index, name in enumerate("ab")
    ]
    groups[1]["budget"] = {"max_requests": 1}
    bench = make(groups=groups)
    (mine,) = stream(bench, 0, 1)
    bench.request(pinned_rank=1)
    bench.send(RankDrained(0, migrate=True))
    assert mine.sequences[0].attempts == 1


@pytest.mark.parametrize("mode", MODES)
def test_what_moves_keeps_every_token_and_is_told_to_stop_first(mode):
    bench = make(mode=mode)
    (mine,) = stream(bench, 0, 1)
    old = wire_id(mine)
    effects = bench.send(RankDrained(0, migrate=True))
    (abort,) = [each for each in effects if isinstance(each, AbortOnRank)]
    (sent,) = [each for each in effects if isinstance(each, Dispatch)]
    assert (abort.rank, list(abort.wire_ids), sent.rank) == (0, [old], 1)
    assert effects.index(abort) < effects.index(sent)
    assert list(sent.request.prompt_token_ids) == [5, 6, 7, 7, 8]
    assert sent.request.sampling.max_tokens == 48
    bench.batch(0, [(old, [99])])
    bench.batch(1, [(sent.request.wire_id, [9], "length")])
    assert list(mine.sequences[0].take()[0]) == [7, 8, 9]
    assert bench.router.counters.resumes == 1
    bench.assert_quiet()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_over_or_complete_stays(mode):
    bench = make(mode=mode)
    (complete,) = stream(bench, 0, 1, greedy(2))
    (late,) = stream(bench, 0, 1, deadline_at=bench.now + 1.0)
    bench.now += 2.0
    before = len(bench.dispatched)
    bench.send(RankDrained(0, migrate=True))
    assert len(bench.dispatched) == before
    assert [complete.sequences[0].attempts, late.sequences[0].attempts] == [1, 1]
    bench.tick()
    assert late.error.reason is Reason.DEADLINE_EXCEEDED


# ---- what ends a drain -------------------------------------------------------------------------


def come_back(bench, rank=0, *, reattached):
    incarnation = bench.router.ranks.incarnation[rank] + 1
    bench.send(RankJoined(rank=rank, incarnation=incarnation, info=make_info(), reattached=reattached))


@pytest.mark.parametrize("lost", ["before", "after", "twice"])
def test_a_connection_that_breaks_and_comes_back_ends_no_drain(lost):
    bench = make()
    if lost == "before":
        bench.lose(0)
    bench.send(RankDrained(0))
    if lost != "before":
        bench.lose(0)
    if lost == "twice":
        come_back(bench, reattached=True)
        bench.lose(0)
    come_back(bench, reattached=True)
    assert state(bench) == "DRAINING"
    assert {bench.request().sequences[0].attempt.rank for _ in range(4)} == {1}
    bench.send(RankUndrained(0))
    assert state(bench) == "READY"
    bench.lose(0)
    come_back(bench, reattached=True)
    assert state(bench) == "READY", "undrained is undrained"


@pytest.mark.parametrize("is_lost_first", [False, True])
def test_a_new_process_ends_a_drain(is_lost_first):
    bench = make()
    bench.send(RankDrained(0))
    if is_lost_first:
        bench.lose(0)
    come_back(bench, reattached=False)
    assert state(bench) == "READY"
    bench.lose(0)
    come_back(bench, reattached=True)
    assert state(bench) == "READY"


@pytest.mark.parametrize("reattached", [False, True])
def test_a_rank_may_be_drained_before_it_has_joined(reattached):
    bench = Bench(2, join=False, failure=ON)
    bench.send(RankDrained(0))
    assert state(bench) == "ABSENT"
    come_back(bench, reattached=reattached)
    assert state(bench) == ("DRAINING" if reattached else "READY")


def test_undraining_a_rank_that_is_away_forgets_the_drain():
    bench = make()
    bench.send(RankDrained(0))
    bench.lose(0)
    bench.send(RankUndrained(0))
    come_back(bench, reattached=True)
    assert state(bench) == "READY"


def test_a_drained_rank_that_comes_back_is_no_rank_to_wait_for():
    """Its coming and going renews nobody's wait."""
    bench = make(1, "queue", queue={"no_rank_wait_s": 3.0, "timeout_s": None})
    bench.send(RankDrained(0))
    request = bench.request()
    for _ in range(2):
        bench.tick(1.0)
        bench.lose(0)
        come_back(bench, reattached=True)
    bench.tick(1.0)
    assert request.error.reason is Reason.NO_ELIGIBLE_RANK


def ranks(count) -> Config:
    return make_config(count, failure=ON)


@pytest.mark.parametrize("drained", ["never", "before", "after"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_rank_that_is_configured_again_goes_by_the_operators_word(drained, is_lost):
    bench = make()
    held = bench.request(pinned_rank=1)
    if drained == "before":
        bench.send(RankDrained(1))
    bench.send(Reconfigured(ranks(1)))
    assert state(bench, 1) == "DRAINING"
    if drained == "after":
        bench.send(RankDrained(1))
    if is_lost:
        bench.lose(1)
    bench.send(Reconfigured(ranks(2)))
    if is_lost:
        bench.send(RankJoined(rank=1, incarnation=2, info=make_info(), reattached=True))
    assert state(bench, 1) == ("READY" if drained == "never" else "DRAINING")
    assert held.is_settled is is_lost

"""Ranks whose socket takes nothing: what waits for them has an end."""

import pytest

from gateway.core.effects import RankStateChanged
from gateway.core.errors import Reason
from gateway.core.events import LoadReported, RankHeard, SendBlocked, SendUnblocked
from tests.support.core import Bench, load, make_info, wire_id

AFTER_S = 8.0
MODES = ["direct", "queue", "batch"]


def make(ranks=2, mode="queue", **more):
    silence = {"after_s": AFTER_S, "quiet_s": 1.0}
    failure = {"reroute": True, "resume": True, "silence": silence}
    return Bench(ranks, failure=failure, scheduling={"mode": mode}, **more)


def state(bench, rank=0):
    return bench.router.ranks.state[rank].value


def talk(bench, seconds, message="report", rank=0):
    """The rank goes on about other work than ours."""
    effects = []
    for _ in range(int(seconds / 0.5)):
        if message == "report":
            bench.send(LoadReported(rank, bench.router.ranks.incarnation[rank], load(3, 0)))
        else:
            bench.send(RankHeard(rank, bench.router.ranks.incarnation[rank]))
        effects += bench.tick(0.5)
    return effects


@pytest.mark.parametrize("message", ["report", "heard"])
@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_what_is_pinned_to_a_rank_that_takes_nothing_ends_whatever_it_says(mode, message):
    bench = make(mode=mode)
    bench.send(SendBlocked(0, 1))
    pinned = bench.request(pinned_rank=0)
    effects = talk(bench, AFTER_S + 1.0, message)
    assert state(bench) == "LOST"
    assert pinned.error.reason is Reason.RANK_LOST
    causes = [each.cause for each in effects if isinstance(each, RankStateChanged)]
    assert causes == ["took no messages for 4.0 s", "took no messages for 8.0 s"]


def test_what_only_that_rank_could_take_waits_for_it_no_longer():
    bench = make(join=False)
    bench.join(0)
    bench.join(1, info=make_info(max_model_len=40))
    bench.send(SendBlocked(0, 1))
    large = bench.request([5] * 50)
    talk(bench, AFTER_S + 1.0 + bench.config.scheduling.queue.no_rank_wait_s)
    assert large.error.reason is Reason.NO_ELIGIBLE_RANK


def test_one_that_works_for_us_is_left_its_work():
    bench = make()
    request = bench.request(pinned_rank=0)
    bench.send(SendBlocked(0, 1))
    for _ in range(int(4 * AFTER_S)):
        bench.batch(0, [(wire_id(request), [4])] if request.sequences[0].completion_tokens < 15 else [])
        bench.tick(0.5)
    assert state(bench) == "READY"


def test_one_that_takes_messages_again_begins_anew():
    bench = make()
    bench.send(SendBlocked(0, 1))
    talk(bench, AFTER_S / 2 - 1.0)
    bench.send(SendUnblocked(0, 1))
    assert bench.router.ranks.silent_s[0] == 0.0
    bench.request(pinned_rank=0)
    bench.pass_time(AFTER_S / 2 - 0.5)
    assert state(bench) == "READY"


def test_one_that_only_takes_messages_but_has_work_does_not():
    bench = make()
    bench.request(pinned_rank=0)
    bench.pass_time(2.0)
    bench.send(SendBlocked(0, 1))
    bench.send(SendUnblocked(0, 1))
    assert bench.router.ranks.silent_s[0] == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize("mode", MODES)
def test_one_that_refused_a_send_without_another_word_is_lost_in_time(mode):
    bench = make(mode=mode)
    bench.router.ranks.is_blocked[0] = True
    bench.router.ranks.refresh(0)
    talk(bench, AFTER_S + 1.0)
    assert state(bench) == "LOST"

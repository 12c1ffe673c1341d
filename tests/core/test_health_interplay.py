"""Health beside reloads, drains and waves: what one of them leaves behind must not mislead another."""

import pytest

from gateway.core.effects import RankRemoved, StartWave
from gateway.core.errors import Reason
from gateway.core.events import (
    RankDrained,
    RankJoined,
    RankUndrained,
    Reconfigured,
    SendBlocked,
    SendFailed,
    SendUnblocked,
    WaveReported,
)
from tests.support.core import Bench, make_config, make_info

SILENCE = {"silence": {"after_s": 4.0}}
LOCKSTEP = {"name": "g", "protocol": "vllm", "handshake": "tcp://127.0.0.1:30500", "coupled": True}


def suspected(bench):
    """Rank 0 is SUSPECT, idle, and was asked."""
    request = bench.request(pinned_rank=0)
    bench.pass_time(2.5)
    bench.cancel(request, Reason.CANCELLED)
    bench.tick(0.05)
    assert bench.router.ranks.state[0] == "SUSPECT"
    return bench.probed[-1].request.wire_id


def reconfigure(bench, config):
    bench.config = config
    return bench.send(Reconfigured(config))


def test_without_a_silence_rule_nobody_stays_suspect():
    bench = Bench(2, failure=SILENCE)
    suspected(bench)
    reconfigure(bench, make_config(2, failure={"silence": None}))
    bench.tick(0.05)
    assert bench.router.ranks.state[0] == "READY"


def test_a_suspect_whose_probe_was_lost_is_asked_again():
    bench = Bench(2, failure={"silence": {"after_s": 60.0}})
    request = bench.request(pinned_rank=0)
    bench.pass_time(31.0)
    bench.cancel(request, Reason.CANCELLED)
    bench.tick(0.05)
    bench.send(SendFailed(0, 1, bench.probed[-1].request.wire_id, "overflow"))
    bench.pass_time(12.0)
    assert bench.router.ranks.state[0] == "SUSPECT"
    assert len(bench.probed) > 1
    bench.batch(0, [(bench.probed[-1].request.wire_id, [1], "length")])
    assert bench.router.ranks.state[0] == "READY"


def test_an_answer_that_comes_when_the_rank_is_ready_again_settles_its_probe():
    bench = Bench(2, failure=SILENCE)
    probe = suspected(bench)
    bench.send(RankDrained(0))
    bench.send(RankUndrained(0))
    bench.batch(0, [(probe, [1], "length")])
    bench.finish(bench.request(pinned_rank=0))
    again = suspected(bench)
    assert again != probe, "it is asked before it is lost"


def test_a_rank_that_is_left_out_gets_no_work_however_it_is_brought_back():
    bench = Bench(2)
    bench.request(pinned_rank=1)
    reconfigure(bench, make_config(1))
    bench.send(RankUndrained(1))
    assert {bench.request().sequences[0].attempt.rank for _ in range(4)} == {0}
    bench.join(1)
    assert {bench.request().sequences[0].attempt.rank for _ in range(4)} == {0}


def test_a_rank_may_be_asked_and_removed_by_one_tick():
    bench = Bench(2, groups=[LOCKSTEP | {"ranks": 2}], failure=SILENCE)
    request = bench.request(pinned_rank=1)
    bench.send(SendBlocked(1, 1))
    removed = reconfigure(bench, make_config(groups=[LOCKSTEP | {"ranks": 1}], failure=SILENCE))
    for seconds in [0.25] * 10:
        removed += bench.tick(seconds)
    removed += bench.send(RankUndrained(1))
    removed += bench.cancel(request, Reason.CANCELLED) or []
    removed += bench.tick(0.05)
    assert [effect.rank for effect in removed if isinstance(effect, RankRemoved)] == [1]
    bench.send(SendUnblocked(1, 1))


def test_the_join_of_a_rank_that_nobody_configured_is_nothing():
    bench = Bench(1, groups=[LOCKSTEP | {"ranks": 1}])
    assert bench.send(RankJoined(rank=3, incarnation=1, info=make_info())) == []


@pytest.mark.parametrize("said", [{"complete": 2**32 - 1}, {"start": 2**32 - 1}])
def test_no_rank_can_use_up_the_numbers_of_waves(said):
    bench = Bench(2, groups=[LOCKSTEP | {"ranks": 2}])
    bench.send(WaveReported(1, 1, **said))
    (start,) = [effect for effect in bench.send(bench.arrived()) if isinstance(effect, StartWave)]
    assert start.wave == 0

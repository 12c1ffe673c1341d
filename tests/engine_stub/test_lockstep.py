"""Ranks that step together: the rules of waking, the barrier, and what the coordinator hears."""

import asyncio

import msgspec
import pytest
import zmq

from engine_stub.backend import registry
from engine_stub.config import LoadReports, StubConfig
from engine_stub.dial import Dialler
from engine_stub.engine import RankEngine
from engine_stub.faults import Faults
from engine_stub.group import StubGroup, _card, make_codec
from engine_stub.lockstep import Barrier, LockstepRank, WaveState
from engine_stub.records import Records
from engine_stub.wire.codec import Wave
from tests.support.raw_engine import until

CONFIG = StubConfig(lockstep=True, time_scale=0.0)


def test_a_start_wakes_a_rank_unless_its_wave_is_over():
    state = WaveState()
    state.start(Wave(0, None), 1)
    assert (state.current, state.is_running) == (0, True)
    assert state.end_step(is_unfinished=False) == 0
    assert (state.current, state.is_running) == (1, False)
    state.start(Wave(0, None), 1)
    assert not state.is_running
    state.start(Wave(5, 1), 1)
    assert not state.is_running, "it was left out"
    state.start(Wave(5, 0), 1)
    assert (state.current, state.is_running) == (5, True)


def test_a_request_of_an_old_wave_wakes_a_rank_that_says_so_once():
    state = WaveState()
    assert state.add(0) is None
    state.start(Wave(0, None), 0)
    state.end_step(is_unfinished=False)
    assert state.add(0) == 1
    assert state.add(0) is None, "it runs already"
    assert state.add(7) is None
    assert state.current == 7


def test_steps_count_anew_in_each_wave():
    state = WaveState()
    for expected in (1, 2):
        assert state.end_step(is_unfinished=True) is None
        assert state.step == expected
    state.end_step(is_unfinished=False)
    assert state.step == 0


class Part:
    def __init__(self, work):
        self.work, self.log = work, []

    def commit(self):
        self.work -= 1
        self.log.append("commit")
        return self.work > 0

    def go_on(self, *, is_unfinished):
        self.log.append(is_unfinished)


def test_nobody_passes_the_barrier_before_all_have_come():
    barrier, parts = Barrier(2), [Part(1), Part(2)]
    barrier.arrive(1, parts[1])
    assert parts[1].log == []
    barrier.arrive(0, parts[0])
    assert [part.log for part in parts] == [["commit", True]] * 2
    barrier.arrive(0, parts[0])
    barrier.leave(0)
    barrier.arrive(1, parts[1])
    assert len(parts[1].log) == 2, "a step that a dead rank had a part in never ends"


def test_only_the_first_rank_tells_of_waves_and_each_tells_that_it_woke():
    said = [[], []]
    ranks = [
        LockstepRank(Barrier(2), number, 4 + number, lambda *what, number=number: said[number].append(what))
        for number in (0, 1)
    ]
    for rank in ranks:
        rank.take_up([Wave(0, None)])
        rank.end_step(is_unfinished=True)
        rank.take_up([])
        rank.end_step(is_unfinished=False)
    assert said == [[(None, 0), (0, None)], []]
    ranks[1].take_up([0])
    assert said[1] == [(None, 1)]


def test_lockstep_is_vllms():
    with pytest.raises(ValueError, match="lockstep is for ranks that speak vllm"):
        StubGroup("tokenspeed", "tcp://127.0.0.1:1", config=CONFIG)


def test_a_lockstep_rank_says_the_size_of_its_group():
    codec = make_codec("vllm", CONFIG)
    loads = msgspec.msgpack.decode(codec.report(3, None, 0, 0, 7, None, 1.0))
    assert loads == [3, [], None, 1.0, None, None, 7, None, None]


def test_reports_can_be_switched_off():
    def engine(config):
        backend = registry.create("synthetic", config)
        return RankEngine(make_codec("vllm", config), backend, config, 0, Records(4), Faults())

    assert engine(StubConfig()).load_now.running == 0
    assert engine(StubConfig(load=LoadReports(snapshot="none"))).load_now is None


async def test_a_coordinator_that_does_not_answer_is_named():
    context = zmq.Context()
    published, reports, inputs, outputs, handshake = (
        context.socket(kind) for kind in (zmq.XPUB, zmq.PULL, zmq.ROUTER, zmq.PULL, zmq.ROUTER)
    )
    sockets = (published, reports, inputs, outputs, handshake)
    addresses = [f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}" for each in sockets]
    codec = make_codec("vllm", CONFIG)
    dialler = Dialler(context=context, address=addresses[4], codec=codec, output_hwm=0, timeout_s=0.3)
    card = _card(CONFIG, registry.create("synthetic", CONFIG).info, 0, 1)
    dial = asyncio.create_task(dialler.dial(b"\0\0", card, Faults()))
    await until(lambda: bool(handshake.getsockopt(zmq.EVENTS) & zmq.POLLIN), "the HELLO")
    identity, _ = handshake.recv_multipart()
    where = {"inputs": [addresses[2]], "outputs": [addresses[3]]}
    where |= {"coordinator_input": addresses[0], "coordinator_output": addresses[1]}
    handshake.send_multipart([identity, msgspec.msgpack.encode({"addresses": where, "parallel_config": {}})])
    with pytest.raises(Exception, match="the coordinator did not answer"):
        await dial
    for each in sockets:
        each.close(0)
    context.term()

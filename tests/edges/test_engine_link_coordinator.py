"""The gateway as the coordinator of vLLM ranks: subscriptions, reports, waves, and where lockstep groups meet."""

import pytest
import zmq

from gateway.core.events import LoadReported, RankHeard, RankLost, WaveReported
from gateway.edges.engine_link.coordinator import MeetingPoint
from tests.support.link_harness import make_config, request, running_link
from tests.support.raw_engine import pack, ready_response, unpack, until


async def joined(harness, index=0):
    """An engine that starts as real ones do: it registers, and says READY when its subscription is answered."""
    engine = harness.engine(index)
    count = len(harness.joins)
    engine.hello()
    await engine.init()
    subscription = engine.subscribe()
    engine.register()
    assert await engine.receive(subscription) == [b"READY"]
    engine.ready()
    engine.connect_output()
    await until(lambda: len(harness.joins) > count, "the join")
    return engine, subscription


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_every_rank_has_a_coordinator_of_its_own(transport):
    async with running_link(family="vllm", transport=transport, ranks=3) as harness:
        engines = [await joined(harness, index) for index in (1, 0, 2)]
        addresses = {each for engine, _ in engines for each in (*engine.addresses, *engine.coordinator)}
        assert len(addresses) == 12


async def test_the_answer_goes_to_the_rank_that_starts_and_not_to_one_that_serves():
    """A READY that comes later is fatal to older releases."""
    async with running_link(family="vllm") as harness:
        first, subscription = await joined(harness, 0)
        await joined(harness, 1)
        harness.link.start_wave([0], 0)
        assert (await first.receive(subscription))[0] == b"\x02", "the first thing since its own READY"


async def test_a_rank_whose_subscription_comes_twice_is_answered_twice():
    """It dialled again before its first connection was seen to end: the second is the one that it reads."""
    async with running_link(family="vllm") as harness:
        engine = harness.engine(0)
        engine.hello()
        await engine.init()
        first = engine.subscribe()
        assert await engine.receive(first) == [b"READY"]
        second = engine.subscribe()
        assert await engine.receive(second) == [b"READY"]


async def test_a_rank_joins_without_a_subscription():
    """Readiness never waits for one."""
    async with running_link(family="vllm") as harness:
        await harness.joined_engine(0)
        assert [join.rank for join in harness.joins] == [0]


async def test_a_rank_that_serves_is_not_answered_again():
    async with running_link(family="vllm", ranks=1) as harness:
        engine, first = await joined(harness)
        again = engine.subscribe()
        engine.report(0, 0)
        await until(lambda: harness.of(LoadReported))
        harness.link.start_wave([0], 3)
        assert await engine.receive(again) == [b"\x02", pack([3, None])]
        assert await engine.receive(first) == [b"\x02", pack([3, None])]


async def test_a_load_is_reported_by_itself_and_under_the_rank_of_its_socket():
    async with running_link(family="vllm") as harness:
        engine, _ = await joined(harness, 1)
        engine.index = 0  # it lies
        engine.report(3, 2, 0.5, num_skipped_waiting_reqs=1)
        await until(lambda: harness.of(LoadReported))
        (event,) = harness.of(LoadReported)
        load = event.load
        assert (event.rank, event.incarnation) == (1, 1)
        assert (load.running, load.waiting, load.kv_usage, load.source) == (3, 3, 0.5, "coordinator")
        assert harness.link.counters.index_mismatch == 1
        assert harness.link.counters.reports == 1


async def test_of_a_burst_the_last_load_counts():
    async with running_link(family="vllm") as harness:
        engine, _ = await joined(harness)
        for number in range(300):
            engine.report(number, 0)
        await until(lambda: harness.link.counters.reports == 300)
        await until(lambda: harness.of(LoadReported) and harness.of(LoadReported)[-1].load.running == 299)
        assert len(harness.of(LoadReported)) < 100


async def test_what_is_no_report_is_counted_and_harms_nobody():
    async with running_link(family="vllm") as harness:
        engine, _ = await joined(harness)
        for garbage in (b"", b"\xc1", pack("x"), pack({"a": 1})):
            engine.push_report(garbage)
        engine.push_report(pack([0, [], {"num_running_reqs": -4}, 1.0]))
        engine.report(1, 0)
        await until(lambda: harness.of(LoadReported))
        counters = harness.link.counters
        assert sum(counters.noise.values()) == 4
        assert sum(counters.load_faults.values()) == 1
        assert len(harness.of(RankHeard)) == 1
        assert not harness.of(RankLost)


async def test_reports_of_a_rank_that_has_not_joined_are_dropped():
    async with running_link(family="vllm") as harness:
        engine = harness.engine(0)
        engine.hello()
        await engine.init()
        engine.report(5, 5)
        engine.report_wave(start=4)
        await until(lambda: harness.link.counters.reports == 2)
        assert harness.link.counters.early_frames == 2
        engine.register()
        engine.ready()
        await until(lambda: harness.joins)
        engine.report(1, 0)
        await until(lambda: harness.of(LoadReported))
        assert [event.load.running for event in harness.of(LoadReported)] == [1]
        assert not harness.of(WaveReported)


async def test_waves_are_passed_on_and_started():
    async with running_link(family="vllm", coupled=True) as harness:
        engines = [await joined(harness, index) for index in (0, 1)]
        engines[0][0].report_wave(complete=0)
        engines[1][0].report_wave(start=1)
        await until(lambda: len(harness.of(WaveReported)) == 2)
        assert {(e.rank, e.complete, e.start) for e in harness.of(WaveReported)} == {(0, 0, None), (1, None, 1)}
        harness.link.start_wave([0, 1], 1)
        for engine, subscription in engines:
            assert await engine.receive(subscription) == [b"\x02", pack([1, None])]


async def test_a_rank_that_waits_for_its_answer_gets_nothing_else_before():
    """It would take the start of a wave for the answer, and end."""
    async with running_link(family="vllm", coupled=True) as harness:
        engine = harness.engine(0)
        engine.hello()
        await engine.init()
        subscription = engine.subscribe()
        published = harness.link._ranks[0]._channel.coordinator._sockets[0]
        while not published.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            pass  # the loop doesn't turn: the subscription is there, and the gateway has not read it
        harness.link.start_wave([0], 0)
        assert await engine.receive(subscription) == [b"READY"]
        harness.link.start_wave([0], 1)
        assert await engine.receive(subscription) == [b"\x02", pack([1, None])]


async def test_without_a_coordinator_there_are_no_addresses():
    for settings in ({"family": "vllm", "coordinator": False}, {"family": "tokenspeed"}):
        async with running_link(**settings) as harness:
            engine = await harness.joined_engine(0)
            assert engine.coordinator is None
            harness.link.start_wave([0], 0)  # nobody to tell


async def test_ranks_of_a_lockstep_group_meet_at_one_place_and_each_start_at_another():
    async with running_link(family="vllm", coupled=True) as harness:
        engines = [await joined(harness, index) for index in (1, 0)]
        first, second = (engine.parallel_config for engine, _ in engines)
        assert first == second
        assert first["data_parallel_master_ip"] == "127.0.0.1"
        assert (first["data_parallel_size"], first["_coord_store_port"]) == (2, 0)
        ports = [first["data_parallel_master_port"], *first["_data_parallel_master_port_list"]]
        assert len(set(ports)) == 6
        for engine, _ in engines:
            engine.close()
        await until(lambda: len(harness.losses) == 2)
        again = [(await joined(harness, index))[0].parallel_config for index in (0, 1)]
        assert again[0] == again[1] != first


async def test_a_hello_that_is_said_twice_has_one_answer():
    async with running_link(family="vllm", coupled=True) as harness:
        engine = harness.engine(0)
        engine.hello()
        await engine.init()
        first = engine.parallel_config
        engine.hello()
        await engine.init()
        assert engine.parallel_config == first


async def test_independent_ranks_meet_nowhere():
    async with running_link(family="vllm") as harness:
        engine, _ = await joined(harness)
        assert engine.parallel_config == {}


def test_the_meeting_point_is_on_the_host_that_is_named():
    (group,) = make_config(family="vllm", coupled=True, transport="tcp", host="127.0.0.2").groups
    seen = []

    def find(host, count):
        seen.append(host)
        return list(range(1000, 1000 + count))

    assert MeetingPoint(group, find).give(0)["data_parallel_master_ip"] == "127.0.0.2"
    assert seen == ["127.0.0.2"]


async def test_a_restarted_gateway_is_the_coordinator_of_its_running_ranks_again(tmp_path):
    """The addresses are recorded with the others; the rank has had its answer and gets no second one."""
    store = tmp_path / "state"
    async with running_link(store, checks_leaks=False, family="vllm", ranks=1) as harness:
        engine, subscription = await joined(harness)
        await harness.link.close()
        async with running_link(
            store, checks_leaks=False, family="vllm", ranks=1, handshake="tcp://127.0.0.1:0"
        ) as again:
            await until(lambda: again.joins, "the rank to be taken up")
            assert again.joins[0].reattached
            engine.report(2, 1)
            await until(lambda: again.of(LoadReported))
            again.link.start_wave([0], 8)
            message = await engine.receive(subscription)
            assert (message[0], unpack(message[1])) == (b"\x02", [8, None])
            again.link.send(0, again.joins[0].incarnation, request("after"))
            assert unpack((await engine.receive())[1])[0] == "after"


@pytest.mark.parametrize(("coupled", "size", "lines"), [(False, 2, 1), (False, 1, 0), (True, 2, 0)])
async def test_ranks_that_step_together_in_a_group_that_is_not_coupled_are_a_warning(coupled, size, lines):
    """vLLM says a size above 1 only then: they would wait for each other for ever."""
    async with running_link(family="vllm", coupled=coupled) as harness:
        await harness.engine(0).join(ready_response("vllm", data_parallel_size=size))
        await until(lambda: harness.joins)
        assert len(harness.logged("group_not_coupled")) == lines

"""Ranks against raw gateway sockets on loopback: handshake, traffic, aborts, restarts."""

import asyncio

import msgspec
import pytest
import zmq

from engine_stub.config import LoadReports, Model, StubConfig
from engine_stub.faults import Faults
from engine_stub.group import StubGroup
from engine_stub.rank import RankPhase
from engine_stub.scheduler import SchedulerConfig
from engine_stub.tokens import expected_tokens
from engine_stub.wire.codec import Load
from engine_stub.wire.handshake import HandshakeError
from tests.support.raw_gateway import SENTINEL, RawGateway
from tests.support.stub_engine import add_message, finishes_of, read_batch, tokens_of

FLOOD = StubConfig(time_scale=0.0, model=Model(vocab_size=5000))
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(params=["tokenspeed", "vllm"])
def protocol(request):
    return request.param


@pytest.fixture
async def gateway(protocol):
    async with RawGateway(protocol) as gateway:
        yield gateway


def expected(count, prompt=PROMPT, seed=None):
    return expected_tokens(prompt, seed, count, 5000)


class TestHandshake:
    async def test_order_identities_and_registration(self, gateway, protocol):
        async with StubGroup(protocol, gateway.address, ranks=3, start_index=256, config=FLOOD) as group:
            await group.ready()
            await gateway.until(lambda: len(gateway.events) == 9)
            assert set(gateway.order()) == {256, 257, 258}
            for kinds in gateway.order().values():
                assert kinds[0] == "HELLO"
                assert set(kinds[1:]) == {"registered", "READY"}
            for index, rank in gateway.ranks.items():
                assert rank.registration["data_parallel_rank"] == index
                assert rank.registration["data_parallel_size"] == (3 if protocol == "tokenspeed" else 1)
            assert {rank.phase for rank in group.ranks} == {RankPhase.SERVING}

    async def test_the_gateway_may_start_later(self, protocol):
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            probe.bind("tcp://127.0.0.1:*")
            address = probe.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        async with StubGroup(protocol, address, ranks=2, config=FLOOD) as group, RawGateway(protocol) as gateway:
            gateway.handshake.bind(address)
            await group.ready()
            await gateway.registered(2)

    async def test_a_gateway_that_never_answers_ends_the_wait(self, protocol):
        async with RawGateway(protocol, answers=False) as gateway:
            config = msgspec.structs.replace(FLOOD, handshake_timeout_s=0.05)
            async with StubGroup(protocol, gateway.address, ranks=1, config=config) as group:
                with pytest.raises(HandshakeError, match="no INIT"):
                    await group.ready()
                assert group.ranks[0].phase is RankPhase.FAILED

    @pytest.mark.parametrize(
        ("faults", "kinds"),
        [
            (Faults(duplicate_hello=True), ["HELLO", "HELLO", "READY", "registered"]),
            (Faults(ready_first=True), ["HELLO", "READY", "READY", "registered"]),
            (Faults(slow_handshake_s=0.02), ["HELLO", "READY", "registered"]),
            (Faults(swap_ready=True), ["HELLO", "READY", "registered"]),
        ],
    )
    async def test_odd_handshakes(self, gateway, protocol, faults, kinds):
        config = msgspec.structs.replace(FLOOD, faults=faults)
        async with StubGroup(protocol, gateway.address, ranks=1, config=config) as group:
            await group.ready()
            await gateway.until(lambda: "registered" in gateway.order()[0] and len(gateway.events) >= len(kinds))
            assert sorted(gateway.order()[0]) == kinds
            assert gateway.order()[0][0] == ("READY" if faults.ready_first else "HELLO")

    @pytest.mark.parametrize("swapped", [False, True])
    async def test_ready_comes_before_the_registration_on_tokenspeed_and_after_it_on_vllm(
        self, gateway, protocol, swapped
    ):
        """Two sockets have no order at the gateway, so look at the rank, which encodes what it sends next."""
        config = msgspec.structs.replace(FLOOD, faults=Faults(swap_ready=swapped))
        async with StubGroup(protocol, gateway.address, ranks=1, config=config) as group:
            codec = group.ranks[0].engine.codec
            calls = []
            status, registration = codec.status, codec.registration
            codec.status = lambda name: calls.append(name) or status(name)
            codec.registration = lambda card: calls.append("registered") or registration(card)
            await group.ready()
        registers_first = (protocol == "vllm") is not swapped
        assert calls == ["HELLO", "registered", "READY"] if registers_first else ["HELLO", "READY", "registered"]

    @pytest.mark.parametrize(
        ("init", "message"),
        [
            ({"addresses": {"inputs": [], "outputs": []}}, "no input or no output"),
            ({"addresses": {"inputs": ["tcp://nonsense"], "outputs": ["tcp://127.0.0.1:1"]}}, "can't be used"),
            (["not", "a", "map"], "can't be decoded"),
        ],
    )
    async def test_an_init_that_cannot_be_used_fails_the_rank(self, gateway, protocol, init, message):
        gateway.answers = False
        async with StubGroup(protocol, gateway.address, ranks=1, config=FLOOD) as group:
            await gateway.until(lambda: gateway.events)
            await gateway.handshake.send_multipart([b"\x00\x00", msgspec.msgpack.encode(init)])
            with pytest.raises(HandshakeError, match=message):
                await group.ready()


class TestTraffic:
    async def test_every_rank_serves_the_same_tokens(self, gateway, protocol):
        async with StubGroup(protocol, gateway.address, ranks=3, config=FLOOD) as group:
            await group.ready()
            await gateway.registered(3)
            for index in range(3):
                await gateway.add(index, f"r{index}", PROMPT, 40)
                await gateway.add(index, f"s{index}", PROMPT, 10, seed=9)
            for index in range(3):
                batches = await gateway.collect(index, f"r{index}", f"s{index}")
                assert tokens_of(batches, f"r{index}") == expected(40)
                assert tokens_of(batches, f"s{index}") == expected(10, seed=9)
                assert finishes_of(batches, f"r{index}") == ["length"]
                assert {batch.engine_index for batch in batches} == {index}
            await group.ranks[0].wait_until(lambda: not group.ranks[0].live_ids)
            assert [rank.tokens_generated for rank in group.ranks] == [50] * 3

    async def test_a_stop_id_ends_a_request(self, gateway, protocol):
        async with StubGroup(protocol, gateway.address, ranks=1, config=FLOOD) as group:
            await group.ready()
            await gateway.registered(1)
            await gateway.add(0, "a", PROMPT, 40, stop_ids=[expected(4)[-1]])
            batches = await gateway.collect(0, "a")
            assert tokens_of(batches, "a") == expected(4)
            assert finishes_of(batches, "a") == ["stop"]

    async def test_a_burst_shares_its_first_step(self, gateway, protocol):
        async with StubGroup(protocol, gateway.address, ranks=1, config=FLOOD) as group:
            await group.ready()
            await gateway.registered(1)
            for number in range(20):  # as one wake-up of the socket would
                group.ranks[0]._serving._on_frames(add_message(protocol, f"r{number}", PROMPT, 2))
            first = read_batch(await gateway.receive(0))
            assert len(first.rows) == 20

    async def test_an_abort_reaches_the_rank_and_gets_no_row(self, gateway, protocol):
        slow = msgspec.structs.replace(FLOOD, time_scale=0.2)
        async with StubGroup(protocol, gateway.address, ranks=1, config=slow) as group:
            (rank,) = group.ranks
            await group.ready()
            await gateway.registered(1)
            await gateway.add(0, "gone", PROMPT, 4000)
            await gateway.add(0, "stays", PROMPT, 30)
            await gateway.receive(0)
            await gateway.abort(0, "gone", "unknown")
            await rank.wait_until(lambda: rank.records.aborts == 2)
            assert list(rank.received_aborts) == ["gone", "unknown"]
            assert rank.live_ids == {"stays"}
            batches = await gateway.collect(0, "stays")
            assert finishes_of(batches, "gone") == []
            await rank.wait_until(lambda: not rank.live_ids)
            assert rank.engine.scheduler.pool.used == 0

    async def test_the_last_report_is_before_the_commit_on_tokenspeed_and_after_it_on_vllm(self, gateway, protocol):
        async with StubGroup(protocol, gateway.address, ranks=1, config=FLOOD) as group:
            await group.ready()
            await gateway.registered(1)
            await gateway.add(0, "a", PROMPT, 3)
            batches = await gateway.collect(0, "a")
            if protocol == "tokenspeed":
                assert [batch.load[:2] for batch in batches] == [(1, 0)] * 3
            else:
                assert [batch.load[:2] for batch in batches] == [(1, 0), (1, 0), (0, 0)]
                trailing = read_batch(await gateway.receive(0))
                assert (trailing.rows, trailing.load) == ([], (0, 0, 0.0))
            sent = group.ranks[0].records.reported_loads
            assert [(load.running, load.waiting) for load in sent][:3] == [batch.load[:2] for batch in batches]

    async def test_a_batch_that_nobody_reads_stops_the_rank_and_nothing_is_lost(self, gateway, protocol):
        config = msgspec.structs.replace(FLOOD, output_hwm=2)
        async with StubGroup(protocol, gateway.address, ranks=1, config=config) as group:
            (rank,) = group.ranks
            await group.ready()
            await gateway.registered(1)
            address = gateway.ranks[0].addresses[1]
            gateway.ranks[0].outputs.unbind(address)
            await gateway.add(0, "a", PROMPT, 500)
            await rank.wait_until(lambda: rank.tokens_generated > 0)
            await asyncio.sleep(0.05)
            assert rank.tokens_generated < 500
            gateway.ranks[0].outputs.bind(address)
            assert tokens_of(await gateway.collect(0, "a"), "a")[-1] == expected(500)[-1]

    async def test_utility_calls_are_answered_and_waves_noted(self):
        async with RawGateway("vllm") as gateway, StubGroup("vllm", gateway.address, ranks=1) as group:
            await group.ready()
            await gateway.registered(1)
            await gateway.send(0, b"\x03", msgspec.msgpack.encode([0, 5, "is_sleeping", []]))
            assert msgspec.msgpack.decode((await gateway.receive(0))[0])[4] == [5, None, [None, False]]
            await gateway.send(0, b"\x02", msgspec.msgpack.encode([3, None]))
            await group.ranks[0].wait_until(lambda: group.ranks[0].records.received_waves)
            assert group.ranks[0].records.received_waves[0].wave == 3


class TestManual:
    async def test_nothing_moves_until_step(self, gateway, protocol):
        config = msgspec.structs.replace(FLOOD, load=LoadReports(trailing=False))
        async with StubGroup(protocol, gateway.address, ranks=1, config=config, auto_step=False) as group:
            (rank,) = group.ranks
            await group.ready()
            await gateway.registered(1)
            await gateway.add(0, "a", PROMPT, 2)
            await rank.wait_until(lambda: rank.records.adds == 1)
            assert rank.tokens_generated == 0
            assert rank.live_ids == {"a"}
            assert await rank.step()
            assert read_batch(await gateway.receive(0)).rows[0].tokens == expected(1)
            assert await rank.step()
            assert not await rank.step()
            assert rank.live_ids == frozenset()

    async def test_a_step_without_work_sends_the_report_that_vllm_owes(self):
        async with (
            RawGateway("vllm") as gateway,
            StubGroup("vllm", gateway.address, ranks=1, config=FLOOD, auto_step=False) as group,
        ):
            (rank,) = group.ranks
            await group.ready()
            await gateway.registered(1)
            await gateway.add(0, "a", PROMPT, 1)
            await rank.wait_until(lambda: rank.records.adds == 1)
            steps = [await rank.step() for _ in range(3)]
            assert steps == [True, False, False]
            assert [len(read_batch(await gateway.receive(0)).rows) for _ in range(2)] == [1, 0]
            assert rank.records.batches == 2

    async def test_a_scripted_death_needs_a_step(self, gateway, protocol):
        async with StubGroup(protocol, gateway.address, ranks=1, config=FLOOD, auto_step=False) as group:
            (rank,) = group.ranks
            await group.ready()
            await gateway.registered(1)
            rank.set_faults(die_at_token=1)
            await gateway.add(0, "a", PROMPT, 5)
            await rank.wait_until(lambda: rank.records.adds == 1)
            assert await rank.step()
            assert rank.phase is RankPhase.SERVING
            assert not await rank.step()
            assert rank.phase is RankPhase.DEAD

    async def test_scripted_rows_and_raw_frames(self, gateway, protocol):
        async with StubGroup(protocol, gateway.address, ranks=1, config=FLOOD, auto_step=False) as group:
            (rank,) = group.ranks
            await group.ready()
            await gateway.registered(1)
            await gateway.add(0, "a", PROMPT, 9)
            await rank.wait_until(lambda: rank.received_adds)
            assert rank.received_adds[0].id == "a"
            rank.send_rows([("a", [7, 8], "stop")], Load(2, 5, 100, 400))
            batch = read_batch(await gateway.receive(0))
            assert [row[:3] for row in batch.rows] == [("a", [7, 8], "stop")]
            assert batch.load == (2, 5, 0.25)
            assert rank.live_ids == frozenset()
            rank.send_rows(load=Load(7, 9, 5, 300))
            assert read_batch(await gateway.receive(0)).load[:2] == (7, 9)
            rank.send_raw([b"anything"])
            assert await gateway.receive(0) == [b"anything"]


class TestLifeAndDeath:
    async def test_a_kill_disconnects_and_a_restart_is_a_new_incarnation(self, gateway, protocol):
        async with StubGroup(protocol, gateway.address, ranks=2, config=FLOOD) as group:
            victim = group.ranks[1]
            await group.ready()
            await gateway.registered(2)
            victim.set_faults(silent=True)
            await gateway.add(1, "lost", PROMPT, 5)
            await victim.wait_until(lambda: victim.live_ids)
            dead = gateway.ranks[1]
            await victim.kill()
            assert (victim.phase, victim.live_ids) == (RankPhase.DEAD, frozenset())
            async with asyncio.timeout(10):
                await dead.disconnected()
            await victim.restart()
            await victim.ready()
            await gateway.registered(3)
            assert victim.incarnation == 2
            assert victim.faults == Faults()
            assert gateway.ranks[1] is not dead
            await gateway.add(1, "new", PROMPT, 5)
            assert tokens_of(await gateway.collect(1, "new"), "new") == expected(5)
            await gateway.add(0, "other", PROMPT, 5)
            assert tokens_of(await gateway.collect(0, "other"), "other") == expected(5)

    @pytest.mark.parametrize("sentinel", [False, True])
    async def test_death_at_a_token(self, gateway, protocol, sentinel):
        faults = Faults(die_at_token=3, die_with_sentinel=sentinel)
        config = msgspec.structs.replace(FLOOD, rank_faults={0: faults})
        async with StubGroup(protocol, gateway.address, ranks=2, config=config) as group:
            await group.ready()
            await gateway.registered(2)
            await gateway.add(0, "a", PROMPT, 50)
            received = [await gateway.receive(0) for _ in range(3 + sentinel)]
            assert tokens_of([read_batch(frames) for frames in received[:3]], "a") == expected(3)
            assert received[3:] == [[SENTINEL]] * sentinel
            async with asyncio.timeout(10):
                await gateway.ranks[0].disconnected()
            assert [rank.phase for rank in group.ranks] == [RankPhase.DEAD, RankPhase.SERVING]

    async def test_a_stall_freezes_and_ends(self, gateway, protocol):
        paced = msgspec.structs.replace(FLOOD, time_scale=0.1)
        async with StubGroup(protocol, gateway.address, ranks=1, config=paced) as group:
            (rank,) = group.ranks
            await group.ready()
            await gateway.registered(1)
            await gateway.add(0, "a", PROMPT, 60)
            await rank.wait_until(lambda: rank.tokens_generated >= 5)
            rank.set_faults(stall=True)
            frozen = rank.tokens_generated
            await gateway.abort(0, "never")
            await asyncio.sleep(0.05)
            assert (rank.tokens_generated, rank.records.aborts) == (frozen, 0)
            rank.set_faults(stall=False, stall_s=0.05)
            await asyncio.sleep(0)
            assert rank.tokens_generated == frozen
            await gateway.collect(0, "a")
            assert rank.tokens_generated == 60
            await rank.wait_until(lambda: rank.records.aborts == 1)

    async def test_a_gateway_that_comes_back_on_the_same_addresses_is_served_without_a_handshake(
        self, gateway, protocol
    ):
        async with StubGroup(protocol, gateway.address, ranks=1, config=FLOOD) as group:
            (rank,) = group.ranks
            await group.ready()
            await gateway.registered(1)
            await gateway.ranks[0].reopen()
            async with asyncio.timeout(10):
                while not rank.received_adds:
                    try:
                        await gateway.add(0, "a", PROMPT, 3)
                    except zmq.ZMQError as error:
                        assert error.errno == zmq.EHOSTUNREACH  # noqa: PT017 - any other is a failure
                        await asyncio.sleep(0.02)
                    await asyncio.sleep(0.02)
            assert [kind for kind, _ in gateway.events].count("HELLO") == 1
            assert rank.incarnation == 1

    async def test_shutdown_says_so(self, gateway, protocol):
        paced = msgspec.structs.replace(FLOOD, time_scale=1.0)
        async with StubGroup(protocol, gateway.address, ranks=1, config=paced) as group:
            await group.ready()
            await gateway.registered(1)
            await gateway.add(0, "a", PROMPT, 4000)
            await gateway.receive(0)
            await group.shut_down()
            messages = [await gateway.receive(0)]
            while messages[-1] != [SENTINEL] and not finishes_of([read_batch(messages[-1])], "a"):
                messages.append(await gateway.receive(0))
            if protocol == "tokenspeed":
                assert messages[-1] == [SENTINEL]
            else:
                assert finishes_of([read_batch(messages[-1])], "a") == ["abort"]
            assert group.ranks[0].phase is RankPhase.DEAD


class TestStrictVllm:
    """What kills a real rank kills this one, in the same way."""

    @pytest.fixture
    async def served(self):
        config = StubConfig(time_scale=0.0, model=Model(vocab_size=100), strict_vllm=True)
        async with RawGateway("vllm") as gateway, StubGroup("vllm", gateway.address, ranks=1, config=config) as group:
            await group.ready()
            await gateway.registered(1)
            yield gateway, group.ranks[0]

    async def test_garbage_makes_it_deaf_without_a_word(self, served):
        gateway, rank = served
        await gateway.send(0, b"\x09", b"")
        async with asyncio.timeout(10):
            await gateway.ranks[0].disconnected()
        assert rank.phase is RankPhase.SERVING
        rank.set_faults(silent=True)  # faults can still be switched

    async def test_a_token_outside_the_vocabulary_kills_it_loudly(self, served):
        gateway, rank = served
        await gateway.add(0, "a", [100], 4)
        assert await gateway.receive(0) == [SENTINEL]
        assert rank.phase is RankPhase.DEAD
        assert rank.records.bad == 1

    async def test_a_duplicate_id_kills_it_at_its_next_step(self, served):
        gateway, rank = served
        rank.set_faults(silent=True)
        await gateway.add(0, "a", [1], 4)
        await rank.wait_until(lambda: rank.engine.scheduler.live_count == 1)
        await gateway.add(0, "a", [1], 4)
        assert await gateway.receive(0) == [SENTINEL]
        assert rank.phase is RankPhase.DEAD

    async def test_a_wrong_client_index_makes_it_mute(self, served):
        gateway, rank = served
        payload = ["a", [1], None, {"max_tokens": 3}, None, 0.0, None, None, None, None, None, 5]
        await gateway.send(0, b"\x00", msgspec.msgpack.encode(payload))
        await rank.wait_until(lambda: rank.records.bad == 1)
        await gateway.add(0, "b", [1], 3)
        await rank.wait_until(lambda: rank.tokens_generated == 3)
        with pytest.raises(zmq.Again):
            await gateway.ranks[0].outputs.recv(zmq.NOBLOCK)


async def test_many_ranks_share_one_loop():
    config = msgspec.structs.replace(FLOOD, scheduler=SchedulerConfig(max_active=8))
    async with RawGateway("vllm") as gateway, StubGroup("vllm", gateway.address, ranks=48, config=config) as group:
        await group.ready()
        await gateway.registered(48)
        for index in range(48):
            await gateway.add(index, f"r{index}", PROMPT, 5)
        for index in range(48):
            assert tokens_of(await gateway.collect(index, f"r{index}"), f"r{index}") == expected(5)


def test_indexes_must_fit_two_bytes():
    with pytest.raises(ValueError, match="two bytes"):
        StubGroup("vllm", "tcp://127.0.0.1:1", ranks=2, start_index=65535)

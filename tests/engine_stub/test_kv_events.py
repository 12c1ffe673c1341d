"""KV events in vLLM's format: bytes of a batch, sequence numbers, replay, and what a restart looks like."""

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from engine_stub.config import KvEvents, StubConfig
from engine_stub.group import StubGroup
from engine_stub.kv_events import KvEventPublisher
from engine_stub.kv_events_wire import END_OF_REPLAY, EventEncoder, rank_endpoint
from engine_stub.scheduler import AllBlocksCleared, BlocksRemoved, BlocksStored, SchedulerConfig
from tests.support.raw_gateway import RawGateway

FIRST, SECOND = bytes(range(16)), bytes(range(16, 32))
STORED = BlocksStored([FIRST, SECOND], None, [1, 2, 3, 4], "")
TIMEOUT_S = 20


def encoder(**forms):
    return EventEncoder(block_size=2, rank=3, **{"event_form": "map", "hash_form": "int", **forms})


def decoded(made, *events):
    return msgspec.msgpack.decode(made.payload(list(events), 12.5))


def as_int(digest):
    return int.from_bytes(digest[-8:], "big")


class TestFormat:
    def test_a_batch_is_an_array_of_time_events_and_rank(self):
        assert decoded(encoder(), AllBlocksCleared()) == [12.5, [{"type": "AllBlocksCleared"}], 3]

    def test_a_stored_event_has_the_keys_of_a_real_one(self):
        """Keys and their order as a vLLM 0.26 publisher sends them."""
        _, (event,), _ = decoded(encoder(), STORED)
        assert list(event.items()) == [
            ("type", "BlockStored"),
            ("block_hashes", [as_int(FIRST), as_int(SECOND)]),
            ("parent_block_hash", None),
            ("token_ids", [1, 2, 3, 4]),
            ("block_size", 2),
            ("lora_id", None),
            ("medium", "GPU"),
            ("lora_name", None),
            ("extra_keys", [None, None]),
            ("group_idx", 0),
            ("kv_cache_spec_kind", "full_attention"),
        ]

    def test_a_removed_event(self):
        _, (event,), _ = decoded(encoder(), BlocksRemoved([SECOND]))
        assert event == {"type": "BlockRemoved", "block_hashes": [as_int(SECOND)], "medium": "GPU", "group_idx": 0}

    def test_older_releases_send_tagged_arrays(self):
        child = BlocksStored([SECOND], FIRST, [3, 4], "")
        _, events, _ = decoded(encoder(event_form="array"), child, BlocksRemoved([FIRST]), AllBlocksCleared())
        assert events[0][:6] == ["BlockStored", [as_int(SECOND)], as_int(FIRST), [3, 4], 2, None]
        assert events[1][:3] == ["BlockRemoved", [as_int(FIRST)], "GPU"]
        assert events[2] == ["AllBlocksCleared"]

    def test_hashes_can_be_raw(self):
        _, (event,), _ = decoded(encoder(hash_form="bytes"), STORED)
        assert event["block_hashes"] == [FIRST, SECOND]

    def test_a_salt_shows_in_a_texts_first_block(self):
        salted = BlocksStored([FIRST, SECOND], None, [1, 2, 3, 4], "mine")
        later = BlocksStored([SECOND], FIRST, [3, 4], "mine")
        _, events, _ = decoded(encoder(), salted, later)
        assert [event["extra_keys"] for event in events] == [[["mine"], None], [None]]

    @pytest.mark.parametrize(
        ("endpoint", "rank", "address"),
        [
            ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
            ("tcp://127.0.0.1:5557", 3, "tcp://127.0.0.1:5560"),
            ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:*"),
            ("tcp://127.0.0.1:0", 3, "tcp://127.0.0.1:*"),
            ("inproc://cache", 2, "inproc://cache_dp2"),
            ("ipc:///tmp/cache", 0, "ipc:///tmp/cache"),
        ],
    )
    def test_a_rank_adds_its_index(self, endpoint, rank, address):
        assert rank_endpoint(endpoint, rank) == address

    def test_an_endpoint_without_a_port_says_so(self):
        with pytest.raises(ValueError, match="has no port"):
            rank_endpoint("tcp://127.0.0.1:many", 1)


def settings(**fields):
    return KvEvents(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", **fields)


async def replayed(context, endpoint, first=0):
    """All batches that the publisher still has from a number on: [(number, batch)]."""
    batches = []
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                delimiter, number, payload = await socket.recv_multipart()
                assert delimiter == b""
                if number == END_OF_REPLAY:
                    assert payload == b""
                    return batches
                batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


@pytest.fixture
def context():
    with zmq.asyncio.Context() as made:
        yield made


class TestPublisher:
    @pytest.fixture
    def publisher(self, context):
        made = KvEventPublisher(zmq.Context.shadow(context), settings(topic="kv"), rank=3, block_size=2)
        yield made
        made.close()

    async def test_a_subscriber_gets_topic_number_and_payload(self, context, publisher):
        with context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.connect(publisher.endpoint)
            socket.subscribe("kv")
            publisher.start_incarnation()
            async with asyncio.timeout(TIMEOUT_S):
                while not await socket.poll(20):
                    publisher.publish([STORED])  # until the subscription has arrived
                topic, number, payload = await socket.recv_multipart()
        assert (topic, len(number)) == (b"kv", 8)
        assert msgspec.msgpack.decode(payload)[2] == 3
        assert int.from_bytes(number, "big") < publisher.sequence

    async def test_numbers_count_batches_and_no_batch_is_empty(self, context, publisher):
        publisher.start_incarnation()
        publisher.publish([STORED])
        publisher.publish([])
        publisher.publish([BlocksRemoved([FIRST]), BlocksRemoved([SECOND])])
        batches = await replayed(context, publisher.replay_endpoint)
        assert [number for number, _ in batches] == [0, 1, 2]
        assert [[event["type"] for event in batch[1]] for _, batch in batches] == [
            ["AllBlocksCleared"],
            ["BlockStored"],
            ["BlockRemoved", "BlockRemoved"],
        ]
        assert [number for number, _ in await replayed(context, publisher.replay_endpoint, first=2)] == [2]

    async def test_a_restart_begins_again_at_zero_with_a_cleared_cache(self, context, publisher):
        publisher.start_incarnation()
        publisher.publish([STORED])
        publisher.start_incarnation()
        ((number, batch),) = await replayed(context, publisher.replay_endpoint)
        assert number == 0
        assert batch[1] == [{"type": "AllBlocksCleared"}]

    async def test_what_is_too_old_is_not_replayed(self, context):
        made = KvEventPublisher(zmq.Context.shadow(context), settings(buffer_steps=2), rank=0, block_size=2)
        made.start_incarnation()
        for _ in range(4):
            made.publish([STORED])
        assert [number for number, _ in await replayed(context, made.replay_endpoint)] == [3, 4]
        made.close()

    async def test_nonsense_on_the_replay_socket_is_ignored(self, context, publisher):
        publisher.start_incarnation()
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(publisher.replay_endpoint)
            await socket.send_multipart([b"what?"])
            await socket.send_multipart([b"", b"short"])
        assert len(await replayed(context, publisher.replay_endpoint)) == 1

    def test_an_address_in_use_is_an_error(self, context, publisher):
        taken = KvEvents(endpoint=publisher.endpoint)
        with pytest.raises(zmq.ZMQError, match="in use"):
            KvEventPublisher(zmq.Context.shadow(context), taken, rank=0, block_size=2)


@pytest.mark.parametrize("protocol", ["tokenspeed", "vllm"])
class TestRanks:
    CONFIG = StubConfig(
        time_scale=0.0, scheduler=SchedulerConfig(block_size=4, kv_tokens=400), kv_events=settings(hash_form="bytes")
    )

    async def test_each_rank_publishes_what_its_cache_holds(self, protocol, context):
        async with (
            RawGateway(protocol) as gateway,
            StubGroup(protocol, gateway.address, ranks=2, config=self.CONFIG) as group,
        ):
            await group.ready()
            await gateway.registered(2)
            await gateway.add(1, "a", list(range(10)), 4)
            await gateway.collect(1, "a")
            idle, used = [await replayed(context, rank.kv_events.replay_endpoint) for rank in group.ranks]
            assert [[event["type"] for event in batch[1]] for _, batch in idle] == [["AllBlocksCleared"]]
            assert [number for number, _ in used] == [0, 1, 2]
            prompt, answer = used[1][1], used[2][1]
            assert (prompt[1][0]["token_ids"], prompt[2]) == (list(range(8)), 1)
            assert answer[1][0]["parent_block_hash"] == prompt[1][0]["block_hashes"][-1]
            assert answer[1][0]["token_ids"][:2] == [8, 9]

    async def test_the_registration_says_where(self, protocol, context):
        async with (
            RawGateway(protocol) as gateway,
            StubGroup(protocol, gateway.address, ranks=2, config=self.CONFIG) as group,
        ):
            await gateway.registered(2)
            for index, rank in enumerate(group.ranks):
                ready = gateway.ranks[index].registration
                assert ready["kv_events_config"]["bound_endpoint"] == rank.kv_events.endpoint
                assert ready["kv_events_config"]["enable_kv_cache_events"] is True
                assert len(ready["recipe_fingerprint"]) == 32
            assert context is not None

    async def test_a_restarted_rank_starts_over(self, protocol, context):
        async with (
            RawGateway(protocol) as gateway,
            StubGroup(protocol, gateway.address, ranks=1, config=self.CONFIG) as group,
        ):
            await group.ready()
            await gateway.registered(1)
            await gateway.add(0, "a", list(range(10)), 4)
            await gateway.collect(0, "a")
            rank = group.ranks[0]
            assert rank.kv_events.sequence == 3
            await rank.restart()
            await rank.ready()
            ((number, batch),) = await replayed(context, rank.kv_events.replay_endpoint)
            assert (number, batch[1]) == (0, [{"type": "AllBlocksCleared"}])


async def test_without_an_endpoint_nothing_is_opened():
    async with StubGroup("vllm", "tcp://127.0.0.1:1", ranks=1) as group:
        assert group.ranks[0].kv_events is None


async def test_an_endpoint_that_is_taken_fails_the_group(context):
    with context.socket(zmq.PUB) as socket:
        socket.bind("tcp://127.0.0.1:*")
        taken = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        with pytest.raises(zmq.ZMQError, match="in use"):
            StubGroup("vllm", "tcp://127.0.0.1:1", config=StubConfig(kv_events=KvEvents(endpoint=taken)))

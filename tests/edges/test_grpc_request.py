"""What a call's metadata, deadline and message say."""

import msgspec
import pytest

from gateway.config.fields import Name
from gateway.core.errors import GatewayError, Reason
from gateway.edges import grpc_request
from gateway.edges.grpc_request import MAX_CACHE_SALT_BYTES, Call, RequestReader, read_sampling
from gateway.types import Sampling
from gateway.v1 import gateway_pb2
from tests.support import core
from tests.support.grpc_edge import generate_request, make_config

NOTHING = Call()


class Context:
    def __init__(self, metadata=(), remaining=None):
        self._metadata = metadata
        self._remaining = remaining

    def invocation_metadata(self):
        return self._metadata

    def time_remaining(self):
        return self._remaining


@pytest.fixture
def reader():
    return RequestReader(make_config())


def read(reader, request, call=NOTHING):
    return reader.generate(request, call, 0.0, client_key="c", arrived_at_unix_s=1.5, sink=None)


def refused(function, *args):
    with pytest.raises(GatewayError) as caught:
        function(*args)
    return caught.value


def test_every_field_arrives(reader):
    request = generate_request(
        (7, 8),
        request_id="a",
        data_parallel_rank=0,
        priority=-3,
        model="m",
        session_id="hint",
        no_cache=True,
        allow_resume=False,
        sampling={
            "max_tokens": 5,
            "temperature": 0.0,
            "top_p": 0.7,
            "top_k": 0,
            "min_p": 0.25,
            "frequency_penalty": -0.5,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.1,
            "min_tokens": 0,
            "seed": -(2**63),
            "n": 2,
            "logprobs": 0,
            "stop_token_ids": [3, 1],
            "ignore_eos": True,
        },
    )
    call = Call(
        request_id="other",
        pinned_rank=0,
        deadline_at=9.0,
        tenant="team-a",
        cache_salt="pepper",
        queue_timeout_s=0.25,
    )
    arrived = read(reader, request, call)
    assert (arrived.client_key, arrived.request_id, arrived.prompt_token_ids) == ("c", "a", [7, 8])
    assert (arrived.n, arrived.model, arrived.pinned_rank, arrived.priority) == (2, "m", 0, -3)
    assert (arrived.deadline_at, arrived.arrived_at_unix_s) == (9.0, 1.5)
    assert (arrived.tenant, arrived.session_id) == ("team-a", "hint")
    assert (arrived.cache_salt, arrived.use_cache, arrived.queue_timeout_s) == ("pepper", False, 0.25)
    assert arrived.sampling == Sampling(
        max_tokens=5,
        temperature=0.0,
        top_p=0.7,
        top_k=0,
        min_p=0.25,
        frequency_penalty=-0.5,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        min_tokens=0,
        seed=-(2**63),
        logprobs=0,
        stop_token_ids=(3, 1),
        ignore_eos=True,
    )


def test_absent_fields_take_the_defaults_and_max_tokens_what_the_context_leaves(reader):
    arrived = read(reader, gateway_pb2.GenerateRequest(prompt_token_ids=[1] * 96))
    assert arrived.sampling == Sampling(max_tokens=4000)
    assert (arrived.n, arrived.model, arrived.pinned_rank, arrived.deadline_at) == (1, None, None, None)
    assert (arrived.tenant, arrived.session_id, arrived.cache_salt) == ("", "", "")
    assert (arrived.use_cache, arrived.queue_timeout_s) == (True, None)


@pytest.mark.parametrize(
    ("group_budgets", "gateway_budget", "room"),
    [
        ([None], None, 4090),
        ([100], None, 94),
        ([100, 300], None, 294),
        ([100, None], None, 4090),
        ([300], 200, 194),
        ([6], None, 1),
    ],
)
def test_an_absent_max_tokens_asks_for_no_more_than_the_budgets_let_in(group_budgets, gateway_budget, room):
    groups = [
        {"name": f"g{number}", "protocol": "vllm", "handshake": f"ipc:///{number}", "ranks": 1, "start_index": number}
        | {"budget": {"max_kv_tokens": budget}}
        for number, budget in enumerate(group_budgets)
    ]
    reader = RequestReader(core.make_config(groups=groups, admission={"max_kv_tokens": gateway_budget}))
    assert read(reader, gateway_pb2.GenerateRequest(prompt_token_ids=[1] * 6)).sampling.max_tokens == room
    asked = read(reader, generate_request([1] * 6, sampling={"max_tokens": 4000}))
    assert asked.sampling.max_tokens == 4000, "what is asked for is the core's to judge"


def test_a_prompt_without_room_is_blamed_itself_before_it_is_copied(reader):
    with pytest.raises(GatewayError) as caught:
        read(reader, gateway_pb2.GenerateRequest(prompt_token_ids=[1] * 5000))
    assert caught.value.reason is Reason.PROMPT_TOO_LONG
    assert caught.value.facts == {"prompt_tokens": 5000, "limit_tokens": 4095}
    longest = read(reader, gateway_pb2.GenerateRequest(prompt_token_ids=[1] * 4095))
    assert (len(longest.prompt_token_ids), longest.sampling.max_tokens) == (4095, 1)


def test_every_sampling_field_of_the_proto_is_read():
    fields = {field.name for field in gateway_pb2.Sampling.DESCRIPTOR.fields}
    assert fields - {"n"} == set(Sampling.__struct_fields__)


@pytest.mark.parametrize("name", ["max_tokens", "n"])
def test_an_explicit_zero_is_passed_on_to_be_refused_not_replaced(reader, name):
    arrived = read(reader, generate_request(sampling={name: 0}))
    assert (arrived.n if name == "n" else arrived.sampling.max_tokens) == 0


def test_sampling_numbers_keep_double_precision():
    assert read_sampling(gateway_pb2.Sampling(temperature=0.1), 1).temperature == 0.1


class TestRequestId:
    def test_the_field_wins_over_metadata(self, reader):
        call = reader.call(Context([("x-request-id", "meta")]), 0.0)
        assert reader.request_id("field", call) == "field"
        assert reader.request_id("", call) == "meta"

    def test_generated_ids_differ_also_between_gateways(self, reader):
        ids = {reader.request_id("", NOTHING) for _ in range(100)}
        ids |= {RequestReader(make_config()).request_id("", NOTHING) for _ in range(100)}
        assert len(ids) == 200

    @pytest.mark.parametrize("bad", ["a\n", "é", "a\x00b", " a", "a ", "\x7f"])
    def test_what_metadata_cannot_echo_is_refused(self, reader, bad):
        error = refused(reader.request_id, bad, NOTHING)
        assert (error.reason, error.facts["field"]) == (Reason.INVALID_REQUEST, "request_id")


class TestPin:
    def test_metadata_alone_pins(self, reader):
        call = reader.call(Context([("x-data-parallel-rank", "2")]), 0.0)
        assert reader.pin(None, call) == 2
        assert reader.pin(2, call) == 2

    def test_rank_zero_in_the_field_is_a_pin(self, reader):
        assert reader.pin(0, NOTHING) == 0
        assert reader.pin(None, NOTHING) is None

    def test_numbers_out_of_range_are_the_cores_to_refuse(self, reader):
        assert reader.pin(-1, NOTHING) == -1
        assert reader.call(Context([("x-data-parallel-rank", "-1")]), 0.0).pinned_rank == -1

    @pytest.mark.parametrize("text", ["x", "", "1.0", " 1", "1_0", "0x1", "\u0661", "99999999999999", "1,2"])
    def test_what_is_no_number_is_refused_with_the_range(self, reader, text):
        error = refused(reader.call, Context([("x-data-parallel-rank", text)]), 0.0)
        assert error.reason is Reason.INVALID_RANK
        assert (error.facts["valid_min"], error.facts["valid_max"]) == (0, 3)
        assert "0..3" in error.message

    def test_field_and_metadata_must_agree(self, reader):
        call = reader.call(Context([("x-data-parallel-rank", "1")]), 0.0)
        error = refused(reader.pin, 0, call)
        assert (error.reason, error.facts["valid_max"]) == (Reason.INVALID_RANK, 3)

    def test_two_values_must_agree(self, reader):
        twice = [("x-data-parallel-rank", "1"), ("x-data-parallel-rank", "1")]
        assert reader.call(Context(twice), 0.0).pinned_rank == 1
        twice[1] = ("x-data-parallel-rank", "2")
        assert refused(reader.call, Context(twice), 0.0).reason is Reason.INVALID_RANK

    def test_the_range_spans_all_groups(self):
        config = make_config(3)
        config = msgspec.structs.replace(config, groups=config.groups * 2)
        error = refused(RequestReader(config).call, Context([("x-data-parallel-rank", "x")]), 0.0)
        assert error.facts["valid_max"] == 5


class TestDeadline:
    def test_it_is_absolute_on_the_drivers_clock(self, reader):
        assert reader.call(Context(remaining=2.5), 100.0).deadline_at == 102.5
        assert reader.call(Context(), 100.0).deadline_at is None

    def test_the_default_applies_to_calls_without_one(self):
        reader = RequestReader(make_config(limits={"default_deadline_s": 7.0}))
        call = reader.call(Context(), 100.0)
        assert call.deadline_at is None
        # From the request on: a GenerateMany call may be much older.
        assert reader.deadline_at(call, 150.0) == 157.0
        assert reader.call(Context(remaining=60.0), 100.0).deadline_at == 160.0

    @pytest.mark.parametrize(
        ("deadline_at", "now", "reason"),
        [
            (None, 50.0, Reason.CANCELLED),
            (100.0, 50.0, Reason.CANCELLED),
            (100.0, 99.99, Reason.DEADLINE_EXCEEDED),
            (100.0, 101.0, Reason.DEADLINE_EXCEEDED),
        ],
    )
    def test_why_a_handler_is_told_to_stop(self, deadline_at, now, reason):
        assert Call(request_id=None, pinned_rank=None, deadline_at=deadline_at).early_end(now) is reason


def test_a_call_without_metadata(reader):
    assert reader.call(Context(None), 0.0) == NOTHING


class Pairs(list):
    """Metadata that counts how often it is walked through."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_a_call_that_says_nothing_to_us_is_read_in_one_pass(reader):
    pairs = Pairs([("user-agent", "grpc-python/1.80.0"), ("x-other-id", "1"), ("traceparent-bin", b"\x00")])
    assert reader.call(Context(pairs), 0.0) == NOTHING
    assert pairs.walks == 1


def test_all_keys_of_one_call(reader):
    pairs = [
        ("user-agent", "x"),
        ("x-request-id", "first"),
        ("x-tenant-id", "team-a"),
        ("x-request-id", "second"),
        ("x-cache-salt", "pepper"),
        ("x-queue-timeout-ms", "1500"),
        ("x-data-parallel-rank", "3"),
    ]
    assert reader.call(Context(pairs, remaining=1.0), 10.0) == Call(
        request_id="first",
        pinned_rank=3,
        deadline_at=11.0,
        tenant="team-a",
        cache_salt="pepper",
        queue_timeout_s=1.5,
    )


class TestTenant:
    @pytest.mark.parametrize("name", ["a", "0", "team-a/b.c_d", "A" * 128])
    def test_what_the_configuration_could_name_is_let_in(self, reader, name):
        assert reader.call(Context([("x-tenant-id", name)]), 0.0).tenant == name

    def test_the_rule_is_that_of_names_in_the_configuration(self):
        (rule,) = (item for item in Name.__metadata__ if item.pattern)
        assert rule.pattern == f"^{grpc_request._TENANT.pattern}$(?!\\n)"

    @pytest.mark.parametrize("name", ["", " ", "-a", "a b", "a\n", "é", "a@b", "A" * 129, "a\x00"])
    def test_anything_else_is_refused_by_name(self, reader, name):
        error = refused(reader.call, Context([("x-tenant-id", name)]), 0.0)
        assert (error.reason, error.facts["field"]) == (Reason.INVALID_REQUEST, "x-tenant-id")


class TestQueueTimeout:
    def test_it_is_in_milliseconds(self, reader):
        assert reader.call(Context([("x-queue-timeout-ms", "1")]), 0.0).queue_timeout_s == 0.001

    @pytest.mark.parametrize("text", ["", "0", "000", "-1", "+1", "1.5", "1e3", " 1", "x", "\u0661", "1" * 11])
    def test_what_is_no_positive_whole_number_is_refused(self, reader, text):
        error = refused(reader.call, Context([("x-queue-timeout-ms", text)]), 0.0)
        assert (error.reason, error.facts["field"]) == (Reason.INVALID_REQUEST, "x-queue-timeout-ms")


class TestSizes:
    def test_a_cache_salt_is_bounded_in_bytes(self, reader):
        longest = "é" * (MAX_CACHE_SALT_BYTES // 2)
        assert reader.call(Context([("x-cache-salt", longest)]), 0.0).cache_salt == longest
        error = refused(reader.call, Context([("x-cache-salt", longest + "x")]), 0.0)
        assert (error.reason, error.facts["field"]) == (Reason.INVALID_REQUEST, "x-cache-salt")

    def test_a_session_id_is_bounded_in_bytes(self, reader):
        longest = "é" * 128
        assert read(reader, generate_request(session_id=longest)).session_id == longest
        error = refused(read, reader, generate_request(session_id=longest + "x"))
        assert (error.reason, error.facts["field"]) == (Reason.INVALID_REQUEST, "session_id")


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [("x-tenant-id", "a", "b"), ("x-cache-salt", "a", "b"), ("x-queue-timeout-ms", "1", "2")],
)
def test_a_call_may_repeat_itself_but_not_contradict_itself(reader, key, one, other):
    agreeing = reader.call(Context([(key, one), (key, one)]), 0.0)
    assert agreeing == reader.call(Context([(key, one)]), 0.0) != NOTHING
    error = refused(reader.call, Context([(key, one), (key, other)]), 0.0)
    assert (error.reason, error.facts["field"]) == (Reason.INVALID_REQUEST, key)

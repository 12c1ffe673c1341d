"""A request that is cut by hand says what the protobuf library makes of it, whatever its bytes."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2, vllm_engine_pb2

from gateway.core.errors import GatewayError
from gateway.edges.driver import Driver
from gateway.edges.grpc_engine.cut import cut
from gateway.edges.grpc_engine.tokenspeed import TokenSpeedService
from gateway.edges.grpc_engine.vllm import VllmService
from gateway.edges.grpc_request import Call
from tests.support.core import Bench

FAMILIES = {"vllm": (VllmService, vllm_engine_pb2), "tokenspeed": (TokenSpeedService, tokenspeed_scheduler_pb2)}
CALL = Call()


def field(number, payload):
    """A length-delimited field."""
    size, length = len(payload), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((number << 3 | 2, *length, size)) + payload


def make_service(family):
    service, pb = FAMILIES[family]
    bench = Bench(1, family)
    return service(bench.config, Driver(bench.router)), pb


def facts(service, data):
    """What a request is taken for; the error's words when it is refused."""
    try:
        arrived = service._prepare(data, CALL, 1.0)
    except GatewayError as error:
        return error.reason, error.message
    request_id = arrived.request_id
    return (
        "new" if request_id.startswith("rg-") else request_id,
        arrived.prompt_token_ids,
        arrived.sampling,
        arrived.n,
        arrived.pinned_rank,
        arrived.sink._is_stream,
    )


TOKENIZED = st.lists(st.integers(0, 2**32 - 1), max_size=5)
PIECES = st.one_of(
    st.sampled_from(("", "r", "a b", " r", "r\n", "ü", "x" * 127, "x" * 128)).map(lambda text: field(1, text.encode())),
    st.binary(max_size=3).map(lambda data: field(1, data)),
    TOKENIZED.map(lambda ids: field(2, vllm_engine_pb2.TokenizedInput(input_ids=ids).SerializeToString())),
    st.binary(max_size=6).map(lambda data: field(2, data)),
    st.just(field(2, field(1, b"text") + field(2, b"\x07\x08"))),
    st.just(field(2, field(1, b"\xff") + field(2, b"\x07"))),
    st.just(b"\x12\x84\x00" + field(2, b"\x05\x06")),  # a length with a byte too many
    st.just(b"\x08\x05"),  # the id's number with another type
    st.just(b"\x28\x01"),
    st.just(field(3, b"")),
    st.just(field(3, b"x")),
    st.just(field(4, b"\x70\x01")),
    st.just(b"\xc2\x0c\x07unknown"),  # field 200
    st.binary(max_size=4),
)
RESTS = (b"", b"\x28\x01", field(4, b"\x70\x01"), field(4, b"\x70\x01") + b"\x28\x01", b"\x08\x05", b"\x12\x00")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=5).map(b"".join))
@example(field(1, b"r") + field(2, field(2, b"\x05")) + b"\x28\x01")
@example(field(1, b"r") + field(2, field(2, b"\x05")) + field(1, b"s"))
@example(field(1, b"r") + field(2, field(2, b"\x05")) + field(2, field(2, b"\x06")))
@example(field(1, b"r") + field(2, field(2, b"\x05")) + field(3, b""))
def test_what_was_seen_before_makes_no_difference(family, data):
    fresh, _ = make_service(family)
    known, _ = make_service(family)
    for rest in (*RESTS, data):
        facts(known, field(1, b"before") + field(2, field(2, b"\x01\x02")) + rest)
        facts(known, rest)
    expected = facts(fresh, data)
    assert facts(known, data) == expected
    assert facts(known, data) == expected


@settings(max_examples=300)
@given(st.binary(max_size=12), st.binary(max_size=300), st.binary(max_size=10))
def test_parts_are_what_was_put_together(request_id, tokenized, rest):
    found = cut(field(1, request_id) + field(2, tokenized) + rest)
    if request_id.isascii():
        assert found == (request_id.decode(), tokenized, rest)
    else:
        assert found is None


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2_100_000])
def test_any_length_of_a_prompt(size):
    assert cut(field(2, bytes(size)) + b"\x28\x01") == ("", bytes(size), b"\x28\x01")


@pytest.mark.parametrize("end", range(12))
def test_what_is_cut_short_is_not_taken(end):
    data = field(1, b"four") + field(2, b"four")
    assert len(data) == 12
    assert cut(data[:end]) is None


def test_a_long_id_and_an_endless_length_are_for_the_library():
    assert cut(field(1, b"x" * 128) + field(2, b"")) is None
    assert cut(b"\x12" + b"\x80" * 20) is None
    # The last character of the id is where a tag would be if its length had one byte.
    assert cut(field(1, b"x" * 127 + b"\x12") + field(2, bytes(100))) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_known_kind_of_request_is_not_taken_apart(family, monkeypatch):
    service, pb = make_service(family)
    data = pb.GenerateRequest(
        request_id="r", tokenized=pb.TokenizedInput(input_ids=[5, 70000]), stream=True
    ).SerializeToString()
    first = facts(service, data)
    monkeypatch.setattr(type(service), "read", None)
    assert facts(service, data) == first

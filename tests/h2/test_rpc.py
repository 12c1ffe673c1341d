"""gRPC's own rules: what a head says, what a body holds, how a call ends. Vectors from the protocol's description."""

import base64
import gzip
import tracemalloc
import zlib

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from gateway.h2.protocol.heads import read_head
from gateway.h2.rpc import status
from gateway.h2.rpc.heads import read_call, read_timeout
from gateway.h2.rpc.messages import MessageReader, prefixed
from gateway.h2.rpc.status import Code, RpcError
from tests.h2.by_hand import FIELDS, PATH, message


def head_of(*more, without=()):
    fields = [field for field in FIELDS if field[0] not in without]
    fields += more
    return read_head([(name.encode(), value.encode("latin-1")) for name, value in fields])


def call(*more, without=()):
    head, _ = head_of(*more, without=without)
    return read_call(head)


def refusal(*more, without=()):
    with pytest.raises(RpcError) as caught:
        call(*more, without=without)
    return caught.value


class TestHeads:
    def test_a_plain_call(self):
        head = call()
        assert (head.method, head.invocation_metadata, head.is_gzip) == (PATH, (), False)
        assert head_of()[1] is None

    def test_metadata_are_what_is_not_the_transports(self):
        head = call(
            ("grpc-timeout", "1S"), ("grpc-encoding", "identity"), ("x-a", "1"), ("x-a", "2"), ("user-agent", "u")
        )
        assert head.invocation_metadata == (("x-a", "1"), ("x-a", "2"), ("user-agent", "u"))

    @pytest.mark.parametrize("value", ["AAEC/w==", "AAEC/w", " AAEC/w , AQ==".strip()])
    def test_binary_metadata(self, value):
        data = [value for _, value in call(("x-bin", value)).invocation_metadata]
        assert data == [b"\0\1\2\xff", b"\1"][: len(data)]

    @pytest.mark.parametrize("value", ["A", "!!!!", "AA=A", "ä"])
    def test_binary_metadata_that_is_none(self, value):
        assert refusal(("x-bin", value)).code == Code.INTERNAL

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [("1H", 3600), ("2M", 120), ("3S", 3), ("250m", 0.25), ("5u", 5e-6), ("7n", 7e-9), ("99999999S", 99999999)],
    )
    def test_timeouts(self, value, seconds):
        assert read_timeout(value.encode()) == pytest.approx(seconds)
        assert head_of(("grpc-timeout", value))[1] == value.encode()

    @pytest.mark.parametrize("value", ["", "1", "S", "-1S", "1.5S", "123456789S", "1s", "1S ", "٣S"])
    def test_timeouts_that_are_none(self, value):
        with pytest.raises(RpcError):
            read_timeout(value.encode())

    @pytest.mark.parametrize(
        "value", ["application/grpc", "application/grpc+proto", "application/grpc;x=y", "APPLICATION/GRPC"]
    )
    def test_content_types(self, value):
        assert call(("content-type", value), without=("content-type",)).method == PATH

    @pytest.mark.parametrize("value", [None, "application/json", "application/grpc-web", "text/html"])
    def test_what_is_no_grpc_is_told_in_http(self, value):
        more = [] if value is None else [("content-type", value)]
        assert refusal(*more, without=("content-type",)).http_status == 415

    def test_other_methods_and_proxies(self):
        head, _ = read_head(
            [(name.encode(), b"GET" if name == ":method" else value.encode()) for name, value in FIELDS]
        )
        with pytest.raises(RpcError) as caught:
            read_call(head)
        error = caught.value
        assert (error.http_status, error.fields) == (405, ((b"allow", b"POST"),))
        assert refusal(without=("te",)).http_status == 400

    def test_encodings(self):
        assert call(("grpc-encoding", "gzip")).is_gzip
        error = refusal(("grpc-encoding", "snappy"))
        assert (error.code, error.fields) == (Code.UNIMPLEMENTED, (status.ACCEPTED_ENCODINGS,))


class TestMessages:
    @given(st.lists(st.binary(max_size=60), max_size=8), st.data())
    def test_however_a_body_is_cut(self, messages, data):
        reader = MessageReader(1000, is_gzip=False)
        body = b"".join(map(prefixed, messages))
        completed = 0
        while body:
            size = data.draw(st.integers(1, len(body)))
            completed += reader.feed(body[:size])
            body = body[size:]
        assert list(reader.messages) == messages
        assert (completed, reader.partial_bytes) == (sum(map(len, messages)), 0)

    @pytest.mark.parametrize("pieces", [1, 2])
    def test_too_large_is_known_by_the_prefix_alone(self, pieces):
        reader = MessageReader(10, is_gzip=False)
        reader.feed(prefixed(bytes(10)))
        data = prefixed(bytes(11))
        with pytest.raises(RpcError) as caught:
            reader.feed(data if pieces == 1 else data[:5])
        assert caught.value.code == Code.RESOURCE_EXHAUSTED

    def test_compressed(self):
        reader = MessageReader(1000, is_gzip=True)
        reader.feed(message(gzip.compress(b"hello" * 20), is_compressed=True) + prefixed(b"plain"))
        assert list(reader.messages) == [b"hello" * 20, b"plain"]

    def test_a_bomb_is_not_unpacked(self):
        reader = MessageReader(1000, is_gzip=True)
        bomb = gzip.compress(bytes(50_000_000))
        reader._max_bytes = len(bomb)
        data = message(bomb, is_compressed=True)
        tracemalloc.start()
        with pytest.raises(RpcError) as caught:
            reader.feed(data)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
        tracemalloc.stop()
        assert caught.value.code == Code.RESOURCE_EXHAUSTED

    @pytest.mark.parametrize(
        ("flag", "payload", "is_gzip"),
        [
            (1, gzip.compress(b"x"), False),
            (2, b"x", True),
            (1, b"no gzip", True),
            (1, gzip.compress(b"x" * 100)[:-3], True),
            (1, zlib.compress(b"x"), True),
        ],
        ids=["not announced", "unknown flag", "garbage", "cut short", "zlib"],
    )
    def test_compressed_wrongly(self, flag, payload, is_gzip):
        reader = MessageReader(1000, is_gzip=is_gzip)
        with pytest.raises(RpcError) as caught:
            reader.feed(bytes((flag,)) + len(payload).to_bytes(4) + payload)
        assert caught.value.code == Code.INTERNAL


def decoded(block):
    return Decoder().decode(block)


class TestStatus:
    def test_trailers(self):
        metadata = status.encode_metadata([("x-id", "7"), ("X-Bin", b"\0\1\xff")])
        fields = decoded(status.trailers(5, "not ä here 100%\n", metadata))
        assert fields == [
            ("grpc-status", "5"),
            ("grpc-message", "not %C3%A4 here 100%25%0A"),
            ("x-id", "7"),
            ("x-bin", base64.b64encode(b"\0\1\xff").decode().rstrip("=")),
        ]

    def test_blocks_that_begin_a_response(self):
        first = (":status", "200"), ("content-type", "application/grpc")
        assert tuple(decoded(status.HEAD)) == first
        assert decoded(status.head([("x", "y")])) == [*first, ("x", "y")]
        assert decoded(status.trailers_only(12, "", b"")) == [*first, ("grpc-status", "12")]

    def test_what_speaks_no_grpc_gets_both_statuses(self):
        error = RpcError(13, "no", http_status=405, fields=((b"allow", b"POST"),))
        assert decoded(status.http_error(error)) == [
            (":status", "405"),
            ("allow", "POST"),
            ("grpc-status", "13"),
            ("grpc-message", "no"),
        ]

    @given(st.text())
    def test_messages_come_back_whole(self, text):
        from urllib.parse import unquote

        sent = status.percent_encode(text)
        assert all(0x20 <= byte <= 0x7E for byte in sent)
        assert unquote(sent.decode(), errors="replace") == text.encode("utf-8", "replace").decode()

    @pytest.mark.parametrize("pair", [("X y", "1"), ("x", "a\nb"), ("x", " a"), ("x", "a "), (":path", "/"), ("", "x")])
    def test_metadata_that_can_not_be_sent(self, pair):
        with pytest.raises(ValueError, match="can't be sent"):
            status.encode_metadata([pair])

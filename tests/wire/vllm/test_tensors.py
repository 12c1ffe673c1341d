"""Logprobs from inline tensors and aux frames, and the tensors that are refused."""

import struct

import msgspec
import pytest

from gateway.types import TokenLogprob
from gateway.wire.vllm import VllmProtocol
from tests.support.wire import check, outputs, pack, row

PROTOCOL = VllmProtocol()


def inline(data, code=3):
    return msgspec.msgpack.Ext(code, data)


def tensor(dtype, shape, values, form):
    return [dtype, shape, inline(struct.pack(f"<{len(values)}{form}", *values))]


IDS = tensor("<i4", [1, 3], [7, 8, 9], "i")
VALUES = tensor("<f4", [1, 3], [-0.5, -1.0, -2.0], "f")
RANKS = tensor("<i8", [1], [1], "q")
LOGPROB = TokenLogprob(-0.5, ((8, -1.0), (9, -2.0)))


def decode(pieces, *aux, tokens=(7,)):
    frame = pack(outputs([row("plain"), row("asked", tokens, f2=pieces)]))
    got = PROTOCOL.decode_output([frame, *aux])
    check(got)
    return got


def test_column_zero_is_the_sampled_token():
    batch = decode([IDS, VALUES, RANKS, None])
    assert batch.logprobs == [None, [LOGPROB]]
    assert batch.fault is None


def test_sampled_token_only():
    pieces = [tensor("<i4", [1, 1], [7], "i"), tensor("<f4", [1, 1], [-0.5], "f"), RANKS]
    assert decode(pieces).logprobs == [None, [TokenLogprob(-0.5)]]


def test_several_tokens_and_surplus_rows():
    pieces = [
        tensor("int64", [3, 2], [7, 70, 8, 80, 9, 90], "q"),
        tensor("float64", [3, 2], [-1.0, -10.0, -2.0, -20.0, -3.0, -30.0], "d"),
    ]
    expected = [TokenLogprob(-1.0, ((70, -10.0),)), TokenLogprob(-2.0, ((80, -20.0),))]
    assert decode(pieces, tokens=(7, 8)).logprobs == [None, expected]


def test_no_new_tokens():
    pieces = [tensor("<i4", [0, 3], [], "i"), tensor("<f4", [0, 3], [], "f")]
    assert decode(pieces, tokens=()).logprobs == [None, []]


@pytest.mark.parametrize("dtype", ["<i4", "i4", "int32", "=i4"])
def test_spellings(dtype):
    assert decode([[dtype, *IDS[1:]], VALUES]).logprobs == [None, [LOGPROB]]


@pytest.mark.parametrize(
    ("dtype", "form"),
    [("<i2", "h"), ("|i1", "b"), ("|u1", "B"), ("<u2", "H"), ("uint32", "I"), ("uint64", "Q"), ("int16", "h")],
)
def test_integer_kinds(dtype, form):
    assert decode([tensor(dtype, [1, 3], [7, 8, 9], form), VALUES]).logprobs == [None, [LOGPROB]]


@pytest.mark.parametrize(("dtype", "form"), [("<f2", "e"), ("float16", "e"), ("<f8", "d"), ("float32", "f")])
def test_float_kinds(dtype, form):
    assert decode([IDS, tensor(dtype, [1, 3], [-0.5, -1.0, -2.0], form)]).logprobs == [None, [LOGPROB]]


def test_big_endian():
    ids = [">i4", [1, 3], inline(struct.pack(">3i", 7, 8, 9))]
    assert decode([ids, VALUES]).logprobs == [None, [LOGPROB]]


@pytest.mark.parametrize("wrap", [bytes, memoryview, bytearray])
def test_aux_frames_count_from_the_payload(wrap):
    ids, values = struct.pack("<3i", 7, 8, 9), struct.pack("<3f", -0.5, -1.0, -2.0)
    pieces = [["<i4", [1, 3], 2], ["<f4", [1, 3], 1], ["<i8", [1], 3]]
    assert decode(pieces, wrap(values), wrap(ids)).logprobs == [None, [LOGPROB]]


REFUSED = {
    "frame 0 is the payload": [["<i4", [1, 3], 0], VALUES],
    "frame beyond the message": [["<i4", [1, 3], 1], VALUES],
    "negative frame": [["<i4", [1, 3], -1], VALUES],
    "huge frame number": [["<i4", [1, 3], 2**63], VALUES],
    "pickle": [["<i4", [1, 3], inline(IDS[2].data, code=1)], VALUES],
    "cloudpickle": [["<i4", [1, 3], inline(IDS[2].data, code=2)], VALUES],
    "unknown extension": [["<i4", [1, 3], inline(IDS[2].data, code=4)], VALUES],
    "bytes are no extension": [["<i4", [1, 3], bytes(12)], VALUES],
    "unknown dtype": [["<c8", [1, 3], inline(bytes(24))], VALUES],
    "object dtype": [["|O", [1, 3], inline(bytes(24))], VALUES],
    "float ids": [VALUES, VALUES],
    "integer values": [IDS, IDS],
    "too few bytes": [["<i4", [1, 3], inline(bytes(11))], VALUES],
    "too many bytes": [["<i4", [1, 3], inline(bytes(16))], VALUES],
    "shapes differ": [tensor("<i4", [3, 1], [7, 8, 9], "i"), VALUES],
    "one dimension": [tensor("<i4", [3], [7, 8, 9], "i"), tensor("<f4", [3], [-1.0, -1.0, -1.0], "f")],
    "three dimensions": [["<i4", [1, 1, 3], IDS[2]], ["<f4", [1, 1, 3], VALUES[2]]],
    "no columns": [["<i4", [1, 0], inline(b"")], ["<f4", [1, 0], inline(b"")]],
    "fewer rows than tokens": [tensor("<i4", [0, 3], [], "i"), tensor("<f4", [0, 3], [], "f")],
    "astronomic shape": [["<i4", [2**32 - 1, 2**32 - 1], IDS[2]], ["<f4", [2**32 - 1, 2**32 - 1], VALUES[2]]],
    "negative id": [tensor("<i4", [1, 3], [7, -1, 9], "i"), VALUES],
    "id beyond 32 bits": [tensor("<i8", [1, 3], [7, 2**32, 9], "q"), VALUES],
    "values missing": [IDS],
    "nothing": [],
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_tensors_fail_their_request_and_no_other(case):
    batch = decode(REFUSED[case])
    assert (batch.ids, batch.token_ids) == (["plain"], [(7,)])
    assert (batch.failed_ids, batch.lossy, batch.fault) == (["asked"], False, "bad_row")


def test_the_payload_is_no_aux_frame_even_if_its_size_fits():
    def message(width):
        pieces = [["|u1", [1, width], 0], ["<f4", [1, width], 1]]
        return pack(outputs([row("asked", f2=pieces)]))

    width = len(message(1))
    assert len(message(width)) == width
    got = PROTOCOL.decode_output([message(width), bytes(4 * width)])
    assert got.failed_ids == ["asked"]


def test_prompt_logprobs_are_not_read():
    frame = pack(outputs([row("a", f3=[["int32", [79, 4], 1], ["float32", [79, 4], 2], ["int32", [79], 9], None])]))
    batch = PROTOCOL.decode_output([frame])
    assert (batch.ids, batch.fault) == (["a"], None)


def test_failed_logprobs_leave_the_other_columns_aligned():
    frame = pack(outputs([row("x", f2=[IDS]), row("y", f2=[IDS, VALUES]), row("z", (1, 2))]))
    batch = PROTOCOL.decode_output([frame])
    assert (batch.ids, batch.token_ids, batch.logprobs) == (["y", "z"], [(7,), (1, 2)], [[LOGPROB], None])
    assert batch.failed_ids == ["x"]

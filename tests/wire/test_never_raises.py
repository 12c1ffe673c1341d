"""Whatever the bytes, both decoders answer with a message that keeps its promises."""

import os
import pickle

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.wire.registry import protocol_for
from tests.support.wire import STATS, TAG, any_speed, check, outputs, pack, recorded, row, slim, tokenspeed_vectors

FAMILIES = ("tokenspeed", "vllm")
NAMES = ["r1", "r2", "r3"]  # no generated value is one of these
PROTOCOLS = {name: protocol_for(name) for name in FAMILIES}

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(["", "a", "stop", TAG])
    | st.binary(max_size=4)
    | st.builds(msgspec.msgpack.Ext, st.integers(-2, 4), st.binary(max_size=12))
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
)

WHOLE = {
    "tokenspeed": [
        *tokenspeed_vectors().values(),
        pack(slim(ids=["aa", "bb", "cc"], logprob_values=[[], [-1.0], []], logprob_ids=[[], [11], []])),
    ],
    "vllm": [
        *[m.raw[0] for m in recorded() if m.socket == "output"][::7],
        pack(outputs([row("aa"), row("bb", (1, 2), f5=1, f11={"num_cached_tokens": 3})], STATS)),
    ],
}


def decode(family, *frames):
    message = PROTOCOLS[family].decode_output(frames)
    check(message)
    return message


@pytest.mark.parametrize("family", FAMILIES)
@any_speed
@given(st.lists(st.binary(max_size=120), max_size=3))
@example([b"\xdd\xff\xff\xff\xff"])
@example([b"\x91" * 3000])
@example([b"\x9e\xb3" + TAG.encode() + b"\xdd\xff\xff\xff\xff"])
@example([b"\x92\x00\xdd\xff\xff\xff\xff"])
def test_garbage(family, frames):
    decode(family, *frames)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutations_of_real_messages(family, data):
    whole = bytearray(data.draw(st.sampled_from(WHOLE[family])))
    for _ in range(data.draw(st.integers(1, 4))):
        if not whole:
            break
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "drop"])):
            case "set":
                whole[at] = data.draw(st.integers(0, 255))
            case "cut":
                del whole[at:]
            case "insert":
                whole[at:at] = data.draw(st.binary(min_size=1, max_size=6))
            case "drop":
                del whole[at : at + data.draw(st.integers(1, 8))]
    decode(family, bytes(whole))


@any_speed
@given(st.integers(1, 13), VALUES, st.integers(0, 14))
def test_any_value_anywhere_in_a_tokenspeed_batch(position, value, length):
    message = slim(ids=["a", "b", "c"])
    message[position] = value
    decode("tokenspeed", pack(message[:length]))


@any_speed
@given(st.integers(1, 8), st.integers(0, 2), VALUES)
def test_a_cell_of_a_tokenspeed_batch_touches_its_row_only(column, at, value):
    message = slim(ids=NAMES)
    message[column][at] = value
    batch = decode("tokenspeed", pack(message))
    others = [name for name in NAMES if name != NAMES[at]]
    assert [name for name in batch.ids if name in others] == others


@any_speed
@given(st.integers(9, 13), VALUES)
def test_the_tail_of_a_tokenspeed_batch_costs_no_row(position, value):
    message = slim(ids=["a", "b", "c"])
    message[position] = value
    batch = decode("tokenspeed", pack(message))
    assert (batch.ids, batch.token_ids) == (["a", "b", "c"], [(10,), (11,), (12,)])
    assert (list(batch.failed_ids), batch.lossy, batch.fault) == ([], False, None)


@any_speed
@given(st.integers(2, 8), VALUES)
def test_nothing_beside_the_rows_of_a_vllm_message_costs_one(position, value):
    batch = decode("vllm", pack(outputs([row("a", (1,)), row("b", (2,))], **{f"f{position}": value})))
    assert (batch.ids, batch.token_ids) == (["a", "b"], [(1,), (2,)])
    assert (list(batch.failed_ids), batch.lossy, batch.fault) == ([], False, None)


@any_speed
@given(st.integers(3, 17), VALUES)
def test_unread_fields_of_a_vllm_row_never_cost_it(position, value):
    batch = decode("vllm", pack(outputs([row("a", (1,)), row("b", (2,), **{f"f{position}": value})])))
    assert (batch.ids, batch.token_ids) == (["a", "b"], [(1,), (2,)])
    assert batch.fault is None


@any_speed
@given(st.integers(0, 2), VALUES)
def test_a_damaged_vllm_row_touches_no_other(position, value):
    rows = [row(name) for name in NAMES]
    rows[1][position] = value
    batch = decode("vllm", pack(outputs(rows)))
    assert [name for name in batch.ids if name in {"r1", "r3"}] == ["r1", "r3"]


@any_speed
@given(st.binary(max_size=40), st.lists(VALUES, max_size=5))
def test_any_tensor(data, pieces):
    tensors = [["<i4", [1, 1], 1], ["<f4", [1, 1], 1], *pieces]
    batch = decode("vllm", pack(outputs([row("a", f2=tensors), row("b")])), data)
    assert "b" in batch.ids
    assert ("a" in batch.ids) is (len(data) == 4)


class Mkdir:
    """Unpickling it makes a directory."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_decoder_ever_runs_a_pickle(family, tmp_path):
    """vLLM numbers pickles as extension types 1 and 2: there is no place where one would be loaded."""
    pickle.loads(pickle.dumps(Mkdir(tmp_path / "works")))
    assert (tmp_path / "works").exists()
    data = pickle.dumps(Mkdir(tmp_path / "ran"))
    for value in (msgspec.msgpack.Ext(1, data), msgspec.msgpack.Ext(2, data)):
        decode(family, pack(value))
        for position in range(14):
            message = slim()
            message[position] = value
            decode(family, pack(message))
        for position in range(9):
            message = outputs([row("a")], STATS)
            message[position] = value
            decode(family, pack(message))
        for position in range(18):
            decode(family, pack(outputs([row("a", **{f"f{position}": value})])))
        decode(family, pack(outputs([row("a", f2=[["<i4", [1, 1], value], ["<f4", [1, 1], value]])])))
    assert not (tmp_path / "ran").exists()

"""vLLM's messages: what is decoded in C is what the typed decoder and the salvage make of the same bytes."""

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.wire.vllm import outputs as decoders
from gateway.wire.vllm.layout import FINISH_REASONS
from gateway.wire.vllm.outputs import decode_compiled, decode_outputs
from tests.support.decoded import GOLDEN, PREFILL, decode
from tests.support.native import compiled_or_skip
from tests.support.wire import STATS, outputs, pack, row

decode_vllm = compiled_or_skip().decode_vllm

EDGES = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32 - 1]


def test_it_is_what_the_gateway_decodes_with():
    assert decoders.decode_plain is decode_compiled


@pytest.mark.parametrize("payload", GOLDEN, ids=range(len(GOLDEN)))
def test_golden_messages(payload):
    got, wanted = decode(payload), decode_outputs(payload, [payload])
    rows = getattr(wanted, "ids", ())
    is_ordinary = len(rows) > 0 and wanted.logprobs is None and wanted.fault is None
    if is_ordinary and b"prompt_token" not in payload and not has_aux(payload):
        assert got is not None
    elif not rows:
        assert got is None


def has_aux(payload):
    """Prompt logprobs and the like are not ordinary."""
    return any(cell is not None for cells in msgspec.msgpack.decode(payload)[1] for cell in (*cells[2:5], *cells[8:9]))


def test_most_golden_messages_with_rows_are_decoded():
    with_rows = [p for p in GOLDEN if getattr(decode_outputs(p, [p]), "ids", ())]
    decoded = [p for p in with_rows if decode(p) is not None]
    assert len(decoded) > 0.8 * len(with_rows) > 50
    assert {reason for p in decoded for reason in decode(p).finish} >= {"", "stop", "length", "abort"}
    assert any(decode(p).cached_tokens for p in decoded)
    assert any(decode(p).load for p in decoded)


# Messages of every kind.

text = st.text(st.characters(codec="ascii"), max_size=40) | st.sampled_from(["", "a", "é", "日本", "x" * 300])
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | st.integers(0, 9), inner, max_size=3),
    max_leaves=8,
)
count = st.sampled_from(EDGES) | st.integers(0, 2**32 - 1)
maybe = st.none() | st.none() | st.none() | anything
first = st.builds(
    lambda more, cached: more | {"num_cached_tokens": cached},
    st.sampled_from([{}, PREFILL, {str(at): at for at in range(20)}]),
    count | count | anything,
)
TAIL = st.lists(st.tuples(st.sampled_from([9, 10, 11, 11, 11, 12, 13, 14, 15]), first | first | anything), max_size=2)


@st.composite
def any_row(draw):
    tokens = draw(st.lists(count, max_size=4) | st.lists(count, min_size=1, max_size=1) | st.just([7] * 20))
    cells = [draw(st.sampled_from("abc") | text), tokens, *[None] * draw(st.integers(0, 18))]
    settable = {
        5: st.sampled_from([None, *range(10)]) | st.sampled_from([None, -1, "x", 1.0]),
        6: anything,
        7: anything,
    }
    for at, value in settable.items():
        if at < len(cells) and draw(st.booleans()):
            cells[at] = draw(value)
    for at in (2, 3, 4, 8):
        if at < len(cells) and draw(st.integers(0, 19)) == 0:
            cells[at] = draw(anything)
    for at, value in draw(TAIL):
        if at < len(cells):
            cells[at] = value
    return cells


@st.composite
def any_message(draw):
    stats = draw(
        st.sampled_from([None, STATS, STATS | {f"k{at}": at for at in range(20)}, STATS | {"num_running_reqs": -1}])
        | st.dictionaries(st.sampled_from([*STATS, "current_wave"]), anything | count, max_size=6)
        | anything
    )
    moment = draw(st.sampled_from([1.5, 0.0, -1.0, None, 3, float("inf"), float("nan"), "x"]) | st.floats())
    tail = [draw(maybe) for _ in range(draw(st.sampled_from([0, 1, 4, 5, 6])))] if draw(st.booleans()) else [None] * 4
    rows = draw(st.lists(any_row(), max_size=4))
    message = [draw(count | st.sampled_from([0, 0, 0, -1, None, 1.0])), rows, stats, moment, *tail]
    return message[: draw(st.sampled_from([30, 30, 30, 2, 3, 4, 1]))]


@settings(max_examples=200)
@given(any_message())
def test_messages_of_every_kind(message):
    decode(pack(message))


ordinary_row = st.builds(
    lambda name, tokens, size, finish, stop, cached, at: row(
        name, tuple(tokens), size, **fields(size, finish, stop, cached, at)
    ),
    st.text(st.characters(codec="ascii"), max_size=40),
    st.lists(count, max_size=5) | st.lists(count, min_size=1, max_size=1),
    st.integers(2, 20),
    st.sampled_from([None, None, 0, 1, 2, 3, 4]),
    st.sampled_from([None, None, 2, "stop here", [1, [2]], {"a": True}, -5, 2.5]),
    st.none() | st.none() | count,
    st.none(),
)


def fields(size, finish, stop, cached, at):
    wanted = {"f5": finish, "f6": stop, "f7": None if stop is None else [["queued", 1.5]], f"f{at or 11}": None}
    wanted[f"f{at or 11}"] = None if cached is None else PREFILL | {"num_cached_tokens": cached}
    return {name: value for name, value in wanted.items() if int(name[1:]) < size}


@given(
    st.lists(ordinary_row, min_size=1, max_size=20),
    st.sampled_from([None, STATS, STATS | {f"k{at}": [at, {"b": 1.0}] for at in range(30)}]),
    st.sampled_from([2, 3, 4, 5, 8, 9]),
    count,
)
def test_ordinary_messages_are_left_to_nobody(rows, stats, length, index):
    got = decode(pack(outputs(rows, stats, index)[:length]))
    assert got.ids == [cells[0] for cells in rows]
    assert [list(tokens) for tokens in got.token_ids] == [cells[1] for cells in rows]
    assert (got.load is not None) == (stats is not None and length > 2)
    assert got.engine_index == index


@pytest.mark.parametrize("position", range(9, 15))
@pytest.mark.parametrize("cached", EDGES)
def test_cached_tokens_are_found_wherever_a_release_keeps_them(position, cached):
    stats = PREFILL | {"num_cached_tokens": cached}
    got = decode(pack(outputs([row("a"), row("b", **{f"f{position}": stats}), row("c")])))
    assert got.cached_tokens == [None, cached, None]
    for other in range(7, 18):
        decode(pack(outputs([row("a", **{f"f{other}": stats})])))
        if other != position:
            decode(pack(outputs([row("a", **{f"f{position}": stats}), row("b", **{f"f{other}": PREFILL})])))
            decode(pack(outputs([row("a", **{f"f{position}": stats, f"f{other}": PREFILL})])))


@pytest.mark.parametrize("position", range(2, 18))
@pytest.mark.parametrize(
    "value",
    [5, -1, "s", "é", 1.5, True, [1, {"a": 2}], {"a": [1]}, {1: 2}, {"é": 1}, b"raw", [[[[[[[[[[1]]]]]]]]]], []],
    ids=repr,
)
def test_every_position_with_a_value_of_every_kind(position, value):
    for rows in ([row("a", **{f"f{position}": value})], [row("a"), row("b", **{f"f{position}": value}), row("c")]):
        whole = pack(outputs(rows, STATS))
        for payload in (whole, whole + b"\xc0", whole + b"\x80", whole + b"\x90\x90", whole[:-1], whole[:-8]):
            decode(payload)


@pytest.mark.parametrize(
    "number",
    [
        b"\xcc\x05",
        b"\xcd\0\x05",
        b"\xce\0\0\0\x05",
        b"\xcf" + bytes(7) + b"\x05",
        b"\xcf\0\0\0\x01\0\0\0\x03",
        b"\xd0\x05",
    ],
)
def test_numbers_that_are_longer_than_needed(number):
    for before, after in ((b"\x92", b"\x91\x92\xa1a\x91\x07"), (b"\x92\0\x91\x92\xa1a\x91", b"")):
        decode(before + number + after)
    decode(b"\x92\0\x91\x96\xa1a\x91\x07\xc0\xc0\xc0" + number)
    decode(b"\x92\0\x91\x9c\xa1a\x91\x07" + b"\xc0" * 9 + b"\x81\xb1num_cached_tokens" + number)


@pytest.mark.parametrize(
    "name", [b"\xd9\x01a", b"\xda\0\x01a", b"\xdb\0\0\0\x01a", b"\xa1\xff", b"\xa2\xc3\xa9", b"\xa2\xc3"]
)
@pytest.mark.parametrize("array", [b"\x91", b"\xdc\0\x01", b"\xdd\0\0\0\x01"])
def test_heads_that_are_longer_than_needed_and_names_that_are_no_ascii(name, array):
    whole = b"\x92\0" + array + b"\x92" + name + array + b"\x07"
    for payload in (whole, whole + b"\x90", whole + b"\x80", whole[:-1]):
        decode(payload)
    stop = b"\x98\xa1a\x91\x07\xc0\xc0\xc0\xc0" + name + b"\x90"
    for payload in (b"\x92\0\x91" + stop, b"\x92\0\x91" + stop + b"\xc0", b"\x92\0\x91" + stop[:-1] + b"\x90\xc0"):
        decode(payload)


@pytest.mark.parametrize("depth", range(1, 12))
def test_some_nesting_is_ordinary(depth):
    payload = pack(outputs([row("a", f6=msgspec.msgpack.decode(b"\x91" * depth + b"\xc0"))]))
    assert (decode(payload) is not None) == (depth <= 7)


@pytest.mark.parametrize("size", range(21))
def test_rows_of_every_length(size):
    cells = row("a", (7,), 20, f5=1)[:size]
    for rows in ([cells], [row("b"), cells, row("c")]):
        assert (decode(pack(outputs(rows, STATS))) is not None) == (size >= 2)


@pytest.mark.parametrize(
    "moment", [None, 0, 3, -1, 2**63, True, "x", -1.0, 0.0, float("inf"), float("nan"), [1.5], {}], ids=repr
)
def test_times_of_every_kind(moment):
    decode(pack(outputs([row("a")], STATS, f3=moment)))


@pytest.mark.parametrize(
    "item",
    [b"\xca\x3f\x80\0\0", b"\xcb\x3f\xf0" + bytes(6), b"\xd3" + b"\xff" * 8, b"\xcf" + b"\xff" * 8],
    ids=bytes.hex,
)
def test_numbers_that_nobody_reads(item):
    for place in (
        b"\x92\0\x91\x98\xa1a\x91\x07\xc0\xc0\xc0\xc0" + item + b"\xc0",
        b"\x92\0\x91\x9f\xa1a\x91\x07" + b"\xc0" * 12 + item,
    ):
        assert decode(place) is not None
        decode(place[:-1])


def test_times_are_read_to_the_last_bit():
    for moment in (1e-300, 0.1, 1.0, 123456.789, 1e300, struct.unpack(">d", b"\x3f\xf1\x23\x45\x67\x89\xab\xcd")[0]):
        assert decode(pack(outputs([row("a")], STATS, f3=moment))).load.taken_at_s == moment


@pytest.mark.parametrize(
    "arguments", [(), (b"",), (bytearray(), FINISH_REASONS), (None, FINISH_REASONS), (b"", [*FINISH_REASONS])]
)
def test_arguments_of_other_kinds_are_refused(arguments):
    for more in (arguments, (*arguments, *FINISH_REASONS), (b"", FINISH_REASONS[1:]), (b"", FINISH_REASONS, 1)):
        with pytest.raises(TypeError):
            decode_vllm(*more)

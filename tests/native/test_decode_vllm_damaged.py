"""vLLM messages that are damaged or hostile: read in C as by the reference or not at all, and at no great cost."""

import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.common import MAX_PAYLOAD_BYTES
from gateway.wire.vllm.layout import FINISH_REASONS
from gateway.wire.vllm.outputs import decode_compiled
from tests.support.decoded import GOLDEN, PREFILL, decode
from tests.support.native import compiled_or_skip
from tests.support.wire import STATS, outputs, pack, row

decode_vllm = compiled_or_skip().decode_vllm

SEEDS = [p for p in GOLDEN if len(p) < 2000] + [
    pack(
        outputs([row(f"r{at}", (at, 70_000 * at), f5=at % 5, f6="é", f11=PREFILL) for at in range(4)], STATS, index=9)
    ),
    pack(outputs([row("a", f6=[1, {"b": "é"}], f7=[]), row("b", f11=PREFILL | {"é": []})], STATS)),
    pack(outputs([row("é"), row("b", (), 7, f6="é")], STATS | {"é": {"x": ["é"]}})[:4]),
    pack(outputs([row("a", (1, 2, 300), 6), row("b", (), 2)])[:2]),
]
LEADS = bytes([0, 1, 5, 0x7F, 0x80, 0x81, 0x8F, 0x90, 0x91, 0x9F, 0xA0, 0xA1, 0xBF, *range(0xC0, 0xE1), 0xFF])


def damage(rng, payload):
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 5))
        how = rng.randrange(7)
        if how == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1 and at < len(data):
            data[at] = rng.choice(LEADS)
        elif how == 2:
            del data[at:]
        elif how == 3:
            data[at:at] = rng.choices(LEADS, k=size)
        elif how == 4:
            data[at:at] = data[at : at + size]
        elif how == 5:
            del data[at : at + size]
        else:
            data += bytes(rng.choices(LEADS, k=size))
    return bytes(data)


@pytest.mark.parametrize("part", range(4))
def test_damaged_messages(part):
    rng = random.Random(part)
    decoded = sum(decode(damage(rng, rng.choice(SEEDS))) is not None for _ in range(15_000))
    assert decoded > 200, "some damage is none"


@given(st.binary(max_size=60))
def test_noise(payload):
    decode(payload)
    decode(b"\x92\0\x91\x92" + payload)


# Hostile ones.

HEADS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdd\x04\0\0\0",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xde\xff\xff",
    b"\xdb\xff\xff\xff\xff",
]
PLACES = [
    b"",
    b"\x92\0",
    b"\x92\0\x91",
    b"\x92\0\x91\x92",
    b"\x92\0\x91\x92\xa1a",
    b"\x92\0\x91\x98\xa1a\x91\x07" + b"\xc0" * 4,
]
PLACES += [b"\x92\0\x91\x9f\xa1a\x91\x07" + b"\xc0" * 8, b"\x93\0\x91\x92\xa1a\x91\x07"]


def costs(payload):
    """What it takes at most, in bytes."""
    tracemalloc.start()
    try:
        assert decode_vllm(payload, FINISH_REASONS) is None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place", PLACES, ids=bytes.hex)
@pytest.mark.parametrize("head", HEADS, ids=bytes.hex)
def test_heads_that_promise_too_much_cost_nothing(place, head):
    assert costs(place + head) < 2000
    assert costs(place + head + b"\xc1" * 1000) < 10_000
    assert costs(place + head + b"\x92" * 100_000) < 1_000_000


@pytest.mark.parametrize("rest", [b"\xc1", b"\xc0", b"\x90", b"\x92", b"\x81", b"\xa1"], ids=bytes.hex)
def test_a_large_payload_is_given_up_where_it_is_strange(rest):
    room = MAX_PAYLOAD_BYTES - 100
    for place in PLACES:
        payload = place + b"\xdd" + (room - 100).to_bytes(4) + rest * room
        began_at = time.perf_counter()
        assert costs(payload) < 4 << 20
        assert time.perf_counter() - began_at < 10.0
    assert decode_compiled(b"\x92\0\x91\x92\xa1a\x91\x07" + b"\0" * MAX_PAYLOAD_BYTES) is None


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\x01"], ids=bytes.hex)
@pytest.mark.parametrize("place", PLACES, ids=bytes.hex)
def test_deep_nesting_is_given_up_early(place, nest):
    assert costs(place + nest * 200_000 + b"\xc0") < 10_000

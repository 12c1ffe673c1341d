"""TokenSpeed batches: golden vectors, forms of every length, the load tail, logprobs, the other messages."""

import pytest

from gateway.types import EngineBatch, EngineDead, EngineLoad, EngineNoise, TokenLogprob
from gateway.wire.common import MAX_PAYLOAD_BYTES
from gateway.wire.tokenspeed import TokenSpeedProtocol
from tests.support.wire import check, pack, slim, tokenspeed_vectors

PROTOCOL = TokenSpeedProtocol()


def decode(message):
    got = PROTOCOL.decode_output([message if isinstance(message, bytes) else pack(message)])
    check(got)
    return got


def vec_1(**more):
    """Return what every `batch-*` vector of one row says."""
    return EngineBatch(
        ids=["vec-1"],
        token_ids=[(10, 11)],
        finish=["length"],
        prompt_tokens=[3],
        completion_tokens=[2],
        cached_tokens=[1],
        logprobs=[[TokenLogprob(-0.5), TokenLogprob(-0.25)]],
        **more,
    )


GOLDEN = {
    "batch-9": vec_1(),
    "batch-10": vec_1(engine_index=1),
    "batch-14": vec_1(engine_index=1, load=EngineLoad(running=2, waiting=5, kv_usage=0.25, kv_total_pages=400)),
    "batch-14-no-load": vec_1(engine_index=1),
    "batch-14-two": EngineBatch(
        ids=["a", "b"],
        token_ids=[(10,), (20, 21)],
        finish=["", "stop"],
        prompt_tokens=[3, 4],
        completion_tokens=[1, 2],
        cached_tokens=[0, 1],
        engine_index=3,
        load=EngineLoad(running=1, waiting=0, kv_usage=0.0, kv_total_pages=70_000),
    ),
    "batch-14-load-only": EngineBatch(
        ids=[],
        token_ids=[],
        finish=[],
        prompt_tokens=[],
        completion_tokens=[],
        cached_tokens=[],
        engine_index=2,
        load=EngineLoad(running=7, waiting=9, kv_usage=5 / 300, kv_total_pages=300),
    ),
}


@pytest.mark.parametrize("name", [name for name in tokenspeed_vectors() if name.startswith("batch")])
def test_golden_batches(name):
    assert decode(tokenspeed_vectors()[name]) == GOLDEN[name]


@pytest.mark.parametrize("wrap", [bytes, memoryview, bytearray])
def test_any_buffer_is_a_frame(wrap):
    frame = wrap(tokenspeed_vectors()["batch-14"])
    assert PROTOCOL.decode_output([frame]) == GOLDEN["batch-14"]


def test_aux_frames_are_ignored():
    assert PROTOCOL.decode_output([tokenspeed_vectors()["batch-14"], b"aux"]) == GOLDEN["batch-14"]


@pytest.mark.parametrize("length", range(9, 15))
def test_forms_without_a_full_load_tail_report_none(length):
    batch = decode(slim()[:length])
    assert batch.ids == ["a", "b"]
    assert batch.engine_index == (None if length == 9 else 1)
    assert (batch.load is not None) is (length == 14)
    assert batch.load_fault is batch.fault is None


def test_longer_forms_are_read_up_to_what_is_known():
    batch = decode([*slim(), "later", {"x": [1]}, None])
    assert (batch.load.running, batch.load.waiting, batch.load.kv_usage) == (2, 1, 0.25)
    assert batch.fault is None


def test_no_column_of_logprobs_when_no_row_has_any():
    assert decode(slim()).logprobs is None
    wide_headers = pack(slim(ids="ab")).replace(b"\x92\x90\x90", b"\xdc\x00\x02\x90\x90")
    assert decode(wide_headers).logprobs is None


def test_logprobs_of_some_rows():
    batch = decode(slim(logprob_values=[[], [-1]], logprob_ids=[[], [11]]))
    assert batch.logprobs == [None, [TokenLogprob(-1.0)]]
    assert batch.fault is None


@pytest.mark.parametrize("count", [15, 16, 300, 70_000])
def test_wide_batches(count):
    batch = decode(slim(ids=[f"r{at}" for at in range(count)]))
    assert len(batch.ids) == count
    assert batch.logprobs is None
    assert batch.token_ids[-1] == (count + 9,)


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_finish_reasons(reason):
    assert decode(slim(finished_reasons=["", reason])).finish == ["", reason]


def test_unknown_finish_reason_is_an_error_and_no_fault():
    batch = decode(slim(finished_reasons=["exploded", ""]))
    assert batch.finish == ["error", ""]
    assert batch.token_ids == [(10,), (11,)]
    assert batch.fault is None


TAIL = ("num_running", "num_waiting", "kv_active_pages", "kv_total_pages")
BAD_LOAD = [-1, 1.5, 2.0, "2", True, None, [1], {"a": 1}, 2**33, b"2"]


@pytest.mark.parametrize("field", TAIL)
@pytest.mark.parametrize("bad", BAD_LOAD, ids=repr)
def test_a_bad_load_field_costs_the_report_and_no_token(field, bad):
    batch = decode(slim(**{field: bad}))
    assert batch.load is None
    assert batch.load_fault == "bad_load"
    assert (batch.ids, batch.token_ids) == (["a", "b"], [(10,), (11,)])
    assert (batch.failed_ids, batch.lossy, batch.fault) == ((), False, None) or batch.failed_ids == []


def test_zero_total_pages_is_no_report_and_no_fault():
    batch = decode(slim(num_running=9, kv_total_pages=0))
    assert batch.load is batch.load_fault is None


def test_usage_is_passed_on_raw():
    assert decode(slim(kv_active_pages=600)).load.kv_usage == 1.5


@pytest.mark.parametrize("bad", [-1, "1", 1.0, True, b"1"], ids=repr)
def test_a_bad_engine_index_is_unknown_and_costs_nothing(bad):
    batch = decode(slim(engine_index=bad))
    assert batch.engine_index is None
    assert batch.load_fault == "bad_engine_index"
    assert batch.load.running == 2
    assert len(batch.ids) == 2


def test_sentinel():
    assert PROTOCOL.decode_output([b"ENGINE_CORE_DEAD"]) == EngineDead()
    assert PROTOCOL.decode_output([memoryview(b"ENGINE_CORE_DEAD")]) == EngineDead()
    assert isinstance(PROTOCOL.decode_output([b"ENGINE_CORE_DEAD", b""]), EngineNoise)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "empty"),
        ([b""], "empty"),
        ([b"\xc0"], "not_an_array"),
        ([b"ENGINE_CORE_DEA"], "not_an_array"),
        ([b"\xd4\x01x"], "not_an_array"),
        ([b"\xc7\x01\x02x"], "not_an_array"),
        ([pack({"status": "HELLO"})], "not_an_array"),
        ([pack([])], "foreign"),
        ([pack([1, 2, 3])], "foreign"),
        ([pack(["BatchTokenIDOut", ["a"]])], "foreign"),
        ([pack(["LoadSnapshot", "e", 1])], "foreign"),
        ([pack([0, [["a", [1]]], None])], "foreign"),
        ([b"\x9e\xb3BatchTokenIDXXX"], "foreign"),
        ([b"\xdc\x00"], "not_an_array"),
    ],
)
def test_noise(frames, reason):
    assert PROTOCOL.decode_output(frames) == EngineNoise(reason)


def test_oversized_messages_are_lossy():
    frame = memoryview(bytes(MAX_PAYLOAD_BYTES + 1))
    batch = PROTOCOL.decode_output([frame])
    assert (batch.lossy, batch.fault, batch.ids) == (True, "oversize", ())

"""vLLM batches across releases: lengths, inserted fields, statistics, control messages, noise."""

import msgspec
import pytest

from gateway.types import EngineBatch, EngineControl, EngineLoad, EngineNoise
from gateway.wire.common import MAX_PAYLOAD_BYTES
from gateway.wire.vllm import VllmProtocol
from gateway.wire.vllm.outputs import decode_outputs, decode_steady
from tests.support.wire import STATS, check, outputs, pack, row

PROTOCOL = VllmProtocol()
PREFILL = {"num_prompt_tokens": 30, "num_computed_tokens": 30, "num_cached_tokens": 16}
LOAD = EngineLoad(running=2, waiting=6, kv_usage=0.25, step_counter=9, taken_at_s=1.5)


def decode(message, *aux):
    got = PROTOCOL.decode_output([message if isinstance(message, bytes) else pack(message), *aux])
    check(got)
    return got


def rows_of(batch):
    return list(zip(batch.ids, batch.token_ids, batch.finish, strict=True))


@pytest.mark.parametrize("length", [2, 3, 6, 9, 12, 14, 15, 18, 30])
def test_rows_of_every_length(length):
    fields = {"f5": 1} if length > 5 else {}
    batch = decode(outputs([row("a", (7, 8), length, **fields), row("b", (9,), length)]))
    assert rows_of(batch) == [("a", (7, 8), "length" if fields else ""), ("b", (9,), "")]
    assert (batch.fault, batch.lossy, list(batch.failed_ids)) == (None, False, [])


@pytest.mark.parametrize("length", [2, 3, 5, 8, 9, 15])
def test_messages_of_every_length(length):
    message = (outputs([row("a")], STATS, index=3) + ["x"] * 9)[:length]
    batch = decode(message)
    assert rows_of(batch) == [("a", (7,), "")]
    assert batch.engine_index == 3
    wanted = None if length == 2 else LOAD if length > 3 else msgspec.structs.replace(LOAD, taken_at_s=None)
    assert batch.load == wanted


def test_a_message_of_an_index_only_is_an_empty_batch():
    assert decode([4]).engine_index == 4


@pytest.mark.parametrize("wrap", [bytes, memoryview, bytearray])
def test_any_buffer_is_a_frame(wrap):
    got = PROTOCOL.decode_output([wrap(pack(outputs([row("a", f11=PREFILL)], STATS)))])
    assert rows_of(got) == [("a", (7,), "")]
    assert got.cached_tokens == [16]


@pytest.mark.parametrize("position", [9, 10, 11, 12, 13, 14])
def test_cached_tokens_are_found_wherever_a_release_keeps_them(position):
    batch = decode(outputs([row("a"), row("b", **{f"f{position}": PREFILL})]))
    assert batch.cached_tokens == [None, 16]
    assert batch.fault is None


def test_cached_tokens_among_other_maps():
    """0.28 and later: ec_transfer_params at 9, trace_headers at 10."""
    batch = decode(outputs([row("a", f8={"k": 1}, f9={"engine": "x"}, f10={"traceparent": "00"}, f11=PREFILL)]))
    assert batch.cached_tokens == [16]


@pytest.mark.parametrize("cached", [-1, "16", None, True, 1.0], ids=repr)
def test_an_odd_cached_count_is_unknown(cached):
    batch = decode(outputs([row("a", f11=PREFILL | {"num_cached_tokens": cached})]))
    assert rows_of(batch) == [("a", (7,), "")]
    assert batch.cached_tokens is None


@pytest.mark.parametrize("position", [3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 17])
@pytest.mark.parametrize("value", [5, "s", 1.5, True, [1, {"a": 2}], {"a": [1]}, {1: 2}, b"raw"], ids=repr)
def test_unread_fields_may_be_of_any_kind(position, value):
    batch = decode(outputs([row("a", **{f"f{position}": value}), row("b", f11=PREFILL)]))
    assert rows_of(batch) == [("a", (7,), ""), ("b", (7,), "")]
    assert (batch.fault, list(batch.failed_ids), batch.lossy) == (None, [], False)


@pytest.mark.parametrize(
    ("wire", "reason"),
    [(None, ""), (0, "stop"), (1, "length"), (2, "abort"), (3, "error"), (4, "stop"), (5, "error"), (-1, "error")],
)
def test_finish_reasons(wire, reason):
    batch = decode(outputs([row("a", f5=wire), row("b")]))
    assert batch.finish == [reason, ""]
    assert batch.fault is None


@pytest.mark.parametrize("wire", ["stop", 1.0, True, [1], {}], ids=repr)
def test_a_finish_reason_of_another_kind_is_an_unknown_one(wire):
    batch = decode(outputs([row("a", f5=wire), row("b")]))
    assert batch.finish == ["error", ""]
    assert batch.token_ids == [(7,), (7,)]


def test_finish_without_tokens():
    assert rows_of(decode(outputs([row("a", (), f5=2)]))) == [("a", (), "abort")]


def test_several_tokens_per_row():
    assert decode(outputs([row("a", (1, 2, 2**32 - 1))])).token_ids == [(1, 2, 2**32 - 1)]


def test_statistics_are_passed_on_with_deferred_requests_as_waiting():
    batch = decode(outputs([row("a")], STATS))
    assert batch.load == LOAD
    assert batch.load_fault is None


def test_statistics_only():
    batch = decode(outputs([], STATS, index=2))
    assert (batch.ids, batch.load, batch.engine_index) == ([], LOAD, 2)


def test_older_statistics_without_deferred_or_step():
    batch = decode(outputs([], {"num_running_reqs": 1, "num_waiting_reqs": 2, "kv_cache_usage": 0}))
    assert batch.load == EngineLoad(running=1, waiting=2, kv_usage=0.0, taken_at_s=1.5)


@pytest.mark.parametrize("key", ["num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs"])
@pytest.mark.parametrize("bad", [-1, 1.0, "1", True, None, [1], 2**33, {1: 1}, b"1"], ids=repr)
def test_a_bad_count_costs_the_report_and_no_token(key, bad):
    batch = decode(outputs([row("a")], STATS | {key: bad}))
    assert (batch.load, batch.load_fault) == (None, "bad_load")
    assert rows_of(batch) == [("a", (7,), "")]
    assert batch.fault is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "0.5", True, None, [0.5], b"1"], ids=repr)
def test_a_bad_usage_costs_the_report_and_no_token(bad):
    batch = decode(outputs([row("a")], STATS | {"kv_cache_usage": bad}))
    assert (batch.load, batch.load_fault) == (None, "bad_load")
    assert rows_of(batch) == [("a", (7,), "")]


@pytest.mark.parametrize("missing", ["num_running_reqs", "num_waiting_reqs", "kv_cache_usage"])
def test_a_renamed_statistic_is_a_fault_not_an_empty_rank(missing):
    stats = {key: value for key, value in STATS.items() if key != missing}
    batch = decode(outputs([row("a")], stats))
    assert (batch.load, batch.load_fault) == (None, "bad_load")


@pytest.mark.parametrize("stats", [5, "busy", [1, 2], True, b"x", {1: 2}], ids=repr)
def test_statistics_of_another_kind(stats):
    batch = decode(outputs([row("a")], stats))
    assert (batch.load, batch.load_fault) == (None, "bad_load")
    assert rows_of(batch) == [("a", (7,), "")]


@pytest.mark.parametrize("usage", [-0.5, 1.5])
def test_usage_outside_its_range_is_passed_on_raw(usage):
    assert decode(outputs([], STATS | {"kv_cache_usage": usage})).load.kv_usage == usage


@pytest.mark.parametrize("step", [-1, "9", 1.5, None, True], ids=repr)
def test_an_odd_step_counter_is_unknown(step):
    assert decode(outputs([], STATS | {"step_counter": step})).load.step_counter is None


def test_control_messages():
    assert decode(outputs(f6=0)) == EngineControl(engine_index=0, wave_complete=0)
    assert decode(outputs(f7=4, index=3)) == EngineControl(engine_index=3, start_wave=4)
    assert decode(outputs(f4=[-1, None, [None, True]])) == EngineControl(engine_index=0, utility_call_id=-1)
    assert decode(outputs(f4=["?", 5])) == EngineControl(engine_index=0)
    about_prefill = [1, None, [None, ["num_cached_tokens"]]]
    assert decode(outputs(f4=about_prefill)) == EngineControl(engine_index=0, utility_call_id=1)


@pytest.mark.parametrize("first", [None, PREFILL])
def test_rows_win_over_control(first):
    batch = decode(outputs([row("a", f11=first)], f6=3))
    assert rows_of(batch) == [("a", (7,), "")]


def test_finished_requests_change_nothing():
    assert decode(outputs([], STATS, f5=["gone"])).ids == []


@pytest.mark.parametrize("utility", [5, "x", {"a": 1}], ids=repr)
def test_a_utility_reply_of_another_kind_is_none(utility):
    assert isinstance(decode(outputs(f4=utility)), EngineBatch)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "empty"),
        ([b""], "empty"),
        ([b"\xc0"], "not_an_array"),
        ([b"\x05"], "not_an_array"),
        ([b"ENGINE_CORE_DEAD!"], "not_an_array"),
        ([b"\xd4\x01x"], "not_an_array"),
        ([pack({"status": "READY"})], "not_an_array"),
        ([pack([])], "foreign"),
        ([pack(["req-1"])], "foreign"),
        ([pack(["BatchTokenIDOutSlim", ["a"], [[1]], [""]])], "foreign"),
        ([pack([None, []])], "foreign"),
        ([pack([True, []])], "foreign"),
        ([pack([1.0, []])], "foreign"),
        ([pack([msgspec.msgpack.Ext(2, b"x"), []])], "foreign"),
        ([b"\x92\xb3Batch"], "foreign"),
    ],
)
def test_noise(frames, reason):
    assert PROTOCOL.decode_output(frames) == EngineNoise(reason)


def test_a_negative_engine_index_is_unknown():
    assert decode(outputs([row("a")], index=-1)).engine_index is None


def test_oversized_messages_are_lossy():
    batch = PROTOCOL.decode_output([memoryview(bytes(MAX_PAYLOAD_BYTES + 1))])
    assert (batch.lossy, batch.fault) == (True, "oversize")


@pytest.mark.parametrize("index", [0, 3, -1, 2**32])
@pytest.mark.parametrize("stats", [None, STATS, {**STATS, "num_running_reqs": -1}, "?", {**STATS, "kv_cache_usage": 1}])
@pytest.mark.parametrize("rows", [[row("a")], [row("a", f5=0)], [row("a"), row("b", (8, 9), f5=99)]])
def test_the_short_way_says_what_the_long_one_says(rows, stats, index):
    payload = pack(outputs(rows, stats, index=index))
    steady = decode_steady(payload)
    assert steady is not None
    long = decode_outputs(payload, [payload])
    long.failed_ids = tuple(long.failed_ids)
    assert steady == long


@pytest.mark.parametrize("message", [outputs([], STATS), outputs([row("a", f11=PREFILL)]), ["x", [row("a")]], [1]])
def test_the_short_way_is_for_steady_rows_only(message):
    assert decode_steady(pack(message)) is None

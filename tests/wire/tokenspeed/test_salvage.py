"""Damaged TokenSpeed batches: what is certain is delivered, what can be named fails, the rest is lossy."""

import pytest

from gateway.types import EngineBatch, EngineNoise, TokenLogprob
from gateway.wire.tokenspeed import TokenSpeedProtocol
from tests.support.wire import check, pack, slim, tokenspeed_vectors

PROTOCOL = TokenSpeedProtocol()
EXT_1 = b"\xd4\x01\x80"


def decode(message):
    got = PROTOCOL.decode_output([message if isinstance(message, bytes) else pack(message)])
    check(got)
    return got


@pytest.mark.parametrize("column", ["output_ids", "finished_reasons"])
@pytest.mark.parametrize("value", [[], ["", "", ""], [[1]], None, "ab", {"a": 1}], ids=repr)
def test_ragged_indispensable_columns_fail_every_named_request(column, value):
    batch = decode(slim(**{column: value}))
    assert (batch.ids, batch.failed_ids, batch.lossy) == ([], ["a", "b"], False)
    assert batch.fault == "ragged_columns"
    assert batch.load.running == 2


@pytest.mark.parametrize("column", ["prompt_tokens", "completion_tokens", "cached_tokens"])
@pytest.mark.parametrize("value", [[], [1], [1, 2, 3], None, 7], ids=repr)
def test_ragged_count_columns_are_dropped_and_tokens_delivered(column, value):
    batch = decode(slim(**{column: value}))
    assert (batch.ids, batch.token_ids) == (["a", "b"], [(10,), (11,)])
    assert getattr(batch, column) is None
    assert (batch.failed_ids, batch.fault) == ([], "ragged_columns")


@pytest.mark.parametrize("column", ["logprob_values", "logprob_ids"])
@pytest.mark.parametrize("value", [[], [[-1.0]], None], ids=repr)
def test_ragged_logprob_columns_are_dropped_and_tokens_delivered(column, value):
    batch = decode(slim(**({"logprob_values": [[-1.0], []], "logprob_ids": [[10], []]} | {column: value})))
    assert batch.ids == ["a", "b"]
    assert batch.logprobs is None
    assert batch.fault == "ragged_columns"


BAD_CELLS = [
    ("output_ids", [-1]),
    ("output_ids", [2**32]),
    ("output_ids", [1.0]),
    ("output_ids", [True]),
    ("output_ids", ["1"]),
    ("output_ids", 5),
    ("output_ids", None),
    ("finished_reasons", 3),
    ("finished_reasons", None),
    ("prompt_tokens", -1),
    ("completion_tokens", 1.5),
    ("completion_tokens", True),
    ("cached_tokens", "0"),
    ("logprob_values", [-1.0, -2.0]),
    ("logprob_values", ["x"]),
    ("logprob_ids", [-1]),
]


@pytest.mark.parametrize(("column", "cell"), BAD_CELLS)
def test_a_bad_cell_fails_its_row_and_no_other(column, cell):
    message = slim(ids=["a", "b", "c"])
    position = slim(ids=["a", "b", "c"], **{column: "here"}).index("here")
    message[position][1] = cell
    batch = decode(message)
    assert (batch.ids, batch.token_ids) == (["a", "c"], [(10,), (12,)])
    assert (batch.completion_tokens, batch.cached_tokens) == ([1, 1], [0, 0])
    assert (batch.failed_ids, batch.lossy, batch.fault) == (["b"], False, "bad_row")
    assert batch.load.running == 2


def test_an_id_with_a_bad_row_loses_its_good_rows_too():
    """Else the later row would be delivered after a gap."""
    batch = decode(slim(ids=["a", "b", "a"], output_ids=[[-1], [2], [3]]))
    assert (batch.ids, batch.failed_ids) == (["b"], ["a"])


@pytest.mark.parametrize("bad", [None, 7, b"b", ["b"]], ids=repr)
def test_an_unreadable_id_makes_the_batch_lossy(bad):
    batch = decode(slim(ids=["a", bad, "c"]))
    assert (batch.ids, batch.token_ids) == (["a", "c"], [(10,), (12,)])
    assert (batch.failed_ids, batch.lossy, batch.fault) == ([], True, "bad_row")


def test_logprobs_of_good_rows_survive():
    batch = decode(slim(output_ids=[[1], [-2]], logprob_values=[[-0.5], [-1.0]], logprob_ids=[[1], [2]]))
    assert (batch.ids, batch.failed_ids) == (["a"], ["b"])
    assert batch.logprobs == [[TokenLogprob(-0.5)]]


@pytest.mark.parametrize("rids", [None, "a", 3], ids=repr)
def test_without_an_id_column_nobody_can_be_named(rids):
    batch = decode([*slim()[:1], rids, *slim()[2:]])
    assert (batch.ids, batch.failed_ids, batch.lossy, batch.fault) == ((), (), True, "ragged_columns")


@pytest.mark.parametrize("length", range(4, 9))
def test_short_arrays_deliver_tokens_as_long_as_rows_are_whole(length):
    batch = decode(slim()[:length])
    assert (batch.ids, batch.finish, batch.fault) == (["a", "b"], ["", ""], "ragged_columns")
    assert (batch.completion_tokens is None) is (length < 6)
    assert batch.load is batch.load_fault is None


def test_shorter_arrays_fail_whom_they_name():
    assert decode(slim()[:3]).failed_ids == ["a", "b"]
    assert decode(slim()[:2]).failed_ids == ["a", "b"]
    assert decode(slim()[:1]).lossy


def test_trailing_bytes_are_a_fault_that_costs_nothing():
    batch = decode(pack(slim()) + b"\x00")
    assert (batch.ids, batch.failed_ids, batch.fault) == (["a", "b"], [], "trailing_bytes")
    assert batch.load.running == 2


def test_extension_types_are_never_interpreted():
    """A pickle in a load field costs the load, in a row the row, in the id column the names."""
    whole = pack(slim(ids=["aa", "bb"], finished_reasons=["", "stop"], kv_total_pages=77))
    in_load = decode(whole.replace(pack(77), EXT_1))
    assert (in_load.ids, in_load.load, in_load.load_fault) == (["aa", "bb"], None, "bad_load")
    in_row = decode(whole.replace(pack("stop"), EXT_1))
    assert (in_row.ids, in_row.failed_ids) == (["aa"], ["bb"])
    in_ids = decode(whole.replace(pack("bb"), EXT_1))
    assert (in_ids.ids, in_ids.lossy) == (["aa"], True)


def test_nesting_is_bounded():
    deep = b"\x91" * 50_000 + b"\xc0"
    batch = decode(pack(slim(kv_total_pages=77)).replace(pack(77), deep))
    assert (batch.ids, batch.load, batch.load_fault) == (["a", "b"], None, "bad_load")
    batch = decode(pack(slim(output_ids=[[77], [1]])).replace(pack(77), deep))
    assert (batch.ids, batch.failed_ids) == (["b"], ["a"])
    assert isinstance(decode(deep), EngineNoise)


@pytest.mark.parametrize("name", ["batch-9", "batch-14", "batch-14-two", "batch-14-load-only"])
def test_truncated_anywhere(name):
    """No cut goes unnoticed: rows come from whole columns only, and every lost row is named or lossy."""
    whole = tokenspeed_vectors()[name]
    full = PROTOCOL.decode_output([whole])
    for end in range(1, len(whole)):
        batch = decode(whole[:end])
        assert isinstance(batch, EngineBatch)
        assert batch.fault == "truncated"
        delivered = dict(zip(batch.ids, zip(batch.token_ids, batch.finish, strict=True), strict=True))
        expected = dict(zip(full.ids, zip(full.token_ids, full.finish, strict=True), strict=True))
        assert delivered.items() <= expected.items()
        if not batch.lossy:
            assert delivered.keys() | set(batch.failed_ids) == expected.keys()

"""Damaged vLLM messages: whole rows are delivered, rows that can be named fail, the rest is lossy."""

import pytest

from gateway.types import EngineBatch
from gateway.wire.vllm import VllmProtocol
from tests.support.wire import STATS, check, outputs, pack, recorded, row

PROTOCOL = VllmProtocol()
EXT_1 = b"\xd4\x01\x80"


def decode(message):
    got = PROTOCOL.decode_output([message if isinstance(message, bytes) else pack(message)])
    check(got)
    return got


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.0], [True], ["1"], 5, None, "ab", {}], ids=repr)
def test_bad_tokens_fail_their_row_and_no_other(tokens):
    batch = decode(outputs([row("a", (1,)), row("b", tokens), row("c", (3,))], STATS))
    assert (batch.ids, batch.token_ids) == (["a", "c"], [(1,), (3,)])
    assert (batch.failed_ids, batch.lossy, batch.fault) == (["b"], False, "bad_row")
    assert batch.load.running == 2


@pytest.mark.parametrize("logprobs", [5, "x", True, {}, [], [1, 2], [[1], [2]]], ids=repr)
def test_bad_logprobs_fail_their_row(logprobs):
    batch = decode(outputs([row("a"), row("b", f2=logprobs)]))
    assert (batch.ids, batch.failed_ids, batch.fault) == (["a"], ["b"], "bad_row")


def test_an_id_with_a_bad_row_loses_its_good_rows_too():
    """Else the later row would be delivered after a gap."""
    batch = decode(outputs([row("a", (-1,)), row("b"), row("a", (3,))]))
    assert (batch.ids, batch.failed_ids) == (["b"], ["a"])


@pytest.mark.parametrize("bad", [None, 7, ["a"], {"id": "a"}, b"a"], ids=repr)
def test_a_row_without_a_readable_id_makes_the_batch_lossy(bad):
    batch = decode(outputs([row("a"), row(bad), row("c")]))
    assert (batch.ids, batch.failed_ids, batch.lossy, batch.fault) == (["a", "c"], [], True, "bad_row")


@pytest.mark.parametrize("bad", [None, 7, "a", [], {"request_id": "a"}], ids=repr)
def test_a_row_that_is_none_makes_the_batch_lossy(bad):
    batch = decode(outputs([row("a"), bad]))
    assert (batch.ids, batch.lossy) == (["a"], True)


def test_a_row_of_an_id_only_fails_it():
    assert decode(outputs([["a"]])).failed_ids == ["a"]


@pytest.mark.parametrize("rows", [5, "rows", None, {"a": 1}], ids=repr)
def test_without_rows_nobody_can_be_named(rows):
    batch = decode([0, rows, STATS])
    assert (batch.ids, batch.failed_ids, batch.lossy, batch.fault) == ((), (), True, "bad_row")


def test_trailing_bytes_are_a_fault_that_costs_nothing():
    batch = decode(pack(outputs([row("a")], STATS)) + b"\x00")
    assert (batch.ids, batch.load.running, batch.fault) == (["a"], 2, "trailing_bytes")


def test_extension_types_are_never_interpreted():
    whole = pack(outputs([row("aa"), row("bb", (77,))], STATS | {"num_running_reqs": 99}))
    in_row = decode(whole.replace(pack(77), EXT_1))
    assert (in_row.ids, in_row.failed_ids) == (["aa"], ["bb"])
    in_id = decode(whole.replace(pack("bb"), EXT_1))
    assert (in_id.ids, in_id.lossy) == (["aa"], True)
    in_load = decode(whole.replace(pack(99), EXT_1))
    assert (in_load.ids, in_load.load, in_load.load_fault) == (["aa", "bb"], None, "bad_load")


def test_nesting_is_bounded():
    deep = b"\x91" * 50_000 + b"\xc0"
    in_row = decode(pack(outputs([row("a"), row("b", f9=77)])).replace(pack(77), deep))
    assert (in_row.ids, in_row.failed_ids) == (["a"], ["b"])
    in_tokens = decode(pack(outputs([row("a"), row("b", (77,))])).replace(pack(77), deep))
    assert (in_tokens.ids, in_tokens.failed_ids) == (["a"], ["b"])
    assert decode(b"\x92\x00" + deep).lossy


@pytest.mark.parametrize("head", [b"\x99", b"\xdc\x00\x09", b"\x99\xcd", b"\x99\x00", b"\x99\xce\x00\x00"])
def test_a_cut_before_the_rows_is_lossy(head):
    batch = decode(head)
    assert (batch.lossy, batch.fault) == (True, "truncated")


NAMES = ["nocoord-queueing_4_on_2_slots-output-9", "nocoord-logprobs-output", "coord-abort_waiting-output"]


@pytest.mark.parametrize("message", [m for m in recorded() if m.name in NAMES], ids=lambda m: m.name)
def test_truncated_anywhere(message):
    """No cut goes unnoticed: whole rows are delivered, and every lost row is named or makes it lossy."""
    whole = message.raw[0]
    full = PROTOCOL.decode_output([whole])
    expected = dict(zip(full.ids, zip(full.token_ids, full.finish, strict=True), strict=True))
    assert len(expected) == len(full.ids) > 0
    for end in range(1, len(whole)):
        batch = decode(whole[:end])
        assert isinstance(batch, EngineBatch)
        assert batch.fault == "truncated"
        delivered = dict(zip(batch.ids, zip(batch.token_ids, batch.finish, strict=True), strict=True))
        assert delivered.items() <= expected.items()
        if not batch.lossy:
            assert delivered.keys() | set(batch.failed_ids) == expected.keys()

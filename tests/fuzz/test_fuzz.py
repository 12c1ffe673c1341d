"""A small, fixed part of `make fuzz`, and that the harness finds what it is for."""

import gc
import sys
import tracemalloc

import msgspec
import pytest

from gateway.types import EngineBatch
from gateway.wire.tokenspeed import outputs as tokenspeed_outputs
from tests.fuzz import targets_wire
from tests.fuzz.mutator import MAX_FRAME_BYTES, Mutator
from tests.fuzz.runner import BLOCK_FRAMES, TARGETS, Blocks, Tally, merge, plan, work
from tests.fuzz.target import show, unshow
from tests.support.wire import pack, slim

FRAMES = {"configs": 60, "answers": 150}
CALLS_PER_BYTE = 40
"""Calls of functions; the costliest frames are arrays of one-byte cells that are read one by one."""


def frames_of(name, count, seed="test"):
    target = TARGETS[name]
    corpus = list(target.corpus())
    mutator = Mutator(f"{seed}/{name}", [part for frame in corpus for part in frame])
    return [target.damage(mutator, mutator.source.choice(corpus)) for _ in range(count)]


@pytest.mark.parametrize("name", TARGETS)
def test_no_frame_breaks_a_promise(name):
    tally = Tally()
    Blocks(TARGETS[name], "test").run(0, FRAMES.get(name, BLOCK_FRAMES), tally)
    assert not tally.failures


@pytest.mark.parametrize("name", TARGETS)
def test_the_whole_corpus_passes_unharmed(name):
    run = TARGETS[name].make()
    for frame in TARGETS[name].corpus():
        run(list(frame))


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in ("configs", "answers")])
def test_work_is_bounded_by_the_length_of_a_frame(name):
    run, calls = TARGETS[name].make(), [0]

    def count(_frame, event, _argument):
        calls[0] += event in ("call", "c_call")

    for frame in frames_of(name, 200):
        size = sum(map(len, frame))
        calls[0] = 0
        sys.setprofile(count)
        try:
            run(frame)
        finally:
            sys.setprofile(None)
        assert calls[0] <= 4_000 + CALLS_PER_BYTE * size, show(frame)[:400]


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "configs"])
def test_nothing_is_kept_of_a_frame(name):
    frames = frames_of(name, 300)
    run = TARGETS[name].make()
    for frame in frames:
        run(list(frame))  # caches fill
    tracemalloc.start()
    try:
        for _ in range(2):
            for frame in frames:
                run(list(frame))
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
        assert held < 256 * 1024
    finally:
        tracemalloc.stop()


def test_the_same_seed_makes_the_same_frames():
    for name in TARGETS:
        assert frames_of(name, 40) == frames_of(name, 40)
    assert frames_of("handshake", 40) != frames_of("handshake", 40, "other")
    assert all(len(part) <= 2 * MAX_FRAME_BYTES for name in TARGETS for frame in frames_of(name, 300) for part in frame)


def test_a_run_is_planned_whole_and_reported_whole():
    blocks = plan(20_000, TARGETS)
    assert abs(sum(size for _, _, size in blocks) - 20_000) < len(TARGETS)
    assert len({(name, block) for name, block, _ in blocks}) == len(blocks)
    few = [block for block in blocks if block[0] in ("handshake", "token_files")][:3]
    report = merge([work(few, "test")])
    assert report["frames"] == sum(size for _, _, size in few)
    assert report["failures"] == []


def test_a_frame_survives_its_report():
    frame = [b"\x00\xff", b"", b"abc"]
    assert unshow(show(frame)) == frame


class TestTheHarnessFinds:
    """Each is a defect that a decoder could have; the harness must see it."""

    def run(self, name, frames=BLOCK_FRAMES):
        tally = Tally()
        Blocks(TARGETS[name], "test").run(0, frames, tally)
        return tally.failures

    def test_a_decoder_that_raises(self, monkeypatch):
        monkeypatch.setattr(tokenspeed_outputs, "MALFORMED", (RecursionError,))
        assert any(
            "ValidationError" in failure.error or "DecodeError" in failure.error
            for failure in self.run("tokenspeed_outputs")
        )

    def test_columns_that_are_not_compared(self, monkeypatch):
        monkeypatch.setattr(tokenspeed_outputs, "_is_ragged", lambda batch: False)
        assert self.run("tokenspeed_outputs")

    def test_tokens_that_are_another_rows(self, monkeypatch):
        def shifted(payload):
            batch = real(payload)
            if isinstance(batch, EngineBatch) and len(batch.ids) > 1:
                tokens = list(batch.token_ids)
                return msgspec.structs.replace(batch, token_ids=tokens[1:] + tokens[:1], logprobs=None)
            return batch

        real = tokenspeed_outputs.decode_batch
        monkeypatch.setattr("gateway.wire.tokenspeed.protocol.decode_batch", shifted)
        assert self.run("tokenspeed_outputs")

    def test_a_row_that_nobody_sent(self):
        batch = EngineBatch(ids=["aa", "zz"], token_ids=[(10,), (11,)], finish=["", ""])
        with pytest.raises(AssertionError):
            targets_wire.nothing_invented("tokenspeed", [pack(slim(ids=["aa"]))], batch)

    def test_a_row_that_is_delivered_twice(self):
        batch = EngineBatch(ids=["aa", "aa"], token_ids=[(10,), (10,)], finish=["", ""])
        with pytest.raises(AssertionError):
            targets_wire.nothing_invented("tokenspeed", [pack(slim(ids=["aa"]))], batch)

    def test_an_error_that_is_not_the_declared_one(self, monkeypatch):
        monkeypatch.setattr("gateway.edges.auth.CredentialsError", KeyError)
        assert self.run("token_files")

    def test_a_token_that_lets_anyone_in(self, monkeypatch):
        monkeypatch.setattr("gateway.edges.auth.Authenticator.check_header", lambda *_: None)
        assert self.run("metadata")

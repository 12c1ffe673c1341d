"""Drives a stub rank's engine without sockets, and reads its batches with plain msgpack."""

from typing import NamedTuple

import msgspec

from engine_stub.backend import registry
from engine_stub.config import StubConfig
from engine_stub.engine import RankEngine
from engine_stub.faults import Faults
from engine_stub.group import make_codec
from engine_stub.records import Records
from engine_stub.tokens import expected_tokens

FINISHES = {None: "", 0: "stop", 1: "length", 2: "abort", 3: "error"}


class Row(NamedTuple):
    id: str
    tokens: list
    finish: str
    completion: int | None


class Batch(NamedTuple):
    """One decoded output message. `load` is (running, waiting, kv usage); None when there is no report."""

    rows: list
    load: tuple | None
    engine_index: int | None
    raw: list


def add_message(protocol, request_id, prompt, max_tokens, *, stop_ids=(), seed=None, logprobs=None, temperature=0.0):
    """Frames of an ADD as a gateway sends it, after the identity."""
    if protocol == "tokenspeed":
        sampling = [max_tokens, None, list(stop_ids), temperature, 1.0, -1, 0.0, 0.0, 0.0, 1.0, 0]
        sampling += [None] * 4 + [False, True, True, False, None, None, None, None, seed]
        payload = ["TokenizedGenerateReqInput", request_id, None, None, list(prompt), sampling]
        payload += [logprobs is not None, -1, 0, None, True]
    else:
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "stop_token_ids": list(stop_ids)}
        sampling |= {key: value for key, value in (("seed", seed), ("logprobs", logprobs)) if value is not None}
        payload = [request_id, list(prompt), None, sampling, None, 0.0, None, None, None]
    return [b"\x00", msgspec.msgpack.encode(payload)]


def abort_message(*ids):
    return [b"\x01", msgspec.msgpack.encode(list(ids))]


def read_batch(frames):
    """Decode either family's batch."""
    raw = msgspec.msgpack.decode(frames[0])
    if isinstance(raw[0], str):
        assert raw[0] == "BatchTokenIDOutSlim"
        rows = [Row(*row) for row in zip(raw[1], raw[2], raw[3], raw[5], strict=True)]
        tail = raw[10:]
        has_load = len(tail) == 4 and tail[3]
        return Batch(
            rows, (tail[0], tail[1], tail[2] / tail[3]) if has_load else None, raw[9] if raw[9:] else None, raw
        )
    rows = [Row(row[0], row[1], FINISHES[row[5]], None) for row in raw[1]]
    stats = raw[2]
    keys = ("num_running_reqs", "num_waiting_reqs", "kv_cache_usage")
    return Batch(rows, None if stats is None else tuple(stats.get(key) for key in keys), raw[0], raw)


class EngineDriver:
    """One engine, stepped by hand."""

    def __init__(self, protocol, config=None, faults=None):
        self.protocol = protocol
        self.config = config or StubConfig()
        self.records = Records(100)
        backend = registry.create("synthetic", self.config)
        codec = make_codec(protocol, self.config)
        self.engine = RankEngine(codec, backend, self.config, 0, self.records, faults or Faults())
        self.now = 0.0

    def add(self, request_id, prompt_len=4, max_tokens=3, **sampling):
        prompt = list(range(1, prompt_len + 1))
        return self.engine.receive(add_message(self.protocol, request_id, prompt, max_tokens, **sampling), self.now)

    def abort(self, *ids):
        self.engine.receive(abort_message(*ids), self.now)

    def step_raw(self):
        """Messages of one step; None when there was none."""
        if self.engine.begin() is None:
            return None
        return self.engine.finish(self.now)

    def step(self):
        """The one batch of one step, decoded; None when nothing was sent."""
        messages = self.step_raw()
        if not messages:
            return None
        (frames,) = messages
        return read_batch(frames)

    def run(self):
        """Every batch until there is nothing to do, the last one after running dry included."""
        batches = []
        while (messages := self.step_raw()) is not None:
            batches += [read_batch(frames) for frames in messages]
        batches += [read_batch(frames) for frames in self.engine.run_dry(self.now)]
        return batches

    def expected(self, prompt_len=4, count=3, seed=None):
        return expected_tokens(range(1, prompt_len + 1), seed, count, self.config.model.vocab_size)


def tokens_of(batches, request_id):
    return [token for batch in batches for row in batch.rows if row.id == request_id for token in row.tokens]


def finishes_of(batches, request_id):
    return [row.finish for batch in batches for row in batch.rows if row.id == request_id and row.finish]

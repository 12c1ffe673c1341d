"""For wire tests: the golden messages, builders of engine messages, and what every decode must satisfy."""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import settings

from gateway.types import EngineBatch, EngineControl, EngineDead, EngineMessage, EngineNoise, TokenLogprob

VECTORS = Path(__file__).parent.parent / "vectors"
TAG = "BatchTokenIDOutSlim"

any_speed = settings(deadline=None)
"""For property tests: what an example may cost is no assertion here, machines differ."""


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)


class Recorded(msgspec.Struct, frozen=True):
    """One recorded multipart message."""

    name: str
    direction: str
    socket: str
    scenario: str
    note: str
    body: int | None
    frames: list[str]

    @property
    def raw(self) -> list[bytes]:
        return [bytes.fromhex(frame) for frame in self.frames]


@cache
def recorded() -> list[Recorded]:
    lines = (VECTORS / "vllm_recorded.jsonl").read_text().splitlines()
    return [msgspec.json.decode(line, type=Recorded) for line in lines]


@cache
def tokenspeed_vectors() -> dict[str, bytes]:
    entries = json.loads((VECTORS / "tokenspeed.json").read_text())["vectors"]
    return {entry["name"]: bytes.fromhex(entry["hex"]) for entry in entries}


@cache
def vllm_made() -> dict[str, list[bytes]]:
    entries = json.loads((VECTORS / "vllm_made.json").read_text())["vectors"]
    return {entry["name"]: [bytes.fromhex(frame) for frame in entry["frames"]] for entry in entries}


def slim(ids: Sequence[Any] = ("a", "b"), **columns: Any) -> list[Any]:
    """Return a TokenSpeed batch as a list, ready to be damaged; keywords replace whole columns or tail fields."""
    rows = len(ids)
    fields = {
        "rids": list(ids),
        "output_ids": [[10 + at] for at in range(rows)],
        "finished_reasons": [""] * rows,
        "prompt_tokens": [3] * rows,
        "completion_tokens": [1] * rows,
        "cached_tokens": [0] * rows,
        "logprob_values": [[] for _ in range(rows)],
        "logprob_ids": [[] for _ in range(rows)],
        "engine_index": 1,
        "num_running": 2,
        "num_waiting": 1,
        "kv_active_pages": 100,
        "kv_total_pages": 400,
    }
    assert columns.keys() <= fields.keys()
    return [TAG, *(fields | columns).values()]


STATS: dict[str, Any] = {
    "num_running_reqs": 2,
    "num_waiting_reqs": 5,
    "num_skipped_waiting_reqs": 1,
    "step_counter": 9,
    "kv_cache_usage": 0.25,
    "prefix_cache_stats": {"reset": False, "queries": 4},
}


def row(request_id: Any, tokens: Any = (7,), length: int = 18, **fields: Any) -> list[Any]:
    """Return a vLLM row of `length` elements as a list; keywords `f<position>` set single elements."""
    cells: list[Any] = [request_id, list(tokens) if isinstance(tokens, tuple) else tokens, *[None] * (length - 2)]
    if length > 13:
        cells[13] = 0
    for name, value in fields.items():
        cells[int(name.removeprefix("f"))] = value
    return cells


def outputs(rows: Sequence[Any] = (), stats: Any = None, index: Any = 0, **fields: Any) -> list[Any]:
    """Return a vLLM message of 9 elements as a list; keywords `f<position>` set single elements."""
    message: list[Any] = [index, list(rows), stats, 1.5, None, None, None, None, "default"]
    for name, value in fields.items():
        message[int(name.removeprefix("f"))] = value
    return message


def check(message: EngineMessage) -> None:
    """Assert what holds for every decode of whatever bytes."""
    if isinstance(message, EngineDead | EngineControl):
        return
    if isinstance(message, EngineNoise):
        assert message.reason
        return
    assert isinstance(message, EngineBatch)
    rows = len(message.ids)
    for column in (message.token_ids, message.finish):
        assert len(column) == rows
    for column in (message.completion_tokens, message.prompt_tokens, message.cached_tokens, message.logprobs):
        assert column is None or len(column) == rows
    assert all(type(name) is str for name in (*message.ids, *message.failed_ids))
    assert not set(message.ids) & set(message.failed_ids)
    assert len(set(message.failed_ids)) == len(message.failed_ids)
    assert all(type(token) is int and 0 <= token < 2**32 for tokens in message.token_ids for token in tokens)
    assert set(message.finish) <= {"", "stop", "length", "abort", "error"}
    _check_numbers(message)
    if message.failed_ids or message.lossy:
        assert message.fault is not None


def _check_numbers(batch: EngineBatch) -> None:
    for column in (batch.completion_tokens, batch.prompt_tokens):
        assert column is None or all(type(count) is int and count >= 0 for count in column)
    assert batch.cached_tokens is None or all(c is None or (type(c) is int and c >= 0) for c in batch.cached_tokens)
    for tokens, logprobs in zip(batch.token_ids, batch.logprobs or (), strict=False):
        assert logprobs is None or len(logprobs) == len(tokens)
        assert all(type(entry) is TokenLogprob and type(entry.logprob) is float for entry in logprobs or ())
    assert batch.engine_index is None or (type(batch.engine_index) is int and batch.engine_index >= 0)
    if batch.load is not None:
        assert type(batch.load.running) is int
        assert batch.load.running >= 0
        assert type(batch.load.waiting) is int
        assert batch.load.waiting >= 0
        assert math.isfinite(batch.load.kv_usage)

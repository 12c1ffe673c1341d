"""What the output faults do to a batch: to its load, to its rows, to its frames."""

from typing import Any

import msgspec

from engine_stub.faults import Faults, FaultState, GarbageKind
from engine_stub.scheduler import Rows
from engine_stub.wire.codec import Load

NOISE = b"\xc1\xff\x00not msgpack"
FOREIGN = msgspec.msgpack.encode(["SomeOtherBatch", 1, 2])


def spoil(kind: GarbageKind, frames: list[bytes]) -> list[list[bytes]]:
    """The messages to send instead of one batch: with the first three kinds the batch stays whole."""
    match kind:
        case "noise":
            return [[NOISE], frames]
        case "foreign_tag":
            return [[FOREIGN], frames]
        case "empty":
            return [[b""], frames]
        case "truncate":
            return [[frames[0][: len(frames[0]) // 2], *frames[1:]]]
        case "ragged":
            return [[_ragged(frames[0]), *frames[1:]]]
        case "replace":
            return [[NOISE]]


def _ragged(payload: bytes) -> bytes:
    """TokenSpeed: the token column lacks its last entry. vLLM: the last row is cut to its id."""
    batch: list[Any] = msgspec.msgpack.decode(payload)
    if isinstance(batch[0], str):
        batch[2] = batch[2][:-1]
    elif batch[1]:
        batch[1][-1] = batch[1][-1][:1]
    return msgspec.msgpack.encode(batch)


def spoil_rows(rows: Rows, state: FaultState) -> None:
    """Take away the tokens or the finishes that the faults name, in place."""
    faults = state.faults
    for position, tokens in enumerate(rows.tokens):
        if tokens and faults.drop_tokens_every:
            state.rows += 1
            if state.rows % faults.drop_tokens_every == 0:
                rows.tokens[position] = []
        if faults.never_final:
            rows.finishes[position] = ""


def distorted(load: Load | None, faults: Faults) -> Load | None:
    """The report that is sent instead of the right one."""
    if load is None or faults.load is None:
        return load
    match faults.load:
        case "drop":
            return None
        case "negative":
            return Load(-1, load.waiting, load.used_blocks, load.total_blocks)
        case "float":
            return Load(load.running + 0.5, load.waiting, load.used_blocks, load.total_blocks)
        case "text":
            return Load("many", load.waiting, load.used_blocks, load.total_blocks)
        case "overfull":
            return Load(load.running, load.waiting, 2 * load.total_blocks, load.total_blocks)
        case "short":
            return Load(load.running, load.waiting, load.used_blocks, load.total_blocks, is_short=True)

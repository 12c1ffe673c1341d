"""Nanoseconds per row of `decode_output`, both families. Run: `python -m tests.bench.bench_wire`.

Batches are what a busy rank sends: one token per row, full-length ids; "first" batches hold a few
first rows besides, "logprobs" ask for the sampled token's on every row. The best of many repeats is
shown: it is the cost without other work on the machine.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from gateway.wire.registry import protocol_for

REPEATS = 2000
_RANDOM = random.Random(7)

STATS = {
    "num_running_reqs": 256,
    "num_waiting_reqs": 3,
    "num_skipped_waiting_reqs": 0,
    "num_kv_fetch_reqs_by_stage": {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0},
    "step_counter": 0,
    "current_wave": 0,
    "kv_cache_usage": 0.5,
    "iteration_details": None,
    "prefix_cache_stats": {"reset": False, "requests": 1, "queries": 4, "hits": 0, "hits_by_source": {}},
    "kv_cache_eviction_events": [],
    "waiting_lora_adapters": {},
    "running_lora_adapters": {},
}
PREFILL = {"num_prompt_tokens": 900, "num_computed_tokens": 900, "num_cached_tokens": 512, "num_local_cached_tokens": 0}


def ids(rows: int) -> list[str]:
    return [f"{_RANDOM.getrandbits(64):016x}-{100_000 + row}-0-1" for row in range(rows)]


def tokens(rows: int) -> list[list[int]]:
    return [[_RANDOM.randrange(150_000)] for _ in range(rows)]


def tokenspeed(rows: int, *, logprobs: bool = False) -> list[bytes]:
    output = tokens(rows)
    values = [[-0.5] if logprobs else [] for _ in range(rows)]
    echoed = output if logprobs else values
    columns = [ids(rows), output, [""] * rows, [900] * rows, [77] * rows, [512] * rows, values, echoed]
    return [msgspec.msgpack.encode(["BatchTokenIDOutSlim", *columns, 1, rows, 0, 4000, 8000])]


def vllm(rows: int, *, first: int = 0, logprobs: bool = False) -> list[bytes]:
    def extension(data: bytes) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(3, data)

    def row(at: int, name: str, new: list[int]) -> list[object]:
        pieces = None
        if logprobs:
            sampled = extension(new[0].to_bytes(4, "little"))
            pieces = [
                ["<i4", [1, 1], sampled],
                ["<f4", [1, 1], extension(b"\0\0\0\xbf")],
                ["<i8", [1], extension(bytes(8))],
                None,
            ]
        prefill = PREFILL if at < first else None
        return [name, new, pieces, *[None] * 8, prefill, None, 0, None, None, None, None]

    outputs = [row(at, name, new) for at, (name, new) in enumerate(zip(ids(rows), tokens(rows), strict=True))]
    return [msgspec.msgpack.encode([1, outputs, STATS, 1.5, None, None, None, None, "default"])]


def best_ns(call: Callable[[], object]) -> int:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return min(times)


def show(label: str, name: str, frames: Sequence[bytes], rows: int) -> None:
    protocol = protocol_for(name)
    protocol.decode_output(frames)
    spent = best_ns(lambda: protocol.decode_output(frames))
    sys.stdout.write(
        f"{label:<24} {rows:>4} rows  {len(frames[0]):>6} B  {spent / 1000:>8.1f} us  {spent / rows:>6.0f} ns/row\n"
    )


def main() -> None:
    for rows in (1, 64, 256):
        show("tokenspeed", "tokenspeed", tokenspeed(rows), rows)
        show("vllm", "vllm", vllm(rows), rows)
    for rows in (64, 256):
        show("tokenspeed logprobs", "tokenspeed", tokenspeed(rows, logprobs=True), rows)
        show("vllm 3 first rows", "vllm", vllm(rows, first=3), rows)
        show("vllm logprobs", "vllm", vllm(rows, logprobs=True), rows)


if __name__ == "__main__":
    main()

"""Throughput of a backend's steps and kernels, the batching gain, and how near a step comes to memory bandwidth.

All figures are measured when asked for. Times are the best of several runs: on a shared machine the others
measure the neighbours.
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from engine_stub.model import jobs
from engine_stub.model.backend import Model
from engine_stub.model.loop import PlainLoop
from engine_stub.model.shape import Shape
from engine_stub.scheduler.plan import StepItem

BLOCK_SIZE = 16
RUNS = 5
LOOP_JOBS = range(16)
LOOP_PROMPT = 16
LOOP_NEW_TOKENS = 16
LOOP_POSITIONS = LOOP_PROMPT + LOOP_NEW_TOKENS


class BatchFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One decode step with `batch` rows, each over `context` stored positions."""

    batch: int
    context: int
    step_ms: float
    tokens_per_s: float
    gain: float
    """Tokens per second over those of the first batch size."""


class KernelFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's operation with `batch` rows."""

    name: str
    batch: int
    call_us: float
    gflops: float | None = None
    gb_per_s: float | None = None


class LoopFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Whole jobs, prompts included: the textbook loop beside the batched engine."""

    jobs: int
    loop_tokens_per_s: float
    engine_tokens_per_s: float
    gain: float


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a decode step must move, over its time, beside a plain copy on the same device."""

    weight_bytes: int
    kv_bytes: int
    step_ms: float
    gb_per_s: float
    copy_gb_per_s: float
    share: float
    """Step over copy; the target on a GPU is 0.6."""


Clock = Callable[[], float]


def best_s(call: Callable[[], object], clock: Clock = time.perf_counter, runs: int = RUNS) -> float:
    """Shortest of `runs` calls, in s, after one to warm up."""
    call()
    times = []
    for _ in range(runs):
        started = clock()
        call()
        times.append(clock() - started)
    return min(times)


def step_s(model: Model, batch: int, context: int, clock: Clock = time.perf_counter, runs: int = RUNS) -> float:
    """Duration of a decode step, choice of the tokens included. The pool must hold `pool_blocks` blocks."""
    items = decode_items(batch, context)
    return best_s(lambda: model.forward(items).best(), clock, runs)


def decode_items(batch: int, context: int) -> list[StepItem]:
    """One new token per row over `context` stored positions, every row with blocks of its own."""
    width = context // BLOCK_SIZE + 1
    return [jobs.item([row % 7 + 1], context, range(row * width, (row + 1) * width)) for row in range(batch)]


def pool_blocks(batch: int, context: int) -> int:
    """Blocks for `batch` rows of `context` stored positions and one new one."""
    return batch * (context // BLOCK_SIZE + 1)


def batches(model: Model, sizes: Sequence[int], context: int, clock: Clock = time.perf_counter) -> list[BatchFigure]:
    """Decode throughput by batch size."""
    figures: list[BatchFigure] = []
    for size in sizes:
        duration = step_s(model, size, context, clock)
        rate = size / duration
        figures.append(
            BatchFigure(
                batch=size,
                context=context,
                step_ms=1e3 * duration,
                tokens_per_s=rate,
                gain=rate / figures[0].tokens_per_s if figures else 1.0,
            )
        )
    return figures


def against_loop(
    model: Model, loop: PlainLoop, todo: Sequence[jobs.Job], clock: Clock = time.perf_counter
) -> LoopFigure:
    """The same jobs one after the other in the loop, and all at once in the engine."""
    tokens = sum(job.new_tokens for job in todo)

    def one_by_one() -> None:
        for job in todo:
            loop.generate(job.prompt, job.new_tokens)

    loop_rate = tokens / best_s(one_by_one, clock, 2)
    engine_rate = tokens / best_s(lambda: jobs.run(model, todo, BLOCK_SIZE, 64), clock, 2)
    return LoopFigure(
        jobs=len(todo),
        loop_tokens_per_s=loop_rate,
        engine_tokens_per_s=engine_rate,
        gain=engine_rate / loop_rate,
    )


def loop_jobs(shape: Shape) -> list[jobs.Job]:
    """Jobs for `against_loop`."""
    return [
        jobs.Job([(31 * number + 7 * place) % shape.vocab_size for place in range(LOOP_PROMPT)], LOOP_NEW_TOKENS)
        for number in LOOP_JOBS
    ]


def bandwidth(shape: Shape, itemsize: int, batch: int, context: int, step: float, copy_gb_per_s: float) -> Bandwidth:
    """Bytes of a step over its time: every weight once (of the embedding the rows in use), K and V of all contexts."""
    embedding_bytes = shape.vocab_size * shape.hidden * itemsize
    weight_bytes = shape.parameters * itemsize - embedding_bytes + batch * shape.hidden * itemsize
    if shape.tie_embeddings:
        weight_bytes += embedding_bytes  # it is the output matrix too
    kv_bytes = batch * (context + 1) * shape.kv_elements() * itemsize
    rate = (weight_bytes + kv_bytes) / step / 1e9
    return Bandwidth(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        step_ms=1e3 * step,
        gb_per_s=rate,
        copy_gb_per_s=copy_gb_per_s,
        share=rate / copy_gb_per_s,
    )

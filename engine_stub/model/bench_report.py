"""`engine-stub bench`: builds the model that was asked for, measures it, and prints what came out."""

from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from engine_stub.config import Architecture
from engine_stub.model import ModelError, bench, bench_kernels
from engine_stub.model.arrays import Arrays, NumpyArrays
from engine_stub.model.exact import ExactModel, load
from engine_stub.model.loop import PlainLoop
from engine_stub.model.shape import NAMED, Shape, of_architecture
from engine_stub.model.weights import HashedTensors

VOCAB_SIZES = {"tiny": 1024, "small": 4096, "8b": 128_256}
REDUCED_8B = Architecture(layers=4, hidden=512, heads=8, kv_heads=2, head_dim=64, intermediate=1792)
"""The proportions of the 8B shape at a size that a CPU can step through."""
REDUCED_CONTEXT = 256
REDUCED_VOCAB = 8192
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    backend: str
    numerics: str
    shape: str
    batches: tuple[int, ...]
    context: int
    dtype: str
    device: str
    is_invariant: bool


class Report(msgspec.Struct, kw_only=True):
    """What was measured, JSON-safe. Absent parts were not measured."""

    backend: str
    numerics: str
    device: str
    kernels: str
    shape: dict[str, Any]
    notes: list[str] = []
    batches: list[bench.BatchFigure] = []
    operations: list[bench.KernelFigure] = []
    loop: bench.LoopFigure | None = None
    bandwidth: bench.Bandwidth | None = None


def measure(options: Options) -> Report:
    """Run the benchmark; raises `ModelError` for what can't be run, ImportError without torch."""
    if options.shape == "8b" and options.numerics == "exact":
        raise ModelError("shape 8b in exact numerics would take 60 GB of float64 weights: use --numerics fast")
    if options.backend == "numpy" and options.numerics != "exact":
        raise ModelError("numerics fast needs --backend torch")
    return _measure_exact(options) if options.numerics == "exact" else _measure_fast(options)


def _measure_exact(options: Options) -> Report:
    shape = of_architecture(NAMED[options.shape], VOCAB_SIZES[options.shape])
    arrays: Arrays = NumpyArrays()
    library: ModuleType = np
    if options.backend == "torch":
        import torch  # noqa: PLC0415 - the numpy benchmark needs none

        from engine_stub.model.torch_arrays import TorchArrays  # noqa: PLC0415

        arrays = TorchArrays(options.device)
        library = torch
    source = HashedTensors(0)
    blocks, positions = _pool(options)
    model = ExactModel(load(shape, source, arrays), blocks=blocks, block_size=bench.BLOCK_SIZE, positions=positions)
    report = _report(options, shape, options.backend)
    report.batches = bench.batches(model, options.batches, options.context)
    report.operations = bench_kernels.of_exact(model, max(options.batches), options.context)
    report.loop = bench.against_loop(
        model, PlainLoop(shape, source, library, arrays.put, positions), bench.loop_jobs(shape)
    )
    return report


def _measure_fast(options: Options) -> Report:
    import torch  # noqa: PLC0415 - as above

    from engine_stub.model import torch_fast  # noqa: PLC0415

    has_gpu = torch.device(options.device).type == "cuda"
    shape, notes = of_architecture(NAMED[options.shape], VOCAB_SIZES[options.shape]), []
    if options.shape == "8b" and not has_gpu:
        shape = of_architecture(REDUCED_8B, REDUCED_VOCAB)
        options = msgspec.structs.replace(options, context=min(options.context, REDUCED_CONTEXT))
        notes.append(
            "NOT run on a GPU: the 8B shape is reduced to what a CPU can step through, so the figures below "
            "check the script and say nothing about a GPU"
        )
    is_large = options.shape == "8b"
    source = HashedTensors(0)
    weights = (
        torch_fast.random_weights(shape, options.device, options.dtype)
        if is_large
        else torch_fast.load(shape, source, options.device, options.dtype)
    )
    ops = torch_fast.choose_ops(shape, options.device, is_invariant=options.is_invariant)
    blocks, positions = _pool(options)
    model = torch_fast.FastModel(weights, ops, blocks=blocks, block_size=bench.BLOCK_SIZE, positions=positions)
    model.fill_cache()
    report = _report(options, shape, ops.name)
    report.notes = notes
    report.batches = bench.batches(model, options.batches, options.context)
    report.operations = bench_kernels.of_fast(model, max(options.batches), options.context)
    if not is_large:
        kind = getattr(torch, options.dtype)
        loop = PlainLoop(
            shape, source, torch, lambda values: torch.from_numpy(values).to(options.device, kind), positions
        )
        report.loop = bench.against_loop(model, loop, bench.loop_jobs(shape))
    last = report.batches[-1]
    report.bandwidth = bench.bandwidth(
        shape,
        weights.embedding.element_size(),
        last.batch,
        last.context,
        last.step_ms / 1e3,
        _copy_rate(options.device),
    )
    return report


def _pool(options: Options) -> tuple[int, int]:
    """Blocks and positions that every part of the benchmark finds enough."""
    loop_blocks = len(bench.LOOP_JOBS) * -(-bench.LOOP_POSITIONS // bench.BLOCK_SIZE)
    return (
        max(bench.pool_blocks(max(options.batches), options.context), loop_blocks),
        max(options.context + 1, bench.LOOP_POSITIONS),
    )


def _report(options: Options, shape: Shape, kernels: str) -> Report:
    return Report(
        backend=options.backend,
        numerics=options.numerics,
        device=options.device,
        kernels=kernels,
        shape=msgspec.to_builtins(shape),
    )


def _copy_rate(device: str) -> float:
    """GB/s of a plain copy on the device, bytes read plus bytes written."""
    import torch  # noqa: PLC0415 - as above

    kind = torch.device(device).type
    source = torch.ones(COPY_BYTES.get(kind, COPY_BYTES["cpu"]), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if kind == "cuda":
            torch.cuda.synchronize(device)

    return 2 * int(source.numel()) / bench.best_s(copy) / 1e9


def text(report: Report) -> str:
    """The report for people."""
    lines = [
        f"backend {report.backend} ({report.kernels} kernels), numerics {report.numerics}, device {report.device}",
        _SHAPE.format_map(report.shape),
        *(f"! {note}" for note in report.notes),
        "",
        "decode   batch  context     ms/step     tokens/s     gain",
        *(_BATCH.format_map(msgspec.structs.asdict(row)) for row in report.batches),
        "",
        "operation       batch     us/call   GFLOP/s      GB/s",
        *(
            f"{row.name:14}  {row.batch:5}  {row.call_us:10.1f}  {_number(row.gflops)}  {_number(row.gb_per_s)}"
            for row in report.operations
        ),
    ]
    if report.loop is not None:
        lines += ["", _LOOP.format_map(msgspec.structs.asdict(report.loop))]
    if report.bandwidth is not None:
        lines += ["", _BANDWIDTH.format_map(msgspec.structs.asdict(report.bandwidth))]
    return "\n".join(lines)


_SHAPE = (
    "shape: {layers} layers, hidden {hidden}, {heads} heads over {kv_heads}, head dim {head_dim}, "
    "vocabulary {vocab_size}"
)
_BATCH = "         {batch:5}  {context:7}  {step_ms:10.3f}  {tokens_per_s:11.1f}  {gain:6.2f}x"
_LOOP = (
    "{jobs} jobs: {engine_tokens_per_s:.1f} tokens/s in one batch, {loop_tokens_per_s:.1f} in a plain eager loop "
    "over the same weights: {gain:.2f}x"
)
_BANDWIDTH = (
    "a step moves {weight_bytes:,} bytes of weights and {kv_bytes:,} of K/V in {step_ms:.3f} ms: {gb_per_s:.1f} GB/s, "
    "{share:.0%} of a plain copy's {copy_gb_per_s:.1f} GB/s"
)


def _number(value: float | None) -> str:
    return " " * 8 if value is None else f"{value:8.1f}"

"""`engine-stub bench`: throughput of steps and kernels."""
# ruff: noqa: PLC0415 - imports that take time happen inside

import os
from typing import Any

import click

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@click.command("bench")
@click.option("--backend", type=click.Choice(["numpy", "torch"]), default="numpy", show_default=True)
@click.option(
    "--numerics",
    type=click.Choice(["exact", "fast"]),
    help="Fixed point, or floating point (torch). Default: fast for shape 8b, else exact.",
)
@click.option("--shape", type=click.Choice(["tiny", "small", "8b"]), default="small", show_default=True)
@click.option("--batch", default="1,16,64", show_default=True, metavar="N,N,...", help="Decode rows per step.")
@click.option("--context", type=click.IntRange(1), default=100, show_default=True, help="Stored positions per row.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Of fast.")
@click.option("--device", default="cpu", show_default=True, help="Of torch: cpu, cuda, cuda:1, ...")
@click.option(
    "--batch-invariant", "is_invariant", is_flag=True, help="Fast numerics whose results don't depend on the batch."
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads of one product.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, batch: str, dtype: str, threads: int, as_json: bool, **given: Any) -> None:
    """Measure decode steps by batch size, single operations, and a plain eager loop over the same weights.

    On a GPU: `--backend torch --shape 8b --batch 64 --context 2048 --device cuda` compares a decode step with
    the measured copy bandwidth.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)  # read when numpy is imported
    import msgspec

    try:
        from engine_stub.model import ModelError, bench_report

        if given["backend"] == "torch":
            import torch

            from engine_stub.backend.torch_backend import check_device

            check_device(given["device"])
            torch.set_num_threads(threads)
        given["numerics"] = given["numerics"] or ("fast" if given["shape"] == "8b" else "exact")
        options = bench_report.Options(batches=_numbers(batch), dtype=DTYPES[dtype], **given)
        report = bench_report.measure(options)
    except ImportError as error:
        from engine_stub.backend.registry import KERNELS

        raise click.ClickException(f"{error.name} isn't installed: {KERNELS[given['backend']]}") from error
    except ModelError as error:
        raise click.UsageError(str(error)) from error
    click.echo(msgspec.json.format(msgspec.json.encode(report)) if as_json else bench_report.text(report))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{text!r}: give numbers of at least 1, separated by commas", param_hint="--batch")
    return numbers

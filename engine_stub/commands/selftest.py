"""`engine-stub selftest`: whether this machine computes the same bits as every other."""
# ruff: noqa: PLC0415 - imports that take time happen inside

import sys

import click


@click.command("selftest")
@click.option("--bits", is_flag=True, help="Print the SHA-256 of the logits only.")
@click.option("--backend", type=click.Choice(["numpy", "torch"]), default="numpy", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Of torch: cpu, cuda, cuda:1, ...")
def command(*, bits: bool, backend: str, device: str) -> None:
    """Run a fixed list of jobs in exact numerics and hash their logits; exit 1 when the hash is not the known one."""
    from engine_stub.backend.registry import KERNELS
    from engine_stub.model import ModelError

    try:
        from engine_stub.model import selftest

        if backend == "torch":
            from engine_stub.backend.torch_backend import check_device

            check_device(device)
        found = selftest.bits(selftest.weights_on(backend, device))
    except ImportError as error:
        raise click.ClickException(f"{error.name} isn't installed: {KERNELS[backend]}") from error
    except ModelError as error:
        raise click.UsageError(str(error)) from error
    click.echo(found)
    is_known = found == selftest.EXPECTED_BITS
    if not bits:
        verdict = "the known one" if is_known else f"NOT the known one, {selftest.EXPECTED_BITS}"
        click.echo(f"{backend} on {device}: {verdict}")
    sys.exit(0 if is_known else 1)

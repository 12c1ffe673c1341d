"""`engine-stub version`."""
# ruff: noqa: PLC0415 - imports that take time happen inside

import click


@click.command("version")
def command() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        click.echo(f"engine-stub {installed('rankgate')}")
    except PackageNotFoundError:
        click.echo("engine-stub (not installed)")

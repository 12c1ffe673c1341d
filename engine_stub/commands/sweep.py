"""`engine-stub sweep`: the concurrency table."""
# ruff: noqa: PLC0415 - imports that take time happen inside

import sys
from pathlib import Path

import click


@click.command("sweep")
@click.option(
    "--backend", default=None, metavar="NAME", help="What computes the tokens; default: numpy where it is installed."
)
@click.option("--profile", default="dgr012", show_default=True, help="Named settings to start from.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML settings over the profile.",
)
@click.option(
    "--concurrency",
    "levels",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 2, 4, 8),
    show_default=True,
    help="Slots; repeatable.",
)
@click.option("--jobs", type=click.IntRange(1), default=8, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=4, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=8, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The whole result as JSON.")
def command(
    *,
    backend: str | None,
    profile: str,
    config_path: Path | None,
    levels: tuple[int, ...],
    jobs: int,
    prompt_tokens: int,
    new_tokens: int,
    as_json: bool,
) -> None:
    """Run equal jobs at several concurrencies: ticks, occupancy, throughput, KV, corruption. Status 1: corrupt."""
    from importlib.util import find_spec

    import msgspec

    from engine_stub import sweep as sweeping
    from engine_stub.config import load_config

    workload = sweeping.Workload(jobs=jobs, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    name = backend or ("numpy" if find_spec("numpy") else "synthetic")
    try:
        result = sweeping.sweep(name, load_config(profile, config_path, {}), workload, levels)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result)))
    else:
        click.echo(sweeping.render(result))
    sys.exit(0 if result.corruption_free else 1)

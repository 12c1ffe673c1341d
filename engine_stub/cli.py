"""The `engine-stub` command. Imports that take time happen inside the commands: `--help` stays quick."""
# ruff: noqa: PLC0415 - see above

import sys
from pathlib import Path
from typing import Any

import click

OVERRIDES = {
    "time_scale": "time_scale",
    "vocab_size": "model.vocab_size",
    "max_num_seqs": "scheduler.max_active",
    "kv_tokens": "scheduler.kv_tokens",
    "handshake_timeout_s": "handshake_timeout_s",
}
"""Options that set one key of the configuration."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Stub engine ranks that dial a gateway and speak TokenSpeed's or vLLM's wire."""


@main.command()
@click.option("--protocol", type=click.Choice(["tokenspeed", "vllm"]), required=True, help="Engine family to play.")
@click.option("--handshake", required=True, metavar="ADDR", help="The gateway's handshake address, tcp://HOST:PORT.")
@click.option("--ranks", type=click.IntRange(1, 1024), default=1, show_default=True, help="Ranks in this process.")
@click.option(
    "--start-index", type=click.IntRange(0, 65535), default=0, show_default=True, help="Engine index of the first rank."
)
@click.option("--backend", default="synthetic", show_default=True, help="What computes the tokens.")
@click.option("--profile", default="default", show_default=True, help="Named settings to start from.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML settings over the profile.",
)
@click.option("--control", metavar="ADDR", help="Local address of the control socket, e.g. tcp://127.0.0.1:5800.")
@click.option("--time-scale", type=click.FloatRange(min=0), help="Multiplies step time; 0 steps as fast as it can.")
@click.option("--vocab-size", type=click.IntRange(1), help="Token ids are below this.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Batch slots of a rank.")
@click.option("--kv-tokens", type=click.IntRange(1), help="KV capacity of a rank, in tokens.")
@click.option(
    "--handshake-timeout-s", type=click.FloatRange(min=0, min_open=True), help="How long to wait for the gateway."
)
def serve(*, profile: str, config_path: Path | None, **given: Any) -> None:
    """Serve ranks until SIGTERM. They may start before or after the gateway."""
    import zmq

    from engine_stub import serve as serving
    from engine_stub.config import load_config

    overrides = {key: given.pop(option) for option, key in OVERRIDES.items()}
    try:
        status = serving.run(serving.ServeOptions(**given), load_config(profile, config_path, overrides))
    except (ValueError, zmq.ZMQError) as error:
        raise click.UsageError(str(error)) from error
    sys.exit(status)


@main.command(name="control")
@click.argument("op", type=click.Choice(["state", "faults", "kill", "restart"]))
@click.option("--address", required=True, metavar="ADDR", help="The control socket of `serve --control`.")
@click.option("--rank", type=click.IntRange(0), help="Rank in the process, from 0; without it: every rank.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A fault and its value (JSON); repeatable."
)
@click.option("--timeout-s", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True)
def control_command(op: str, address: str, rank: int | None, settings: tuple[str, ...], timeout_s: float) -> None:
    """Look at, or break, the ranks of a running `serve`. Prints the reply as JSON."""
    import msgspec

    from engine_stub.control_client import ControlUnreachable, ask

    faults = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        try:
            faults[name] = msgspec.json.decode(value) if separator else True
        except msgspec.DecodeError:
            faults[name] = value
    try:
        reply = ask(address, {"op": op, "rank": rank, "set": faults}, timeout_s)
    except ControlUnreachable as error:
        raise click.ClickException(str(error)) from error
    click.echo(msgspec.json.format(msgspec.json.encode(reply)))
    sys.exit(0 if reply["ok"] else 1)


@main.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        click.echo(f"engine-stub {installed('rankgate')}")
    except PackageNotFoundError:
        click.echo("engine-stub (not installed)")

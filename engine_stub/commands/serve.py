"""`engine-stub serve`: ranks until SIGTERM."""
# ruff: noqa: PLC0415 - imports that take time happen inside

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


@click.command("serve")
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
def command(*, profile: str, config_path: Path | None, **given: Any) -> None:
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

"""`rankgate serve`."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from gateway.cli.common import config_option, load_config_or_exit
from gateway.config.values import LogLevel

if TYPE_CHECKING:
    from gateway.config.schema import Config


@click.command()
@config_option
@click.option(
    "--log-level",
    type=click.Choice(get_args(LogLevel)),
    envvar="RANKGATE_LOG_LEVEL",
    show_envvar=True,
    help="Instead of observability.log_level.",
)
@click.option("--grpc", metavar="HOST:PORT", envvar="RANKGATE_GRPC", show_envvar=True, help="Instead of listen.grpc.")
def serve(config_path: Path | None, log_level: LogLevel | None, grpc: str | None) -> None:
    """Run the gateway until SIGTERM or SIGINT."""
    if config_path is None:
        raise click.UsageError("name the configuration file with -c FILE or RANKGATE_CONFIG")
    from gateway.edges.reload import file_identity

    identity = file_identity(config_path)
    config = _override(load_config_or_exit(config_path), log_level, grpc)
    load = partial(_load, config_path, log_level, grpc)
    # gRPC's C core writes lines of its own to stderr, where JSON lines are promised. What it has to say about a bad
    # address is said by the gateway; whoever wants more can set the variable. It is read on import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from gateway.process import run

    raise SystemExit(run(config, config_path, load, identity))


def _load(path: Path, log_level: LogLevel | None, grpc: str | None) -> "Config":
    """The file as it is now, with the flags of the start. Raises ConfigError."""
    from gateway.config.loader import ConfigError, load_config

    config = load_config(path)
    try:
        return _override(config, log_level, grpc)
    except click.BadParameter as error:
        raise ConfigError(path, None, None, f"--grpc: {error.message}") from None


def _override(config: "Config", log_level: LogLevel | None, grpc: str | None) -> "Config":
    """The configuration with the flags put in; what the flag breaks is a usage error."""
    from msgspec import structs

    from gateway.config.checks import check

    if log_level is not None:
        config = structs.replace(config, observability=structs.replace(config.observability, log_level=log_level))
    if grpc is not None:
        config = structs.replace(config, listen=structs.replace(config.listen, grpc=grpc))
        for problem in check(config):
            raise click.BadParameter(problem.message, param_hint="--grpc")
    return config

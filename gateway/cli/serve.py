"""`rankgate serve`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from gateway.cli.common import EXIT_USAGE, config_file, fail, named_file
from gateway.config.values import LogLevel

if TYPE_CHECKING:
    from gateway.config.schema import Config
    from gateway.processes.source import Source


@click.command()
@config_file
@click.option(
    "--log-level",
    type=click.Choice(get_args(LogLevel)),
    envvar="RANKGATE_LOG_LEVEL",
    show_envvar=True,
    help="Instead of observability.log_level.",
)
@click.option("--grpc", metavar="HOST:PORT", envvar="RANKGATE_GRPC", show_envvar=True, help="Instead of listen.grpc.")
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    metavar="N",
    envvar="RANKGATE_PROCESSES",
    show_envvar=True,
    help="Instead of processes.",
)
def serve(
    file: Path | None,
    config_path: Path | None,
    log_level: LogLevel | None,
    grpc: str | None,
    processes: int | None,
) -> None:
    """Run the gateway that FILE (or -c FILE) describes until SIGTERM or SIGINT."""
    path = named_file(file, config_path)
    from gateway.edges.reload import file_identity
    from gateway.processes.source import Source

    source = Source(path=str(path), log_level=log_level, grpc=grpc, processes=processes)
    identity = file_identity(path)
    text, config = _read(source)
    # gRPC's C core writes lines of its own to stderr, where JSON lines are promised. What it has to say about a bad
    # address is said by the gateway; whoever wants more can set the variable. It is read on import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if config.processes > 1:
        from gateway.processes import supervisor

        raise SystemExit(supervisor.run(config, source, text, identity))
    from gateway.process import run

    raise SystemExit(run(config, path, source.load, identity))


def _read(source: "Source") -> "tuple[str, Config]":
    """The file's text and the configuration; what a flag breaks is a usage error."""
    from gateway.config.checks import check
    from gateway.config.loader import ConfigError, parse_config

    try:
        text = source.read()
        # First without the flags that a check may object to: they don't mend a file.
        parsed = parse_config(text, source.path)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    config = source.override(parsed)
    if config != parsed:
        for problem in check(config):
            raise click.BadParameter(problem.message, param_hint=source.flags)
    return text, config

"""What the commands share: options, loading with exit codes, and calling a running gateway."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:  # only names for the type checker: importing these takes longer than --help may
    import grpc

    from gateway.config.schema import Config

EXIT_RUNTIME = 1
EXIT_USAGE = 2
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024

config_option = click.option(
    "-c",
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar="RANKGATE_CONFIG",
    show_envvar=True,
    metavar="FILE",
    help="Configuration file (YAML or JSON).",
)


def fail(message: str, code: int) -> NoReturn:
    """Print to stderr and exit."""
    click.echo(message, err=True)
    raise SystemExit(code)


def load_config_or_exit(path: Path) -> "Config":
    """Read a configuration; a bad one is printed as `FILE:LINE:COL: message` and exits with 2."""
    from gateway.config.loader import ConfigError, load_config

    try:
        return load_config(path)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)


@contextmanager
def open_channel(address: str) -> Iterator["grpc.Channel"]:
    """Connect to a running gateway; a failed call is printed and exits with 1."""
    import grpc

    options = [("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
    with grpc.insecure_channel(address, options) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            # Every error of a call is both an RpcError and a Call; the type only says the former.
            code, details = getattr(error, "code", None), getattr(error, "details", None)
            name = code().name if callable(code) else "UNKNOWN"
            text = details() if callable(details) else str(error)
            fail(f"error: {address}: {name}: {text}", EXIT_RUNTIME)


def format_table(header: list[str], rows: list[list[str]], left: frozenset[int]) -> str:
    """Align columns: those numbered in `left` to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_number(value: object, digits: int = 6) -> str:
    """A number for people: whole ones without a fraction; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.{digits}g}"
    return str(value)

"""What the commands share: options, loading with exit codes, and calling a running gateway."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:  # only names for the type checker: importing these takes longer than --help may
    import grpc

    from gateway.config.schema import Config

EXIT_RUNTIME = 1
EXIT_USAGE = 2
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CommandT = TypeVar("_CommandT", bound=Callable[..., Any])

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


def config_file(command: _CommandT) -> _CommandT:
    """The configuration file as an argument or as an option: the keyword arguments of `named_file`."""
    argument = click.argument("file", type=click.Path(path_type=Path), required=False, metavar="[FILE]")
    return argument(config_option(command))


def named_file(file: Path | None, config_path: Path | None) -> Path:
    """The file that the command line names, else the environment's; none, or two, are a usage error."""
    source = click.get_current_context().get_parameter_source("config_path")
    if file is not None and config_path is not None and source is not ParameterSource.ENVIRONMENT:
        raise click.UsageError("name one FILE, with or without -c")
    path = config_path if file is None else file
    if path is None:
        raise click.UsageError("name FILE, or set RANKGATE_CONFIG")
    return path


def _file_option(name: str, help_text: str) -> Callable[[_CommandT], _CommandT]:
    variable = f"RANKGATE_{name.upper()}"
    flag = f"--{name.replace('_', '-')}"
    return click.option(
        flag, type=click.Path(path_type=Path), envvar=variable, show_envvar=True, metavar="FILE", help=help_text
    )


_ACCESS_OPTIONS = (
    click.option("--tls", is_flag=True, envvar="RANKGATE_TLS", show_envvar=True,
                 help="Connect with TLS and the usual CAs; --ca-file and --cert-file imply it."),
    _file_option("ca_file", "Connect with TLS; the gateway's certificate is one that these (PEM) signed."),
    _file_option("cert_file", "Certificate (PEM) for a gateway that asks for one."),
    _file_option("key_file", "Its private key (PEM)."),
    click.option("--server-name", metavar="NAME", envvar="RANKGATE_SERVER_NAME", show_envvar=True,
                 help="Name in the gateway's certificate, where it isn't that of the address."),
    _file_option("token_file", "Call with the first token in this file."),
)  # fmt: skip


def access_options(command: _CommandT) -> _CommandT:
    """How to connect to a gateway: the keyword arguments of `Access`."""
    for option in reversed(_ACCESS_OPTIONS):
        command = option(command)
    return command


class Access(NamedTuple):
    """How to connect to a gateway, as the options say."""

    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    token_file: Path | None = None

    @property
    def is_secure(self) -> bool:
        """Whether to speak TLS."""
        return self.tls or self.ca_file is not None or self.cert_file is not None


class Listener(NamedTuple):
    """The listener of a gateway that a command asks, and the variable that names its address."""

    name: str
    variable: str

    @property
    def advice(self) -> str:
        """What to do about an address that is not this listener's."""
        return f"name the gateway's {self.name} with --address or {self.variable}"


GRPC = Listener("listen.grpc", "RANKGATE_ADDRESS")
ADMIN = Listener("listen.admin", "RANKGATE_ADMIN_ADDRESS")


class Connection(NamedTuple):
    """A channel to a gateway, and the metadata that every call on it takes."""

    channel: "grpc.Channel"
    metadata: tuple[tuple[str, str], ...]


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
def connect(address: str, access: Access, listener: Listener) -> Iterator[Connection]:
    """Connect to a running gateway; a failed call is printed and exits with 1, bad options exit with 2."""
    # Else the gRPC library writes lines of its own about a failed handshake, of which the error says all there is.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    metadata = _metadata(address, access)
    options: list[tuple[str, Any]] = [("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
    if access.is_secure:
        if access.server_name is not None:
            options.append(("grpc.ssl_target_name_override", access.server_name))
        channel = grpc.secure_channel(address, _credentials(access), options)
    elif access.key_file is not None or access.server_name is not None:
        raise click.UsageError("--key-file and --server-name need --tls, --ca-file or --cert-file")
    else:
        channel = grpc.insecure_channel(address, options)
    with channel:
        try:
            yield Connection(channel, metadata)
        except grpc.RpcError as error:
            # Every error of a call is both an RpcError and a Call; the type only says the former.
            code, details = getattr(error, "code", None), getattr(error, "details", None)
            name = code().name if callable(code) else "UNKNOWN"
            text = details() if callable(details) else str(error)
            fail(f"error: {address}: {name}: {text}{_advice(name, str(text), listener)}", EXIT_RUNTIME)


def _advice(code: str, text: str, listener: Listener) -> str:
    """What may be wrong with the address, going by a call's error."""
    if code == "UNIMPLEMENTED":
        return f"; ranks asks {GRPC.name}, explain {ADMIN.name}: {listener.advice}"
    return f"; {listener.advice}" if "Connection refused" in text else ""


def _credentials(access: Access) -> "grpc.ChannelCredentials":
    import grpc

    if (access.cert_file is None) != (access.key_file is None):
        raise click.UsageError("--cert-file and --key-file go together")
    roots, key, certificates = (
        None if path is None else _read_bytes(path) for path in (access.ca_file, access.key_file, access.cert_file)
    )
    return grpc.ssl_channel_credentials(roots, key, certificates)


def _metadata(address: str, access: Access) -> tuple[tuple[str, str], ...]:
    if access.token_file is None:
        return ()
    from gateway.config.addresses import is_loopback, parse_address
    from gateway.edges.auth import HEADER, parse_tokens
    from gateway.edges.credentials import CredentialsError

    try:
        is_local = is_loopback(parse_address(address).host)
    except ValueError:
        is_local = False
    if not (access.is_secure or is_local):
        raise click.UsageError(
            f"--token-file: {address} is another host, and without --tls anyone could read the token"
        )
    try:
        token = parse_tokens(_read_bytes(access.token_file), str(access.token_file))[0]
    except CredentialsError as error:
        fail(f"error: {error}", EXIT_USAGE)
    return ((HEADER, f"Bearer {token}"),)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fail(f"error: {path}: {error.strerror or error}", EXIT_USAGE)


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

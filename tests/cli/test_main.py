"""The command as a whole: what it loads, what it prints, how it exits."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gateway import __version__
from gateway.cli import cli

HEAVY = ("grpc", "zmq", "google", "yaml", "msgspec", "structlog", "prometheus_client", "uvloop", "asyncio")


def run(*arguments, **options):
    return CliRunner().invoke(cli, arguments, prog_name="rankgate", **options)


def test_importing_the_command_line_imports_nothing_heavy():
    code = f"import sys, gateway.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_names_every_command():
    for flag in ("-h", "--help"):
        result = run(flag)
        assert result.exit_code == 0
        assert {"serve", "check-config", "ranks", "explain", "version"} <= set(result.output.split())


def test_every_command_has_help():
    for name in cli.commands:
        result = run(name, "--help")
        assert result.exit_code == 0
        assert result.output.startswith(f"Usage: rankgate {name} ")


ACCESS = {f"RANKGATE_{name}" for name in ("TLS", "CA_FILE", "CERT_FILE", "KEY_FILE", "SERVER_NAME", "TOKEN_FILE")}
VARIABLES = {
    "serve": {"RANKGATE_CONFIG", "RANKGATE_LOG_LEVEL", "RANKGATE_GRPC", "RANKGATE_PROCESSES"},
    "check-config": {"RANKGATE_CONFIG"},
    "ranks": {"RANKGATE_ADDRESS"} | ACCESS,
    "explain": {"RANKGATE_CONFIG", "RANKGATE_ADMIN_ADDRESS"} | ACCESS,
    "version": set(),
}


def variables_of(command):
    """What the environment can set, as click itself resolves it."""
    context = click.Context(command, info_name=command.name, parent=click.Context(cli, info_name="rankgate"))
    names = {parameter.envvar for parameter in command.params}
    if context.auto_envvar_prefix is not None:
        names |= {f"{context.auto_envvar_prefix}_{parameter.name}".upper() for parameter in command.params}
    return names - {None}


def test_only_the_documented_options_can_be_set_by_the_environment():
    assert {name: variables_of(command) for name, command in cli.commands.items()} == VARIABLES
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    documented = set(re.findall(r"RANKGATE_[A-Z_]+", page))
    assert documented == set().union(*VARIABLES.values())


@pytest.mark.parametrize("name", VARIABLES)
def test_help_shows_what_the_environment_can_set(name):
    text = run(name, "--help").output
    assert set(re.findall(r"RANKGATE_[A-Z_]+", text)) == VARIABLES[name]


def test_version_as_command_and_option():
    assert run("version").output == f"rankgate {__version__}\n"
    assert run("--version").output == f"rankgate {__version__}\n"


def test_bad_usage_exits_with_2():
    assert run("serv").exit_code == 2
    assert run("serve", "--no-such").exit_code == 2
    assert run("check-config").exit_code == 2


def test_as_a_module():
    result = subprocess.run([sys.executable, "-m", "gateway", "version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"rankgate {__version__}\n"

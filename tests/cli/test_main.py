"""The command as a whole: what it loads, what it prints, how it exits."""

import subprocess
import sys

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

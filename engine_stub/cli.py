"""The `engine-stub` command: a group that finds its commands in `engine_stub.commands`."""

import importlib
from pathlib import Path

import click

COMMANDS = Path(__file__).with_name("commands")


class Commands(click.Group):
    """One module of `engine_stub.commands` per command, imported when it is named or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, sorted."""
        del ctx
        return sorted(path.stem for path in COMMANDS.glob("[a-z]*.py"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"engine_stub.commands.{cmd_name}").command
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Stub engine ranks that dial a gateway and speak TokenSpeed's or vLLM's wire."""

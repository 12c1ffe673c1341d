"""The `rankgate` command. Only click is imported here; each command imports what it needs when it runs.

Exit codes: 0 done, 1 it went wrong while running, 2 bad usage or configuration.
"""

import click

from gateway import __version__
from gateway.cli.check_config import check_config
from gateway.cli.explain import explain
from gateway.cli.ranks import ranks
from gateway.cli.serve import serve

__all__ = ["cli", "main"]


# No `auto_envvar_prefix`: it would let a stray variable set any option, `--rank` and thereby a pin included.
@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rankgate", message="%(prog)s %(version)s")
def cli() -> None:
    """Load-balancing gateway for data-parallel LLM engine ranks.

    RANKGATE_CONFIG names the configuration file for the commands that read one; what else the environment can set is
    shown in each command's help.
    """


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(f"rankgate {__version__}")


for _command in (serve, check_config, ranks, explain):
    cli.add_command(_command)


def main() -> None:
    """Run the command line; never returns."""
    cli(prog_name="rankgate")

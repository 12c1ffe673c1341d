"""`rankgate check-config`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gateway.cli.common import EXIT_USAGE, config_file, fail, named_file

if TYPE_CHECKING:
    from gateway.config.schema import Config


@click.command("check-config")
@config_file
@click.option("--fragment", is_flag=True, help="FILE holds some sections only, such as configs/policies/*.yaml.")
@click.option("--effective", is_flag=True, help="Print the whole configuration in force, as JSON.")
def check_config(file: Path | None, config_path: Path | None, fragment: bool, effective: bool) -> None:
    """Check FILE (or -c FILE) without starting anything.

    Exits with 0 and a summary, or with 2 and FILE:LINE:COL: message. Remarks on what is legal but may
    surprise go to stderr.
    """
    from gateway.config.effective import effective_config, remarks
    from gateway.config.loader import ConfigError, load_config, load_fragment

    path = named_file(file, config_path)
    try:
        config = load_fragment(path) if fragment else load_config(path)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    if effective:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(effective_config(config), order="sorted")).decode())
    else:
        click.echo(f"{path}: OK: {_summary(config, is_fragment=fragment)}")
    for remark in [] if fragment else remarks(config):
        click.echo(f"{path}: note: {remark}", err=True)


def _summary(config: "Config", *, is_fragment: bool) -> str:
    policy = f"policy {config.policy.preset}" if config.policy.preset else f"cost {config.policy.cost}"
    if is_fragment:
        return f"fragment, {policy}"
    total = sum(group.ranks for group in config.groups)
    groups, ranks = len(config.groups), f"{total} {config.groups[0].protocol} rank{'s' if total > 1 else ''}"
    mode = "" if config.scheduling.mode == "direct" else f", mode {config.scheduling.mode}"
    return f"model {config.model.name}, {ranks} in {groups} group{'s' if groups > 1 else ''}, {policy}{mode}"

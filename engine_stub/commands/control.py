"""`engine-stub control`: one request to the control socket of a running `serve`."""
# ruff: noqa: PLC0415 - imports that take time happen inside

import sys

import click


@click.command("control")
@click.argument(
    "op", type=click.Choice(["state", "telemetry", "effective-config", "events", "faults", "kill", "restart"])
)
@click.option("--address", required=True, metavar="ADDR", help="The control socket of `serve --control`.")
@click.option("--rank", type=click.IntRange(0), help="Rank in the process, from 0; without it: every rank.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A fault and its value (JSON); repeatable."
)
@click.option("--id", "request_id", metavar="ID", help="With `events`: of this request only.")
@click.option("--timeout-s", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True)
def command(
    op: str, address: str, rank: int | None, settings: tuple[str, ...], request_id: str | None, timeout_s: float
) -> None:
    """Look at, or break, the ranks of a running `serve`. Prints the reply as JSON."""
    import msgspec

    from engine_stub.control_client import ControlUnreachable, ask

    faults = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        try:
            faults[name] = msgspec.json.decode(value) if separator else True
        except msgspec.DecodeError:
            faults[name] = value
    try:
        reply = ask(address, {"op": op, "rank": rank, "set": faults, "id": request_id}, timeout_s)
    except ControlUnreachable as error:
        raise click.ClickException(str(error)) from error
    click.echo(msgspec.json.format(msgspec.json.encode(reply)))
    sys.exit(0 if reply["ok"] else 1)

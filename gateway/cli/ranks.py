"""`rankgate ranks`."""

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from gateway.cli.common import EXIT_RUNTIME, GRPC, Access, access_options, connect, fail, format_number, format_table

if TYPE_CHECKING:
    from google.protobuf.message import Message

_HEADER = (
    "RANK", "GROUP", "INDEX", "STATE", "JOINS", "IN-FLIGHT", "RUNNING", "WAITING", "FOREIGN", "KV", "AGE", "COST",
)  # fmt: skip
_LEFT = frozenset({1, 3})
_SERVICE = "/gateway.v1.GatewayService"
_CLEAR = "\x1b[H\x1b[2J"
Row = dict[str, object]


@click.command()
@click.option("--address", default="127.0.0.1:50051", show_default=True, envvar=GRPC.variable, show_envvar=True,
              metavar="HOST:PORT", help="listen.grpc of the gateway.")  # fmt: skip
@click.option("--watch", is_flag=True, help="Print again after each change, until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line; unknown values are null.")
@click.option("--timeout", default=5.0, show_default=True, metavar="SECONDS", help="Time to wait for the first answer.")
@access_options
def ranks(address: str, watch: bool, as_json: bool, timeout: float, **access: Any) -> None:
    """List every rank of a running gateway.

    What a rank has not reported is shown as `-`. COST is that of a one-token prompt.
    """
    import grpc

    from gateway.v1 import gateway_pb2

    with connect(address, Access(**access), GRPC) as (channel, metadata):
        if not watch:
            list_ranks = channel.unary_unary(
                f"{_SERVICE}/ListRanks",
                request_serializer=gateway_pb2.ListRanksRequest.SerializeToString,
                response_deserializer=gateway_pb2.ListRanksResponse.FromString,
            )
            answer = list_ranks(gateway_pb2.ListRanksRequest(), timeout=timeout, metadata=metadata)
            print_ranks(answer.ranks, as_json=as_json)
            return
        watch_ranks = channel.unary_stream(
            f"{_SERVICE}/WatchRanks",
            request_serializer=gateway_pb2.WatchRanksRequest.SerializeToString,
            response_deserializer=gateway_pb2.WatchRanksResponse.FromString,
        )
        try:
            # The stream itself has no deadline, so the wait for the connection is what is bounded.
            grpc.channel_ready_future(channel).result(timeout=timeout)
        except grpc.FutureTimeoutError:
            fail(f"error: {address}: no answer within {timeout:g} s; {GRPC.advice}", EXIT_RUNTIME)
        call = watch_ranks(gateway_pb2.WatchRanksRequest(), metadata=metadata)
        try:
            for response in call:
                print_ranks(response.ranks, as_json=as_json, clear=True)
        except KeyboardInterrupt:
            call.cancel()


def print_ranks(messages: "Iterable[Message]", *, as_json: bool, clear: bool = False) -> None:
    """Print one state of all ranks; `clear` replaces the one before on a terminal."""
    rows = [rank_row(message) for message in messages]
    if as_json:
        click.echo(json.dumps({"ranks": rows}))
        return
    if clear and sys.stdout.isatty():
        click.echo(_CLEAR, nl=False)
    click.echo(format_table(list(_HEADER), [_cells(row) for row in rows], _LEFT))


def rank_row(message: "Message") -> Row:
    """A `gateway.v1.Rank` as plain data with every key: null where nothing was sent, 0 where 0 was."""
    from gateway.v1.gateway_pb2 import RankState

    row: Row = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.name == "state":
            row["state"] = (
                RankState.Name(value).removeprefix("RANK_STATE_") if value in RankState.values() else str(value)
            )
        else:
            row[field.name] = value if message.HasField(field.name) else None
    return row


def _cells(row: Row) -> list[str]:
    kv_usage, age_ms = row["kv_usage"], row["snapshot_age_ms"]
    counts = [row[name] for name in ("in_flight", "running", "waiting", "foreign")]
    return [
        format_number(row["rank"]),
        str(row["group"] or "-"),
        format_number(row["group_rank"]),
        str(row["state"]),
        format_number(row["incarnation"]),
        *(format_number(count) for count in counts),
        f"{kv_usage:.1%}" if isinstance(kv_usage, float) else "-",
        f"{age_ms:.0f}ms" if isinstance(age_ms, float) else "-",
        format_number(row["cost"]),
    ]

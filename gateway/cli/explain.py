"""`rankgate explain`."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gateway.cli.common import (
    ADMIN,
    EXIT_RUNTIME,
    EXIT_USAGE,
    Access,
    access_options,
    config_option,
    connect,
    fail,
    format_number,
    format_table,
    load_config_or_exit,
)

if TYPE_CHECKING:
    from gateway.cli.offline import RequestFile

Rendered = dict[str, Any]

_TIMEOUT_S = 10.0
_NAME = re.compile(r"[a-z_]+")
_MAX_NAMED = 8


@click.command()
@config_option
@click.option(
    "--snapshot",
    "snapshot_path",
    metavar="FILE",
    help="State of the ranks (YAML or JSON), as `ranks --json` prints it; ranks that it leaves out are READY and idle.",
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    envvar=ADMIN.variable,
    show_envvar=True,
    help="Ask a running gateway (its listen.admin) instead.",
)
@click.option("--request", "request_path", metavar="FILE", help="The request (YAML or JSON); - reads stdin.")
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), metavar="N", help="Instead of --request: a prompt of N tokens."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), metavar="N", help="With --prompt-tokens: most tokens to generate."
)
@click.option("--rank", type=int, metavar="N", help="With --prompt-tokens: pin the request to this rank.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole decision as JSON.")
@access_options
def explain(
    config_path: Path | None,
    snapshot_path: str | None,
    address: str | None,
    request_path: str | None,
    prompt_tokens: int | None,
    max_tokens: int | None,
    rank: int | None,
    as_json: bool,
    **access: Any,
) -> None:
    """Show where a request would go: each rank's cost, and why it is or isn't eligible.

    Offline: explain -c FILE [--snapshot FILE] --request FILE. On a running gateway: explain --address
    HOST:PORT --prompt-tokens N. Nothing is sent to a rank. Where the choice among equals is random, the
    first of them is shown.
    """
    source_of = click.get_current_context().get_parameter_source
    is_offline = snapshot_path is not None or source_of("config_path") is ParameterSource.COMMANDLINE
    if is_offline and source_of("address") is ParameterSource.ENVIRONMENT:
        address = None  # what the command line says is meant for this call; the environment is for all
    if address is not None and snapshot_path is not None:
        raise click.UsageError("give either --snapshot FILE (offline) or --address HOST:PORT (a running gateway)")
    if (request_path is None) == (prompt_tokens is None):
        raise click.UsageError("give either --request FILE or --prompt-tokens N")
    request = _request(request_path, prompt_tokens, max_tokens, rank)
    if address is not None:
        decision = _ask(address, Access(**access), request)
    elif config_path is None:
        raise click.UsageError(
            "name the configuration file with -c FILE or RANKGATE_CONFIG (offline),"
            " or a running gateway with --address HOST:PORT"
        )
    else:
        decision = _decide(config_path, snapshot_path, request)
    click.echo(json.dumps(decision) if as_json else render(decision))


def _request(path: str | None, prompt_tokens: int | None, max_tokens: int | None, rank: int | None) -> "RequestFile":
    from gateway.cli.offline import RequestFile, read_request
    from gateway.config.errors import ConfigError

    if path is None:
        return RequestFile(prompt_tokens=prompt_tokens, max_tokens=max_tokens, data_parallel_rank=rank)
    if max_tokens is not None or rank is not None:
        raise click.UsageError("--max-tokens and --rank go with --prompt-tokens; put them into the request file")
    try:
        return read_request(*_text(path))
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)


def _decide(config_path: Path, snapshot_path: str | None, request: "RequestFile") -> Rendered:
    from gateway.cli.offline import SnapshotFile, decide, read_snapshot
    from gateway.config.errors import ConfigError
    from gateway.core.errors import GatewayError

    config = load_config_or_exit(config_path)
    try:
        if snapshot_path is None:
            # Said because it could be taken for the state of a gateway that runs with this file.
            click.echo("note: without --snapshot, every rank is READY and idle", err=True)
            snapshot = SnapshotFile(ranks=())
        else:
            snapshot = read_snapshot(*_text(snapshot_path), sum(group.ranks for group in config.groups))
        return decide(config, snapshot, request).render()
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    except GatewayError as error:
        fail(f"refused: {error.reason}: {error.message}", EXIT_RUNTIME)


def _text(path: str) -> tuple[str, str]:
    """Contents and name of a file; `-` is stdin. Raises `ConfigError`."""
    from gateway.config.document import MAX_FILE_BYTES, decode_text, read_text

    if path == "-":
        return decode_text(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), "<stdin>"), "<stdin>"
    return read_text(Path(path)), path


def _ask(address: str, access: Access, request: "RequestFile") -> Rendered:
    from google.protobuf.json_format import MessageToDict

    from gateway.v1 import admin_pb2, gateway_pb2

    prompt = request.prompt_token_ids if request.prompt_token_ids is not None else (0,) * (request.prompt_tokens or 1)
    message = gateway_pb2.GenerateRequest(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        sampling=gateway_pb2.Sampling(max_tokens=request.max_tokens),
        data_parallel_rank=request.data_parallel_rank,
        priority=request.priority,
        model=request.model,
    )
    with connect(address, access, ADMIN) as (channel, metadata):
        call = channel.unary_unary(
            "/gateway.v1.AdminService/Explain",
            request_serializer=admin_pb2.ExplainRequest.SerializeToString,
            response_deserializer=admin_pb2.ExplainResponse.FromString,
        )
        response = call(admin_pb2.ExplainRequest(request=message), timeout=_TIMEOUT_S, metadata=metadata)
    return MessageToDict(response.decision)


def render(decision: Rendered) -> str:
    """A decision as a table with a line above it that says what was chosen."""
    # In the formula's order: the order in the rows is lost on the way from a running gateway.
    used = {name for row in decision["ranks"] for name in row["variables"]}
    names = [name for name in dict.fromkeys(_NAME.findall(decision["cost"] or "")) if name in used]
    chosen = decision["rank"]
    # Only where requests are queued is there a gate; a gateway of an earlier version says nothing of it.
    gates = ["gate"] if decision.get("queue") is not None else []
    rows = [
        [
            "*" if row["rank"] == chosen else "",
            format_number(row["rank"]),
            format_number(row["cost"]),
            *(format_number(row["variables"].get(name)) for name in names),
            *(str(row[key] or "-") for key in gates),
            row["reason"],
        ]
        for row in decision["ranks"]
    ]
    header = ["", "RANK", "COST", *names, *(key.upper() for key in gates), "REASON"]
    left = frozenset({0, *range(len(header) - 1 - len(gates), len(header))})
    return f"{_headline(decision)}\n\n{format_table(header, rows, left)}"


def _headline(decision: Rendered) -> str:
    request = decision["request"]
    policy = decision["preset"] or "custom"
    lines = [
        f"policy   {policy}: {decision['picker']}" + (f" of {decision['cost']}" if decision["cost"] else ""),
        f"request  {format_number(request['prompt_tokens'])} + {format_number(request['max_tokens'])} tokens at most",
    ]
    prediction = decision.get("prediction")
    if prediction is not None:
        lines.append(f"prefill  {format_number(prediction['predicted_ms'])} ms predicted")
    if decision["pinned_rank"] is not None:
        lines.append(f"pinned   to rank {format_number(decision['pinned_rank'])}")
    if decision["relaxed"]:
        lines.append(f"relaxed  {', '.join(decision['relaxed'])}")
    if decision["rank"] is None:
        lines.append(f"refused  {decision['refusal']}")
    else:
        ties = int(decision["ties"])
        among = f", one of {ties} equals ({decision['tie_break']})" if ties > 1 else ""
        lines.append(_outcome(decision, f"rank {format_number(decision['rank'])}{among}"))
    return "\n".join(lines)


def _outcome(decision: Rendered, chosen: str) -> str:
    """What becomes of the request now. The policy chooses by cost; a gateway that queues sends to open gates only."""
    gates = {row["rank"]: row["gate"] for row in decision["ranks"] if row["reason"] == "eligible" and row.get("gate")}
    if gates.get(decision["rank"], "open") == "open":
        return f"chosen   {chosen}"
    is_open = [format_number(rank) for rank, gate in gates.items() if gate == "open"]
    if is_open:
        more = ", ..." if len(is_open) > _MAX_NAMED else ""
        first = f"now to one whose gate is open: {', '.join(is_open[:_MAX_NAMED])}{more}"
        return f"chosen   {chosen} if its gate were open ({gates[decision['rank']]}); {first}"
    shut = ", ".join(f"{count} {gate}" for gate, count in Counter(gates.values()).most_common())
    return f"queued   no gate is open ({shut}); {chosen} if it were"

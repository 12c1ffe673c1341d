"""Rules that involve more than one key, or that no type can state.

Each check yields problems in the order in which the file is read; the loader reports the first one
with its position.
"""

import ipaddress
import os.path
from collections.abc import Iterator
from pathlib import Path

from gateway.config.addresses import (
    MAX_IPC_PATH_BYTES,
    Address,
    check_ipc_path,
    is_wildcard,
    parse_address,
    rank_socket_bytes,
)
from gateway.config.errors import Loc, Problem, format_loc
from gateway.config.failure import Failure
from gateway.config.scheduling_checks import check_scheduling
from gateway.config.schema import Config, Coordinator, Group, Listen, Sockets
from gateway.core.formula import FormulaError
from gateway.core.presets import PolicyError, resolve

MAX_RANKS = 1024
_INDEX_LIMIT = 65536
"""An engine's identity on the wire is its index in two bytes."""
_LISTENERS = ("grpc", "admin", "metrics")


def check(config: Config) -> Iterator[Problem]:
    """Yield every problem of a configuration whose types are right."""
    yield from _check_addresses(config)
    yield from _check_auth(config)
    yield from _check_flushing(config)
    yield from _check_model(config)
    yield from _check_groups(config)
    for number, group in enumerate(config.groups):
        yield from _check_group(group, ("groups", number))
    yield from _check_processes(config)
    yield from _check_socket_paths(config)
    yield from _check_policy(config)
    yield from _check_failure(config)
    yield from check_scheduling(config)


def _check_addresses(config: Config) -> Iterator[Problem]:
    """Every address is well formed, bindable without surprise, and used once."""
    bound: dict[Loc, Address] = {}
    paths: dict[str, Loc] = {}
    for name in _LISTENERS:
        text: str | None = getattr(config.listen, name)
        if text is not None:
            yield from _check_address(config.listen, ("listen", name), text, bound)
    for number, group in enumerate(config.groups):
        loc: Loc = ("groups", number, "handshake")
        scheme, _, rest = group.handshake.partition("://")
        if scheme == "ipc":
            path = os.path.normpath(rest)
            try:
                check_ipc_path(rest)
            except ValueError as error:
                yield Problem(loc, str(error))
            if path in paths:
                yield Problem(loc, f"{rest} is already taken by {format_loc(paths[path])}")
            paths[path] = loc
            continue
        yield from _check_address(config.listen, loc, rest, bound)


def _check_address(listen: Listen, loc: Loc, text: str, bound: dict[Loc, Address]) -> Iterator[Problem]:
    try:
        address = parse_address(text)
    except ValueError as error:
        yield Problem(loc, str(error))
        return
    if is_wildcard(address.host) and not listen.allow_wildcard:
        yield Problem(
            loc, f"{text} opens every network interface; name one address, or set listen.allow_wildcard: true"
        )
    elif address.host == "*" and loc[0] == "listen":
        yield Problem(loc, "only handshakes know *; write 0.0.0.0 or [::]")
    for other, taken in bound.items():
        if address.clashes(taken):
            yield Problem(loc, f"{text} is already taken by {format_loc(other)}")
    bound[loc] = address


def _check_auth(config: Config) -> Iterator[Problem]:
    auth = config.listen.auth
    if auth is not None and auth.admin_tokens_file is not None:
        names = {os.path.normpath(name) for name in (auth.tokens_file, auth.admin_tokens_file)}
        if len(names) == 1:
            yield Problem(
                ("listen", "auth", "admin_tokens_file"),
                "this is tokens_file as well: every client would be an operator; use two files",
            )


def _check_flushing(config: Config) -> Iterator[Problem]:
    interval, delay_ms = config.listen.stream_interval_tokens, config.listen.max_flush_delay_ms
    if interval > 1 and not delay_ms:
        yield Problem(
            ("listen", "stream_interval_tokens"),
            f"with {interval}, set max_flush_delay_ms as well: else a slow sequence's tokens could wait for ever",
        )
    elif delay_ms and interval == 1:
        yield Problem(
            ("listen", "max_flush_delay_ms"),
            "'max_flush_delay_ms' has no effect with stream_interval_tokens 1; leave it out",
            at_key=True,
        )


def _check_model(config: Config) -> Iterator[Problem]:
    seen: set[int] = set()
    for index, token_id in enumerate(config.model.eos_token_ids):
        loc: Loc = ("model", "eos_token_ids", index)
        if token_id >= config.model.vocab_size:
            yield Problem(loc, f"token id {token_id} is not below vocab_size, {config.model.vocab_size}")
        if token_id in seen:
            yield Problem(loc, f"token id {token_id} is listed twice")
        seen.add(token_id)


def _check_groups(config: Config) -> Iterator[Problem]:
    first = config.groups[0]
    names: dict[str, int] = {}
    total = 0
    for number, group in enumerate(config.groups):
        if group.protocol != first.protocol:
            yield Problem(
                ("groups", number, "protocol"),
                f"group '{group.name}' speaks {group.protocol}, group '{first.name}' {first.protocol}: the groups of one"
                " gateway share a protocol, because requests are checked and answered by one engine family's rules",
            )
        if group.name in names:
            yield Problem(("groups", number, "name"), f"groups[{names[group.name]}] is already called '{group.name}'")
        names.setdefault(group.name, number)
        total += group.ranks
        if total > MAX_RANKS:
            yield Problem(("groups", number, "ranks"), f"{total} ranks up to here; a gateway takes at most {MAX_RANKS}")


def _check_processes(config: Config) -> Iterator[Problem]:
    processes, place = config.processes, ("processes",)
    if processes == 1:
        return
    ranks = sum(group.ranks for group in config.groups)
    if config.listen.transport != "fast":
        yield Problem(place, f"{processes} processes share listen.grpc, which listen.transport: fast can")
    elif any(group.coupled for group in config.groups):
        yield Problem(place, "the ranks of a coupled group step together, and one process has to see all of it: use 1")
    elif config.groups[0].protocol == "tokenspeed" and processes > ranks:
        yield Problem(
            place, f"a TokenSpeed rank speaks to one process, so {ranks} ranks take at most {ranks} processes"
        )


def _check_group(group: Group, loc: Loc) -> Iterator[Problem]:
    if group.min_ready > group.ranks:
        yield Problem((*loc, "min_ready"), f"min_ready is {group.min_ready}, but the group has {group.ranks} ranks")
    if (end := group.start_index + group.ranks) > _INDEX_LIMIT:
        yield Problem(
            (*loc, "start_index"), f"the last engine index would be {end - 1}; the largest is {_INDEX_LIMIT - 1}"
        )
    yield from _check_coordinator(group, (*loc, "coordinator"))
    sockets, place = group.sockets, (*loc, "sockets")
    if sockets.transport == "ipc":
        if sockets.host != Sockets().host:
            yield Problem((*place, "host"), "'host' has no effect with transport ipc; leave it out", at_key=True)
        return
    if sockets.dir is not None:
        yield Problem((*place, "dir"), "'dir' has no effect with transport tcp; leave it out", at_key=True)
    host = sockets.host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        yield Problem((*place, "host"), f"'{sockets.host}' is not an IP address; the ranks are told it as it stands")
        return
    if is_wildcard(host):
        yield Problem(
            (*place, "host"),
            f"{sockets.host} is announced to the ranks, which can't dial it; name an address of this host",
        )


def _check_socket_paths(config: Config) -> Iterator[Problem]:
    """The ranks' sockets have paths that the system can bind. Where they are in a temporary directory, they do."""
    for number, group in enumerate(config.groups):
        if group.sockets.transport != "ipc":
            continue
        if group.sockets.dir is not None:
            place: Loc = ("groups", number, "sockets", "dir")
            directory = Path(group.sockets.dir)
        elif config.state_dir is not None:
            place = ("state_dir",)
            # Each of several processes has a directory of its own below it.
            own = f"{config.processes}-processes/{config.processes - 1}" if config.processes > 1 else ""
            directory = Path(config.state_dir, own, "sockets")
        else:
            continue
        length = rank_socket_bytes(directory, number, group.ranks)
        if length > MAX_IPC_PATH_BYTES:
            yield Problem(
                place,
                f"paths of the ranks' sockets would have {length} bytes, and the system takes {MAX_IPC_PATH_BYTES};"
                " use a shorter directory",
            )


def _check_coordinator(group: Group, place: Loc) -> Iterator[Problem]:
    coordinator = group.coordinator
    if group.protocol != "vllm":
        if coordinator != Coordinator():
            yield Problem(place, f"{group.protocol} ranks have no coordinator; leave it out", at_key=True)
        return
    if group.coupled and not coordinator.enabled:
        yield Problem(
            (*place, "enabled"), "coupled vLLM ranks sleep and wake together; without a coordinator nobody wakes them"
        )
    host = coordinator.meeting_host
    if host is None:
        return
    if not group.coupled:
        yield Problem((*place, "meeting_host"), "ranks that are not coupled don't meet; leave it out", at_key=True)
        return
    try:
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        yield Problem((*place, "meeting_host"), f"'{host}' is not an IP address; the ranks are told it as it stands")
        return
    if ip.is_unspecified:
        yield Problem((*place, "meeting_host"), f"{host} can't be dialled; name an address of the first rank's host")


def _check_policy(config: Config) -> Iterator[Problem]:
    policy = config.policy
    if policy.preset is None and policy.cost is None:
        yield Problem(("policy",), "set 'preset' or 'cost'", at_key=True)
        return
    if policy.preset is not None and policy.cost is not None:
        yield Problem(("policy", "cost"), "set either 'preset' or 'cost', not both", at_key=True)
    try:
        resolve(policy)
    except FormulaError as error:
        yield Problem(("policy", "cost"), error.message, offset=error.column - 1)
    except PolicyError as error:
        yield Problem(("policy", "picker"), str(error))


def _check_failure(config: Config) -> Iterator[Problem]:
    failure = config.failure
    if not (failure.reroute or failure.resume) and failure.max_attempts != Failure().max_attempts:
        yield Problem(
            ("failure", "max_attempts"),
            "'max_attempts' has no effect with reroute and resume off; switch one of them on, or leave it out",
            at_key=True,
        )
    eject = failure.eject
    if eject is not None and eject.base_s > eject.max_s:
        yield Problem(("failure", "eject", "base_s"), f"base_s is {eject.base_s:g}, above max_s, {eject.max_s:g}")

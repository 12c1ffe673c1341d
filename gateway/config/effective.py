"""What a configuration comes to: every default filled in, and remarks that help to read it."""

from collections.abc import Iterator

import msgspec
from msgspec import structs

from gateway.config.addresses import is_loopback, parse_address, parse_tcp
from gateway.config.scheduling import Scheduling
from gateway.config.scheduling_remarks import scheduling_remarks
from gateway.config.schema import Config, Group, Listen
from gateway.core.presets import resolve
from gateway.types import FAMILIES

JsonObject = dict[str, object]


def effective_config(config: Config) -> JsonObject:
    """Every setting in force, JSON-safe, and itself a valid configuration file.

    What follows from other settings is written out; `null` stays where it means unlimited, off or
    decided at run time.
    """
    groups = tuple(
        structs.replace(group, load_semantics=group.load_semantics or FAMILIES[group.protocol].load_semantics)
        for group in config.groups
    )
    resolved = resolve(config.policy)
    policy = structs.replace(
        config.policy,
        picker=resolved.picker,
        tie_break=resolved.tie_break,
        objective=resolved.objective,
        tie_tolerance=resolved.tie_tolerance,
    )
    scheduling = _effective_scheduling(config.scheduling)
    result: JsonObject = msgspec.to_builtins(
        structs.replace(config, groups=groups, policy=policy, scheduling=scheduling)
    )
    return result


def _effective_scheduling(scheduling: Scheduling) -> Scheduling:
    """What the queue's nulls come to. In mode direct they stay: there, keys of the queue are refused."""
    if scheduling.mode == "direct":
        return scheduling
    queue = scheduling.queue
    levels = tuple(
        structs.replace(
            level,
            timeout_s=queue.timeout_s if level.timeout_s is None else level.timeout_s,
            timeout_action=level.timeout_action or queue.timeout_action,
        )
        for level in queue.levels
    )
    # Costs of this version know of no cached prefixes.
    hold_ratio = 0.0 if queue.hold_ratio is None else queue.hold_ratio
    return structs.replace(scheduling, queue=structs.replace(queue, levels=levels, hold_ratio=hold_ratio))


def remarks(config: Config) -> list[str]:
    """What helps to read a configuration: how ranks are numbered, then `cautions`. One sentence each."""
    return [*_rank_numbers(config), *_processes(config), *cautions(config)]


def cautions(config: Config) -> list[str]:
    """Legal settings that may surprise, one sentence each; worth a warning when the gateway starts."""
    return [
        *(*_exposure(config), *_readiness(config), *_limits(config)),
        *(*_ejection(config), *scheduling_remarks(config)),
    ]


def _exposure(config: Config) -> Iterator[str]:
    for name in ("grpc", "admin", "metrics"):
        address = getattr(config.listen, name)
        if address is not None and not is_loopback(parse_address(address).host):
            yield from _open_to_others(config.listen, name, address)
    auth = config.listen.auth
    if auth is not None and auth.admin_tokens_file is None:
        yield "listen.auth has no admin_tokens_file: every call on listen.admin but health is refused"
    for group in config.groups:
        if group.handshake.startswith("tcp://"):
            host, port = parse_tcp(group.handshake)
            if not port:
                yield f"group {group.name}: handshake port 0 is another free port at every start"
            if not is_loopback(host):
                yield from _unreachable_sockets(group)


def _unreachable_sockets(group: Group) -> Iterator[str]:
    """What keeps ranks on other hosts, which can dial the handshake, from joining."""
    sockets, here = group.sockets, f"group {group.name}: ranks may dial {group.handshake} from other hosts"
    if sockets.transport == "ipc":
        yield f"{here}, but sockets.transport ipc serves ranks on this host only"
    elif is_loopback(sockets.host.removeprefix("[").removesuffix("]")):
        yield (
            f"{here}, but are told to connect to sockets.host {sockets.host}; set it to an address that they can reach"
        )


def _open_to_others(listen: Listen, name: str, address: str) -> Iterator[str]:
    """What a listener lacks that other hosts can reach."""
    here = f"listen.{name} {address} is reachable from other hosts"
    tls, auth = listen.tls, listen.auth
    if tls is None:
        yield f"{here} in plaintext, " + (
            "and anyone there may call; set listen.tls and listen.auth"
            if auth is None
            else "tokens included; set listen.tls"
        )
    elif auth is None and tls.client_ca_file is None:
        yield f"{here}, and anyone there may call; set listen.auth or listen.tls.client_ca_file"
    elif auth is None and name == "admin":
        yield f"{here}, and every client with a certificate is an operator; set listen.auth.admin_tokens_file"


def _rank_numbers(config: Config) -> Iterator[str]:
    if len(config.groups) > 1:
        first = 0
        for group in config.groups:
            yield f"group {group.name} has ranks {first} to {first + group.ranks - 1}"
            first += group.ranks


def _processes(config: Config) -> Iterator[str]:
    if config.processes > 1:
        ranks = "has every rank" if config.groups[0].protocol == "vllm" else "has its part of the ranks"
        yield (
            f"each of the {config.processes} processes {ranks}, and admission, limits, the queue, the preserved order and"
            " the response cache are each process's own"
        )


def _readiness(config: Config) -> Iterator[str]:
    if all(group.min_ready == 0 for group in config.groups):
        yield "every min_ready is 0: the gateway reports ready before any rank has joined"


def _limits(config: Config) -> Iterator[str]:
    admission, total = config.admission, sum(group.ranks for group in config.groups)
    per_rank = admission.max_in_flight_per_rank
    # What is queued counts too, and so does what waits for another one's answer.
    waits = config.scheduling.mode != "direct" or (config.response_cache is not None and config.response_cache.coalesce)
    if per_rank is not None and per_rank * total < admission.max_in_flight and not waits:
        yield (
            f"admission.max_in_flight {admission.max_in_flight} is never reached:"
            f" {total} ranks x max_in_flight_per_rank {per_rank} = {total * per_rank}"
        )
    shares = config.gateways > 1 or (config.processes > 1 and config.groups[0].protocol == "vllm")
    if shares and resolve(config.policy).tie_break == "first":
        yield "with several gateways, tie_break first sends all of them to the same rank"


def _ejection(config: Config) -> Iterator[str]:
    eject = config.failure.eject
    for group in config.groups if eject is not None else ():
        # A sole rank is never ejected, whatever the ratio.
        if eject is not None and group.ranks > 1 and not group.coupled and eject.max_ratio * group.ranks < 1 - 1e-9:
            yield (
                f"failure.eject.max_ratio {eject.max_ratio} of the {group.ranks} ranks of group {group.name} is none:"
                " a rank that fails again and again keeps getting work"
            )

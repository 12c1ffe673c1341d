"""What a configuration comes to: every default filled in, and remarks that help to read it."""

from collections.abc import Iterator

import msgspec
from msgspec import structs

from gateway.config.addresses import is_loopback, parse_address, parse_tcp
from gateway.config.schema import Config
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
    result: JsonObject = msgspec.to_builtins(structs.replace(config, groups=groups, policy=policy))
    return result


def remarks(config: Config) -> list[str]:
    """Legal settings that may surprise, one sentence each."""
    return [*_exposure(config), *_ranks(config), *_limits(config)]


def _exposure(config: Config) -> Iterator[str]:
    if not is_loopback(parse_address(config.listen.admin).host):
        yield f"listen.admin {config.listen.admin} is reachable from other hosts, and admin calls are not authenticated"
    for group in config.groups:
        if group.handshake.startswith("tcp://"):
            host, port = parse_tcp(group.handshake)
            if not port:
                yield f"group {group.name}: handshake port 0 is another free port at every start"
            if not is_loopback(host) and group.sockets.transport == "ipc":
                yield (
                    f"group {group.name}: ranks may dial {group.handshake} from other hosts, but sockets.transport ipc"
                    " serves ranks on this host only"
                )


def _ranks(config: Config) -> Iterator[str]:
    if len(config.groups) > 1:
        first = 0
        for group in config.groups:
            yield f"group {group.name} has ranks {first} to {first + group.ranks - 1}"
            first += group.ranks
    if all(group.min_ready == 0 for group in config.groups):
        yield "every min_ready is 0: the gateway reports ready before any rank has joined"


def _limits(config: Config) -> Iterator[str]:
    admission, total = config.admission, sum(group.ranks for group in config.groups)
    per_rank = admission.max_in_flight_per_rank
    if per_rank is not None and per_rank * total < admission.max_in_flight:
        yield (
            f"admission.max_in_flight {admission.max_in_flight} is never reached:"
            f" {total} ranks x max_in_flight_per_rank {per_rank} = {total * per_rank}"
        )
    if config.gateways > 1 and resolve(config.policy).tie_break == "first":
        yield "with several gateways, tie_break first sends all of them to the same rank"

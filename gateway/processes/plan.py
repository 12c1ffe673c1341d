"""Who does what: each process's share of one configuration. Pure.

vLLM ranks answer several front ends, each on sockets of its own: every process sees every rank, as gateways that share
ranks do. TokenSpeed ranks speak to one front end: each rank belongs to one process. All processes number the ranks alike,
so pins, metrics and decisions name the same rank everywhere.
"""

from pathlib import Path

from msgspec import structs

from gateway.config.schema import Config, Coordinator, Group

PRIVATE_ADMIN = "127.0.0.1:0"
"""Operators call the first process; the others' listeners are only there."""


def shares_ranks(config: Config) -> bool:
    """Whether every process sees every rank."""
    return config.groups[0].protocol == "vllm"


def owner_of(rank: int, processes: int) -> int:
    """The process that a rank belongs to. Ranks that come at the end of the list move none of the others."""
    return rank % processes


def owned_ranks(config: Config, process: int) -> frozenset[int] | None:
    """The ranks that only this process has; None where all have all."""
    if shares_ranks(config):
        return None
    ranks = range(ranks_of(config))
    return frozenset(rank for rank in ranks if owner_of(rank, config.processes) == process)


def ranks_of(config: Config) -> int:
    """How many ranks there are."""
    return sum(group.ranks for group in config.groups)


def rank_at(config: Config, number: int, place: int) -> int:
    """The number, through all groups, of the rank at a place of group `number`."""
    return sum(group.ranks for group in config.groups[:number]) + place


def processes_of(config: Config, number: int, place: int) -> tuple[int, ...]:
    """The processes that answer the rank at a place of group `number`, in the order of their client indexes."""
    if shares_ranks(config):
        return tuple(range(config.processes))
    return (owner_of(rank_at(config, number, place), config.processes),)


def handshake_address(directory: Path, number: int, process: int) -> str:
    """Where a process takes the handshakes of group `number`, which the supervisor passes on."""
    return f"ipc://{directory}/h{number}-{process}"


def state_dir(config: Config, directory: Path, process: int) -> str:
    """Where a process keeps what it re-attaches by. A rank knows how many processes there are: others begin anew."""
    if config.state_dir is None:
        return str(directory / f"state-{process}")
    return str(Path(config.state_dir) / f"{config.processes}-processes" / str(process))


def share_of(config: Config, process: int, directory: Path) -> Config:
    """The configuration that a process runs with. `directory` is the supervisor's own."""
    is_shared = shares_ranks(config)
    listen = structs.replace(config.listen, metrics=None, admin=PRIVATE_ADMIN if process else config.listen.admin)
    groups = tuple(
        _group(config, number, group, process, handshake_address(directory, number, process))
        for number, group in enumerate(config.groups)
    )
    return structs.replace(
        config,
        listen=listen,
        groups=groups,
        gateways=config.gateways * config.processes if is_shared else config.gateways,
        state_dir=state_dir(config, directory, process),
    )


def _group(config: Config, number: int, group: Group, process: int, handshake: str) -> Group:
    if shares_ranks(config):
        # A rank has one coordinator, so only one process hears of every change; the others go by what comes with tokens.
        coordinator = group.coordinator if not process else Coordinator(enabled=False)
        return structs.replace(group, handshake=handshake, coordinator=coordinator)
    own = sum(process in processes_of(config, number, place) for place in range(group.ranks))
    # Rounded up: a process isn't ready with fewer of its ranks than the whole would be with fewer of all.
    min_ready = -(-group.min_ready * own // group.ranks)
    return structs.replace(group, handshake=handshake, min_ready=min_ready)

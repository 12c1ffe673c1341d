"""What goes wrong when: a schedule of faults that follows from its seed alone."""

import random
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

HEAD_S = 5.0
"""Nothing goes wrong before: there is something to compare with."""
TAIL_S = 3.0
"""The last faults begin this long before the load ends."""
REST_S = 1.5
"""What a rank gets to come back before the next fault may hit it."""
MAX_DISTURBED = 4
"""Ranks that faults hold at a time; storms come on top."""

NOISE_KINDS = ("noise", "foreign_tag", "empty")
REPLACED_KINDS = {"vllm": ("truncate", "ragged"), "tokenspeed": ("truncate", "ragged", "replace")}
"""What takes a batch's place. vLLM's rows carry no counts: a batch that is gone without a trace is not missed there."""
LOAD_FAULTS = ("drop", "negative", "float", "text", "short", "overfull")


class Kind(StrEnum):
    """What can go wrong."""

    KILL = "kill"
    STOP = "stop"
    STORM = "storm"
    FREEZE = "freeze"
    FREEZE_LONG = "freeze_long"
    CUT = "cut"
    STALL = "stall"
    BLACK_HOLE = "black_hole"
    NOISE = "noise"
    REPLACED = "replaced"
    MISCOUNT = "miscount"
    LYING_LOAD = "lying_load"
    DEAF_TO_ABORTS = "deaf_to_aborts"
    DRAIN = "drain"
    SLOW_READER = "slow_reader"
    DISCONNECT = "disconnect"
    BURST = "burst"
    PAUSE = "pause"
    CLOCK = "clock"
    RELOAD = "reload"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong: from `at_s` after the load began, for `duration_s`."""

    number: int
    at_s: float
    kind: Kind
    ranks: tuple[int, ...] = ()
    duration_s: float = 0.0
    detail: dict[str, Any] = {}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a schedule depends on beside its seed."""

    duration_s: float
    protocol: str
    ranks: int = 6
    connections: int = 6
    mean_gap_s: float = 1.8
    silence_s: float = 2.0
    """After so long without a sign of life the gateway takes a busy rank for lost."""
    kinds: frozenset[Kind] = frozenset(Kind)


Draw = Callable[[random.Random, Settings], tuple[float, dict[str, Any]]]


def _lasting(least_s: float, most_s: float, **choices: tuple[Any, ...]) -> Draw:
    """A duration within bounds, and one of each choice."""

    def draw(source: random.Random, _: Settings) -> tuple[float, dict[str, Any]]:
        duration = round(source.uniform(least_s, most_s), 3)
        return duration, {name: source.choice(values) for name, values in choices.items()}

    return draw


def _silent(source: random.Random, settings: Settings) -> tuple[float, dict[str, Any]]:
    return round(settings.silence_s + source.uniform(0.8, 3.0), 3), {}


def _replaced(source: random.Random, settings: Settings) -> tuple[float, dict[str, Any]]:
    kinds = REPLACED_KINDS[settings.protocol]
    return round(source.uniform(0.3, 1.0), 3), {"garbage": source.choice(kinds), "every": source.choice((5, 11, 23))}


def _miscount(source: random.Random, _: Settings) -> tuple[float, dict[str, Any]]:
    """A count that doesn't fit; TokenSpeed only, whose rows carry counts."""
    name = source.choice(("drop_tokens_every", "duplicate_every", "reorder_every"))
    return round(source.uniform(0.5, 1.5), 3), {"fault": name, "every": source.randint(3, 20)}


BROKEN_FILE = "a broken file"
WAYS = ("both", "to_gateway", "to_rank")
SIDES = ("both", "both", "rank", "gateway")
_OF_RANKS: dict[Kind, tuple[int, Draw]] = {
    Kind.KILL: (6, _lasting(0.1, 2.0)),
    Kind.STOP: (2, _lasting(0.1, 1.0)),
    Kind.STORM: (1, _lasting(0.0, 0.4, rounds=(2, 3))),
    Kind.FREEZE: (4, _lasting(0.05, 0.8)),
    Kind.FREEZE_LONG: (3, _silent),
    Kind.CUT: (5, _lasting(0.0, 0.0, share=(0.5, 1.0, 1.0), side=SIDES)),
    Kind.STALL: (4, _lasting(0.1, 1.2, way=WAYS)),
    Kind.BLACK_HOLE: (2, _lasting(5.5, 7.0, way=WAYS)),
    Kind.NOISE: (3, _lasting(0.5, 2.0, garbage=NOISE_KINDS, every=(2, 5, 11))),
    Kind.REPLACED: (3, _replaced),
    Kind.MISCOUNT: (3, _miscount),
    Kind.LYING_LOAD: (2, _lasting(0.5, 2.0, load=LOAD_FAULTS)),
    Kind.DEAF_TO_ABORTS: (1, _lasting(1.0, 2.0, ignored=(1, 3, 10))),
    Kind.DRAIN: (2, _lasting(0.3, 2.0, migrate=(False, True))),
}
"""Weight, and how long and what else."""
_OF_OTHERS: dict[Kind, tuple[int, Draw]] = {
    Kind.SLOW_READER: (2, _lasting(4.0, 8.0, rpc=("generate", "many"))),
    Kind.DISCONNECT: (4, _lasting(0.0, 0.0, abrupt=(False, True))),
    Kind.BURST: (3, _lasting(0.0, 0.0, count=(150, 250, 400))),
    Kind.PAUSE: (2, _lasting(0.05, 0.6)),
    Kind.CLOCK: (2, _lasting(0.0, 0.0, jump_s=(-86_400.0, -30.0, 30.0, 3_600.0, 86_400.0))),
    Kind.RELOAD: (2, _lasting(0.3, 1.0, to=("lmetric", "p2c", "least_in_flight", BROKEN_FILE))),
}


def choose(seed: int, *choices: tuple[str, ...]) -> tuple[str, ...]:
    """One of each: what a run has that names none. Each seed has its own."""
    source = random.Random(f"seed {seed}")
    return tuple(source.choice(names) for names in choices)


def make_plan(seed: int, settings: Settings) -> list[Fault]:
    """The faults of a run in order. Equal arguments give equal plans."""
    source = random.Random(f"plan-{seed}")
    kinds = _weights(settings)
    busy_until = [0.0] * settings.ranks
    faults: list[Fault] = []
    at_s = HEAD_S
    while at_s < settings.duration_s - TAIL_S and kinds:
        fault = _draw(source, settings, kinds, busy_until, len(faults), round(at_s, 3))
        if fault is not None:
            faults.append(fault)
            for rank in fault.ranks:
                busy_until[rank] = fault.at_s + fault.duration_s * fault.detail.get("rounds", 1) + REST_S
        at_s += settings.mean_gap_s * source.uniform(0.3, 1.7)
    return faults


def _weights(settings: Settings) -> dict[Kind, int]:
    """What may be drawn, and how often."""
    found = {kind: weight for kind, (weight, _) in (_OF_RANKS | _OF_OTHERS).items() if kind in settings.kinds}
    if settings.protocol != "tokenspeed":
        found.pop(Kind.MISCOUNT, None)
    return found


def _draw(
    source: random.Random,
    settings: Settings,
    kinds: dict[Kind, int],
    busy_until: list[float],
    number: int,
    at_s: float,
) -> Fault | None:
    free = [rank for rank, until in enumerate(busy_until) if until <= at_s]
    disturbed = settings.ranks - len(free)
    allowed = [kind for kind in kinds if kind in _OF_OTHERS or (free and disturbed < MAX_DISTURBED)]
    if not allowed:
        return None
    kind = source.choices(allowed, [kinds[each] for each in allowed])[0]
    _, draw = (_OF_RANKS | _OF_OTHERS)[kind]
    duration_s, detail = draw(source, settings)
    ranks: tuple[int, ...] = ()
    if kind is Kind.STORM:
        ranks = tuple(sorted(source.sample(free, min(len(free), source.randint(2, 4)))))
    elif kind in _OF_RANKS:
        ranks = (source.choice(free),)
    elif kind is Kind.DISCONNECT:
        detail["connection"] = source.randrange(settings.connections)
    # A fault of a rank is over before the load ends, so that what follows from it is seen.
    return Fault(number=number, at_s=at_s, kind=kind, ranks=ranks, duration_s=duration_s, detail=detail)

"""What a cost formula can name: variables with their unit and scope, and functions.

A variable of rank scope is an expression over stored columns of `RankTable` (and `now`), written
into the compiled formula in place, so a derived variable costs no pass of its own. The tables here
are the only definition; `docs/policies.md` lists the same names, and a test compares the two.
"""

from enum import StrEnum
from math import inf

import msgspec

COLUMN_BOUND = 1e20
"""No count, token number or age reaches this. Used to prove that a formula can't overflow."""

HEAD_CREDIT_US_PER_S = 500_000.0
"""Half of the time for which a rank's head is being prefilled counts as work done, up to its prediction: the other
half may have gone to decode steps."""


class Scope(StrEnum):
    """Where a variable's value comes from."""

    RANK = "rank"
    REQUEST = "request"
    FLEET = "fleet"


class Variable(msgspec.Struct, frozen=True):
    """One name. `expression` reads `columns` of the rank table; `bound` limits its absolute value (inf: may be infinite)."""

    name: str
    scope: Scope
    unit: str
    columns: tuple[str, ...] = ()
    expression: str = ""
    bound: float = COLUMN_BOUND
    is_integer: bool = True


def _column(name: str, unit: str) -> Variable:
    return Variable(name, Scope.RANK, unit, (name,), name)


_VARIABLES = (
    _column("in_flight", "requests"),
    _column("in_flight_prefill", "requests"),
    _column("in_flight_decode", "requests"),
    _column("queued_tokens", "tokens"),
    _column("ctx_tokens", "tokens"),
    _column("sent_since_snapshot", "requests"),
    _column("reported_running", "requests"),
    _column("reported_waiting", "requests"),
    _column("running", "requests"),
    _column("waiting", "requests"),
    _column("foreign", "requests"),
    Variable(
        "kv_usage",
        Scope.RANK,
        "ratio",
        ("kv_usage", "snapshot_at", "own_tokens", "kv_capacity_tokens"),
        # Without a report the gateway's own tokens stand in; an unknown capacity (inf) makes that 0.
        "kv_usage if snapshot_at is not None else own_tokens / kv_capacity_tokens"
        " if own_tokens < kv_capacity_tokens else 1.0",
        1.0,
        is_integer=False,
    ),
    Variable(
        "kv_capacity_tokens",
        Scope.RANK,
        "tokens",
        ("kv_capacity_tokens",),
        "kv_capacity_tokens",
        inf,
        is_integer=False,
    ),
    Variable(
        "head_age_ms",
        Scope.RANK,
        "ms",
        ("head_since",),
        "0.0 if head_since is None else (now - head_since) * 1000.0",
        is_integer=False,
    ),
    Variable(
        "queued_ms",
        Scope.RANK,
        "ms",
        ("pending_us", "head_credit_us", "head_since"),
        # The credit ends at the head's own prediction: a head that overruns it takes nothing off what waits behind it.
        "0.0 if head_since is None"
        f" else (pending_us - (now - head_since) * {HEAD_CREDIT_US_PER_S}) / 1000.0"
        f" if (now - head_since) * {HEAD_CREDIT_US_PER_S} < head_credit_us"
        " else (pending_us - head_credit_us) / 1000.0",
        is_integer=False,
    ),
    Variable("step_ms", Scope.RANK, "ms", ("step_us",), "step_us / 1000.0", is_integer=False),
    Variable("mean_out_tokens", Scope.RANK, "tokens", ("mean_out_tokens",), "mean_out_tokens", is_integer=False),
    Variable(
        "snapshot_age_ms",
        Scope.RANK,
        "ms",
        ("snapshot_at",),
        "inf if snapshot_at is None else (now - snapshot_at) * 1000.0",
        inf,
        is_integer=False,
    ),
    # Request scope. `cached_tokens`, `new_tokens` and `prefill_ms` become per rank by giving them columns here.
    Variable("prompt_tokens", Scope.REQUEST, "tokens"),
    Variable("cached_tokens", Scope.REQUEST, "tokens"),
    Variable("new_tokens", Scope.REQUEST, "tokens"),
    Variable("max_tokens", Scope.REQUEST, "tokens"),
    Variable("priority", Scope.REQUEST, "number"),
    Variable("prefill_ms", Scope.REQUEST, "ms", is_integer=False),
    Variable("ranks", Scope.FLEET, "ranks"),
    Variable("gateways", Scope.FLEET, "gateways"),
    Variable("coupled", Scope.FLEET, "0 or 1", bound=1.0),
)

VARIABLES: dict[str, Variable] = {variable.name: variable for variable in _VARIABLES}
"""Every variable by name."""

FLEET_ARGUMENTS = ("ranks", "gateways", "coupled")
REQUEST_ARGUMENTS = ("now", "prompt_tokens", "cached_tokens", "new_tokens", "max_tokens", "priority", "prefill_ms")
"""Order of a compiled formula's arguments; see `gateway.core.formula`."""

FUNCTIONS: dict[str, tuple[int, int]] = {
    "min": (2, 16),
    "max": (2, 16),
    "abs": (1, 1),
    "sqrt": (1, 1),
    "log": (1, 1),
    "exp": (1, 1),
    "pow": (2, 2),
}
"""Functions and the least and largest number of arguments."""

AGGREGATES = ("fleet_min", "fleet_mean", "fleet_max")
"""Functions of one per-rank expression over the eligible ranks; evaluated once per decision."""

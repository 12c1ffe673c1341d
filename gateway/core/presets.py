"""Named policies, and how a policy's settings are completed from its preset.

A preset is nothing but values for the keys of `policy`; keys that are set beside it win. Where a
preset has a peer's name it computes that peer's published formula over the counts as the ranks
report them; `tests/core/test_presets.py` checks each against the formula written a second time.
"""

from typing import Literal

import msgspec

from gateway.config.schema import Policy, PresetName, TieTolerance
from gateway.core.formula import Formula, compile_cost

Picker = Literal["argmin", "p2c", "random", "round_robin"]
TieBreak = Literal["random", "rotate", "first"]
Objective = Literal["min", "max"]

_SMG_KV = "(reported_waiting * 6 * max(0, kv_usage - 0.5) if reported_waiting > 0 else 0)"

PRESETS: dict[PresetName, Policy] = {
    # Queued prefill work times batch size: arXiv 2603.15202.
    "lmetric": Policy(cost="(queued_tokens + new_tokens) * (in_flight + 1)", picker="argmin", tie_break="random"),
    # Predicted time to the first token, plus what it costs those that decode there: the batch n. That weight fades
    # out as even the shortest queue grows, for then waiting is all that counts. The same as
    # queued_ms * (1 + 0.2 * u * n) + prefill_ms * (1 + 0.4 * u * n) with u = 1 / (1 + fleet_min(queued_ms) / 100),
    # put so that the minimum is taken once. No term for a full KV cache: the filters `kv_fit` and `kv_usage` keep such
    # ranks out before a cost is looked at.
    "predicted": Policy(
        cost="queued_ms + prefill_ms"
        " + in_flight * (0.2 * queued_ms + 0.4 * prefill_ms) / (1 + fleet_min(queued_ms) / 100)",
        picker="argmin",
        tie_break="random",
    ),
    # Engine client of smg-project/smg: one client, so its own in-flight is the floor of what is reported.
    "smg": Policy(
        cost=f"max(in_flight, reported_waiting + reported_running) + {_SMG_KV}", picker="argmin", tie_break="rotate"
    ),
    # vLLM's internal balancer (core_client.py, since mid 2026): the same with the number of frontends.
    "vllm": Policy(
        cost=f"max(gateways * in_flight, reported_waiting + reported_running) + {_SMG_KV}",
        picker="argmin",
        tie_break="rotate",
    ),
    # vLLM's balancer before that. Each send raises the waiting count by the number of frontends until the
    # next snapshot overwrites it; the scan has a fixed start.
    "vllm_4w_r": Policy(
        cost="4 * (reported_waiting + sent_since_snapshot * gateways) + reported_running",
        picker="argmin",
        tie_break="first",
    ),
    "round_robin": Policy(picker="round_robin"),
    "random": Policy(picker="random"),
    "p2c": Policy(cost="in_flight", picker="p2c", tie_break="random"),
    "least_in_flight": Policy(cost="in_flight", picker="argmin", tie_break="random"),
}
"""Every preset by name."""

_COSTLESS = ("random", "round_robin")


class PolicyError(ValueError):
    """The policy's keys don't make a policy. The message says which key to add."""


class ResolvedPolicy(msgspec.Struct, frozen=True):
    """A policy with every key decided. `formula` is None for the pickers that use no cost."""

    preset: PresetName | None
    formula: Formula | None
    picker: Picker
    tie_break: TieBreak
    objective: Objective
    tie_tolerance: TieTolerance
    seed: int | None


def resolve(settings: Policy) -> ResolvedPolicy:
    """Complete the settings from the preset, then from the defaults, and compile the cost.

    Raises `PolicyError` when a picker that needs a cost has none, `FormulaError` for the cost's text.
    """
    base = PRESETS[settings.preset] if settings.preset is not None else Policy()
    picker = settings.picker or base.picker or "argmin"
    cost = settings.cost if settings.cost is not None else base.cost
    if picker in _COSTLESS:
        if settings.cost is not None:
            raise PolicyError(f"picker {picker} uses no cost: remove policy.cost or set policy.picker to argmin")
        cost = None
    elif cost is None:
        raise PolicyError(f"picker {picker} needs policy.cost or a policy.preset that has one")
    return ResolvedPolicy(
        preset=settings.preset,
        formula=compile_cost(cost) if cost is not None else None,
        picker=picker,
        tie_break=settings.tie_break or base.tie_break or "random",
        objective=settings.objective or base.objective or "min",
        tie_tolerance=settings.tie_tolerance or base.tie_tolerance or TieTolerance(),
        seed=settings.seed,
    )

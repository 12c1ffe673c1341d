"""The record of one choice, and a bounded ring of the latest ones.

A record is made on the hot path, so it only keeps references to what the decision already computed
plus plain copies of the columns that the formula read; everything readable is derived on demand.
"""

from collections.abc import Sequence
from math import inf, isnan
from typing import Any

import msgspec

from gateway.core.costing import RequestValues
from gateway.core.eligibility import REASONS
from gateway.core.errors import Reason
from gateway.core.gate import GATE_REASONS
from gateway.core.presets import ResolvedPolicy

GATE_KV = 255
"""A rank's gate is open, but it has no room for this prompt."""
GATE_TRIED = 254
"""A rank's gate is open, but the sequence's attempt before failed there, and another rank can take it."""
_GATE_NAMES = {**dict(enumerate(GATE_REASONS)), GATE_KV: "kv", GATE_TRIED: "tried"}


class Decision(msgspec.Struct, gc=False, eq=False):
    """Where one sequence went and why.

    `rank` is None when no rank was eligible; `refusal` then says why. `costs` holds one number per
    rank, as the formula gives it: NaN where the rank was not evaluated, an infinity where no cost
    could be computed; None if none was. `ties` counts the ranks as good as the chosen one, itself
    included. `codes` (None: every rank was eligible) index `REASONS`. `columns` are copies of the
    formula's columns. `id` is 0 until a ring takes the record.

    Where sequences are queued: `gate` holds each rank's gate (an index into `GATE_REASONS`, `GATE_KV` or `GATE_TRIED`), `queued_ms`
    the time in the queue, `queue_depth` its length then, `dispatch_reason` why the sequence left it, and `batch` the
    number, size and reason of the batch that it left in. `predicted_ms` and `actual_ms` are of its prefill; the second
    is known once it is over.
    """

    policy: ResolvedPolicy
    size: int
    label: str
    request: RequestValues
    pinned: int | None
    columns: tuple[list[Any], ...]
    rank: int | None
    costs: list[float] | None
    ties: int
    eligible: int
    codes: bytes | None = None
    relaxed: tuple[str, ...] = ()
    refusal: Reason | None = None
    id: int = 0
    gate: bytes | None = None
    queued_ms: float = 0.0
    queue_depth: int = 0
    dispatch_reason: str = ""
    batch: tuple[int, int, str] | None = None
    predicted_ms: float | None = None
    actual_ms: float | None = None

    @property
    def at(self) -> float:
        """When it was made, in seconds of the core's clock."""
        return self.request[0]

    @property
    def picker(self) -> str:
        """The picker that chose."""
        return self.policy.picker

    @property
    def formula(self) -> str | None:
        """Text of the cost formula, if the picker uses one."""
        return self.policy.formula.text if self.policy.formula is not None else None

    def reasons(self) -> list[str]:
        """Per rank "eligible" or the filter that turned it away (`gateway.core.eligibility.REASONS`)."""
        if self.codes is None:
            return [REASONS[0]] * self.size
        return [REASONS[code] for code in self.codes]

    def gates(self) -> list[str | None]:
        """Per rank the state of its gate by name; None where no gate was looked at."""
        if self.gate is None:
            return [None] * self.size
        return [_GATE_NAMES[state] for state in self.gate]

    def variables(self) -> list[dict[str, float]]:
        """Per rank the values of the variables that the formula names, as they were at the decision."""
        formula = self.policy.formula
        if formula is None or not formula.rank_names:
            return [{} for _ in range(self.size)]
        rows = formula.rank_values(self.at, *self.columns)
        return [dict(zip(formula.rank_names, row, strict=True)) for row in rows]

    def render(self) -> dict[str, object]:
        """Everything as JSON-safe values; infinities are "inf" and "-inf", what was not evaluated is None."""
        _, prompt_tokens, cached_tokens, new_tokens, max_tokens, priority, prefill_ms = self.request
        policy = self.policy
        return {
            "id": self.id,
            "at_s": self.at,
            "label": self.label,
            "rank": self.rank,
            "refusal": self.refusal.value if self.refusal is not None else None,
            "preset": policy.preset,
            "picker": policy.picker,
            "cost": self.formula,
            "objective": policy.objective,
            "tie_break": policy.tie_break,
            "pinned_rank": self.pinned,
            "eligible": self.eligible,
            "ties": self.ties,
            "relaxed": list(self.relaxed),
            "request": {
                "prompt_tokens": prompt_tokens,
                "cached_tokens": cached_tokens,
                "new_tokens": new_tokens,
                "max_tokens": max_tokens,
                "priority": priority,
                "prefill_ms": prefill_ms,
            },
            "queue": self._render_queue(),
            "batch": self._render_batch(),
            "prediction": self._render_prediction(),
            "ranks": self._render_ranks(),
        }

    def _render_queue(self) -> dict[str, object] | None:
        if self.gate is None:
            return None
        return {"queued_ms": self.queued_ms, "depth": self.queue_depth, "reason": self.dispatch_reason}

    def _render_batch(self) -> dict[str, object] | None:
        if self.batch is None:
            return None
        number, size, reason = self.batch
        return {"number": number, "size": size, "reason": reason}

    def _render_prediction(self) -> dict[str, object] | None:
        if self.predicted_ms is None:
            return None
        return {"predicted_ms": self.predicted_ms, "actual_ms": self.actual_ms}

    def _render_ranks(self) -> list[dict[str, object]]:
        costs = self.costs if self.costs is not None else [None] * self.size
        return [
            {
                "rank": rank,
                "reason": reason,
                "gate": gate,
                "cost": _json_number(cost) if cost is not None else None,
                "variables": {name: _json_number(value) for name, value in values.items()},
            }
            for rank, (reason, gate, cost, values) in enumerate(
                zip(self.reasons(), self.gates(), costs, self.variables(), strict=True)
            )
        ]


def with_kv(gate: bytes, ranks: Sequence[int], passing: list[int]) -> bytes:
    """The gate's states, with `GATE_KV` for the ranks that only lack room."""
    if gate.count(0) == len(passing):
        return gate
    states = bytearray(gate)
    for rank in ranks:
        states[rank] = states[rank] or GATE_KV
    for rank in passing:
        states[rank] = 0
    return bytes(states)


def _json_number(value: float) -> float | str | None:
    if value in (inf, -inf):
        return "inf" if value > 0 else "-inf"
    if isnan(value):
        return None
    return int(value) if isinstance(value, bool) else value


class DecisionRing:
    """The latest `capacity` decisions by id. Ids start at 1 and grow by one; capacity 0 keeps none."""

    def __init__(self, capacity: int) -> None:
        self._kept: list[Decision | None] = [None] * capacity
        self._first_id = 1
        self._last_id = 0

    def begin_at(self, first_id: int) -> None:
        """Let the first decision have this id: what several gateways number apart can't be taken for another's."""
        assert not self._last_id
        self._first_id, self._last_id = first_id, first_id - 1

    def add(self, decision: Decision) -> int:
        """Give the decision its id and keep it in place of the oldest."""
        decision.id = number = self._last_id = self._last_id + 1
        kept = self._kept
        if kept:
            kept[number % len(kept)] = decision
        return number

    def get(self, number: int) -> Decision | None:
        """The decision with this id, unless it is unknown or no longer kept."""
        if not self._kept:
            return None
        decision = self._kept[number % len(self._kept)]
        return decision if decision is not None and decision.id == number else None

    def latest(self, limit: int, *, rank: int | None = None) -> list[Decision]:
        """Up to `limit` decisions, newest first; with `rank`, only those that chose it."""
        found: list[Decision] = []
        oldest = max(self._first_id, self._last_id - len(self._kept) + 1)
        for number in range(self._last_id, oldest - 1, -1):
            if len(found) >= limit:
                break
            decision = self.get(number)
            if decision is not None and (rank is None or decision.rank == rank):
                found.append(decision)
        return found

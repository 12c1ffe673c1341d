"""The configurations that are compared, by name: top-level keys of the gateway's configuration.

`exact` predicts what the engine model says of a prompt alone; `half` and `double` are wrong by that factor.
"""

from typing import Any

from tests.bench.virtual.engine import STEP_TIME

PER_TOKEN_MS = STEP_TIME.per_prefill_token_us / 1e3
BASELINE = "direct lmetric"


def _predictor(factor: float = 1.0, *, has_steps: bool = False) -> dict[str, Any]:
    predictor: dict[str, Any] = {"prefill_ms": f"sum({PER_TOKEN_MS * factor} * new_tokens)"}
    if has_steps:
        rows, context = STEP_TIME.per_decode_row_us / 1e3, STEP_TIME.per_context_token_ns / 1e6
        predictor["step_ms"] = f"{STEP_TIME.fixed_ms} + {rows} * in_flight_decode + {context} * ctx_tokens"
    return predictor


def _queue(**settings: Any) -> dict[str, Any]:
    return {"scheduling": {"mode": "queue", "queue": settings}}


PREDICTED = {"policy": {"preset": "predicted"}}
LMETRIC = {"policy": {"preset": "lmetric"}}
BATCH = {"scheduling": {"mode": "batch"}}

POLICIES: dict[str, dict[str, Any]] = {
    BASELINE: LMETRIC,
    "direct predicted": PREDICTED | {"predictor": _predictor()},
    "direct vllm": {"policy": {"preset": "vllm"}},
    "queue": LMETRIC | _queue() | {"predictor": _predictor()},
    "queue, step formula": LMETRIC | _queue() | {"predictor": _predictor(has_steps=True)},
    "queue, predicted": PREDICTED | _queue() | {"predictor": _predictor()},
    "queue, x0.5": LMETRIC | _queue() | {"predictor": _predictor(0.5)},
    "queue, x2": LMETRIC | _queue() | {"predictor": _predictor(2.0)},
    "queue, no model": LMETRIC | _queue(),
    "queue, hrrn 4": LMETRIC | _queue(order="hrrn", gate_steps=4.0) | {"predictor": _predictor()},
    "batch": LMETRIC | BATCH | {"predictor": _predictor()},
    "batch, no model": LMETRIC | BATCH,
}
"""By name, in the order of the report."""

SATURATING: dict[str, Any] = {
    "policy": {"preset": "least_in_flight"},
    "filters": {"kv_fit": "off", "max_kv_usage": None},
    "admission": {"max_in_flight": 1_000_000, "max_in_flight_per_rank": 1_000_000},
}
"""Nothing is refused: for the measurement of the ranks' capacity."""

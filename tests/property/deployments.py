"""Valid configurations of every kind, small enough that a few requests reach their bounds."""

from typing import Any

import hypothesis.strategies as st

from gateway.config.scheduling_checks import check_scheduling
from tests.support.core import Bench, make_info

RANKS = 3
MAX_AGE_S = 20.0
NO_RANK_WAIT_S = 2.0
SILENT_AFTER_S = 2.0
MAX_EJECTED_S = 0.1
REUSE_AFTER_S = 5.0
DEADLINE_S = 8.0
MIN_QUEUE_TIMEOUT_S = 0.5

_PRESETS = ["lmetric", "smg", "vllm", "vllm_4w_r", "round_robin", "random", "p2c", "least_in_flight"]
_INFOS = {
    "same": [{}] * RANKS,
    "mixed": [{"kv_capacity_tokens": 120}, {"kv_capacity_tokens": 600}, {"max_model_len": 60}],
    "tight": [{"kv_capacity_tokens": 140}] * RANKS,
}


asks = st.fixed_dictionaries(
    {
        "length": st.sampled_from([4, 4, 10, 45, 90, 130]),
        "n": st.sampled_from([1, 1, 1, 1, 2, 3]),
        "who": st.tuples(*[st.sampled_from(["", "a", "b", "c"])] * 3),
        "priority": st.integers(0, 1),
        "greedy": st.booleans(),
        "max_tokens": st.sampled_from([8, 8, 2]),
    }
)
"""What a client asks for: `RouterMachine.arrive` takes it."""


def _some(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def _groups(draw: Any, protocol: str) -> list[dict[str, Any]]:
    base = {"name": "a", "protocol": protocol, "handshake": "ipc:///a", "ranks": RANKS, "min_ready": 1}
    base["coupled"] = draw(_some(*[False] * 4, True))
    if draw(st.booleans()):
        return [base]
    budget = draw(_some({"max_requests": 2}, {"max_prompt_tokens": 160}, {"max_kv_tokens": 60}))
    return [
        base | {"ranks": RANKS - 1, "budget": budget},
        base | {"name": "b", "handshake": "ipc:///b", "ranks": 1, "start_index": RANKS - 1},
    ]


@st.composite
def _queue(draw: Any, *, preserves: bool, has_model: bool, has_costs: bool) -> dict[str, Any]:
    order = "fcfs" if preserves else draw(_some("fcfs", "aging", "hrrn", "spf", "edf"))
    queue = {
        "order": order,
        "fair": draw(st.booleans()),
        "gate_tokens": draw(_some(1, 60, 2048)),
        "max_in_flight_per_rank": draw(_some(None, 1, 2)),
        "kv_limit": draw(_some(0.95, 0.5)),
        "hold_ratio": draw(_some(None, 0.7)) if has_costs and order != "hrrn" else None,
        "max_wait_s": draw(_some(None, 0.4, 30.0)),
        "timeout_s": draw(_some(None, 1.5)),
        "no_rank_wait_s": draw(_some(NO_RANK_WAIT_S, 0.0)),
        "hold_until_queued": draw(_some(None, 3)),
    }
    if queue["timeout_s"] is not None and not preserves:
        queue["timeout_action"] = draw(_some("reject", "delay"))
    if queue["hold_ratio"] is not None:
        queue["max_hold_s"] = 0.5
    if not preserves and draw(st.booleans()):
        queue["levels"] = [
            {
                "priority": 1,
                "max_depth": 2,
                "timeout_s": MIN_QUEUE_TIMEOUT_S,
                "timeout_action": draw(_some("reject", "delay")),
            }
        ]
    if has_model and draw(st.booleans()):
        queue["gate_ms"] = 6.0
        del queue["gate_tokens"]
    return queue


@st.composite
def _batch(draw: Any, *, has_model: bool) -> dict[str, Any]:
    return {
        "max_requests": draw(_some(2, 3, 8)),
        "max_tokens": draw(_some(None, 120)),
        "max_padded_tokens": draw(_some(None, 200)),
        "window_ms": draw(_some(0.0, 30.0)),
        "preferred_sizes": draw(_some((), (2,))),
        "max_in_flight_batches": draw(_some(1, 2)),
        "release_at": draw(_some("first_token", "finish")),
    } | ({"max_predicted_ms": 12.0} if has_model and draw(st.booleans()) else {})


@st.composite
def _admission(draw: Any) -> dict[str, Any]:
    return {
        "max_in_flight": draw(_some(200, 200, 7)),
        "max_in_flight_per_rank": draw(_some(64, 5, 2)),
        "max_prompt_tokens": draw(_some(None, None, 400)),
        "max_kv_tokens": draw(_some(None, None, 300)),
        "max_queue_depth": draw(_some(100, 100, 3)),
        "id_reuse_after_s": draw(_some(None, REUSE_AFTER_S)),
        "tenants": {
            "named": {"a": {"weight": 3.0, "max_in_flight": 6, "max_queue_depth": 4}},
            "max_tracked": 1,
            "active_s": 1.0,
        },
    }


@st.composite
def _failure(draw: Any) -> dict[str, Any]:
    """Ejections are short, so that those who wait for a rank get it before they are too old."""
    moves = draw(_some(True, True, False))
    eject = {"base_s": 0.05, "max_s": MAX_EJECTED_S, "after_failures": draw(_some(1, 2, 4))}
    return {
        "reroute": moves,
        "resume": moves,
        "max_attempts": draw(_some(1, 3)),
        "silence": draw(_some(None, *[{"after_s": SILENT_AFTER_S, "prefill_tokens_per_s": draw(_some(2000, 20))}] * 4)),
        "eject": draw(_some(None, *[eject | {"max_ratio": draw(_some(0.5, 1.0))}] * 4)),
    }


@st.composite
def deployments(draw: Any) -> Bench:
    """A router of any mode, with `RANKS` READY ranks."""
    mode = draw(_some("direct", "queue", "batch"))
    protocol = draw(_some("vllm", "tokenspeed"))
    preserves, has_model = draw(st.booleans()), draw(st.booleans())
    presets = [*_PRESETS, "predicted"] if has_model else _PRESETS
    settings: dict[str, Any] = {
        "groups": draw(_groups(protocol)),
        "policy": {"preset": draw(st.sampled_from(presets))},
        "filters": {"kv_fit": draw(_some("hard", "soft", "off"))},
        "admission": draw(_admission()),
        "scheduling": {"mode": mode},
        "limits": {"max_request_age_s": MAX_AGE_S},
        "failure": draw(_failure()),
    }
    if mode != "direct":
        has_costs = settings["policy"]["preset"] not in ("random", "round_robin")
        settings["scheduling"]["queue"] = draw(_queue(preserves=preserves, has_model=has_model, has_costs=has_costs))
    if mode == "batch":
        settings["scheduling"]["batch"] = draw(_batch(has_model=has_model))
    if has_model:
        settings["predictor"] = {"prefill_ms": "1 + 0.1 * total_new_tokens", "calibrate": draw(st.booleans())}
        settings["slo"] = draw(_some({}, *({"mode": m, "ttft": [{"ttft_ms": 15.0}]} for m in ("shadow", "enforce"))))
    if preserves:
        settings["ordering"] = "preserve"
        settings["limits"]["default_deadline_s"] = DEADLINE_S
        settings["preserve"] = {
            "domain": draw(_some("gateway", "tenant", "session", "stream")),
            "max_places": draw(_some(4096, 4096, 6)),
            "max_held_bytes": draw(_some(1 << 20, 1 << 20, 200)),
        }
    if draw(st.booleans()):
        settings["response_cache"] = {"coalesce": draw(st.booleans()), "ttl_s": draw(_some(None, 2.0))}
    bench = Bench(RANKS, protocol, join=False, **settings)
    assert list(check_scheduling(bench.config)) == []
    bench.infos = [
        make_info(**{"kv_capacity_tokens": 300, "max_num_seqs": 4} | more) for more in _INFOS[draw(_some(*_INFOS))]
    ]
    for rank, info in enumerate(bench.infos):
        bench.join(rank, info=info)
    return bench

"""What a rank really runs with, as one JSON-safe report with the same keys whatever it is.

None means: not measured, or not bounded. A mechanism that this engine can't have is a number with its
reason, so that nobody takes its absence for a gap. Live figures are None for a rank that isn't serving:
a 0 would read as idle. They can't be contended: one event loop owns the scheduler, and the report is
made between its steps.
"""

from typing import Any

from engine_stub.backend import BackendInfo
from engine_stub.config import StubConfig
from engine_stub.recipe import recipe_fingerprint
from engine_stub.scheduler import SchedulerConfig
from engine_stub.telemetry import Telemetry

DEFAULTS = SchedulerConfig()


def effective_config(config: StubConfig, info: BackendInfo, telemetry: Telemetry | None) -> dict[str, Any]:
    """The report; without telemetry the live figures are None."""
    scheduler = config.scheduler
    return {
        "kind": "iteration",
        "backend": info.name,
        "numerics": info.numerics,
        "batch_invariant": info.batch_invariant,
        "recipe_fingerprint": recipe_fingerprint(info),
        "max_model_len": config.max_model_len,
        "max_in_flight": scheduler.active_cap,
        "slots_admitted": scheduler.active_cap,
        "max_slots": scheduler.active_cap,
        "max_batch_size": scheduler.max_batch_size,
        "admission_policy": "queue",
        "admission_ceiling_reason": ceiling_reason(scheduler),
        "max_queue_depth": scheduler.max_queue_depth,
        "window_ms": 0,
        "token_budget": scheduler.token_budget,
        "prefill_chunk_size": scheduler.prefill_chunk_size,
        "whole_prompts": scheduler.whole_prompts,
        "max_prefill_tokens_per_tick": scheduler.max_prefill_tokens_per_tick,
        "max_prefills_per_tick": scheduler.max_prefills_per_tick,
        "recycle_batch": scheduler.recycle_batch,
        "prefill_before_decode": scheduler.prefill_before_decode,
        "slot_reuse": scheduler.slot_reuse,
        "kv": {
            "admission": scheduler.kv_admission,
            "budget_bytes": scheduler.capacity_tokens * info.kv_bytes_per_token,
            "bytes_per_token": info.kv_bytes_per_token,
            "block_size": scheduler.block_size,
            "blocks": scheduler.total_blocks,
        },
        "scratch": {
            "budget_bytes": scheduler.scratch_bytes,
            "bytes_per_session": scheduler.scratch_bytes_per_session,
        },
        "weights": {"bytes": info.weight_bytes, "budget_bytes": scheduler.weight_budget_bytes},
        "prefix_cache": scheduler.prefix_cache,
        "kv_events": config.kv_events.endpoint,
        "step_timing": config.telemetry.step_timing,
        "event_log": config.telemetry.event_log,
        "force_batched": scheduler.force_batched,
        "speculative_tokens": {"value": 0, "reason": "there is no draft model"},
        "lock_contended": False,
        **_live(telemetry),
    }


def ceiling_reason(config: SchedulerConfig) -> str:
    """What bounds the number of sequences: `kv_budget`, `scratch_budget`, `env` (somebody set it) or `default`."""
    if config.active_cap < config.max_active:
        return "scratch_budget"
    if config.total_blocks < config.max_active:
        return "kv_budget"
    return "default" if config.max_active == DEFAULTS.max_active else "env"


def _live(telemetry: Telemetry | None) -> dict[str, Any]:
    return {
        "in_flight_now": None if telemetry is None else telemetry.active_now,
        "in_flight_peak": None if telemetry is None else telemetry.active_peak,
        "short_cut_steps": None if telemetry is None else telemetry.short_cuts,
    }

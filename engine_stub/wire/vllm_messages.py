"""vLLM 0.32's messages of an engine core, field by field: positional arrays, and maps where it has dataclasses."""

from typing import Any

import msgspec

VERSION = "0.32.0"
_NO_FETCHES = {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0}


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """One row; 18 elements."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[Any] | None = None
    new_prompt_logprobs: list[Any] | None = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: dict[str, int] | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None


class SchedulerStats(msgspec.Struct, kw_only=True):
    """The load map. Steps and waves are counted in reports to the coordinator of a lockstep group, else both stay 0."""

    num_running_reqs: Any
    num_waiting_reqs: Any
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = msgspec.field(default_factory=lambda: dict(_NO_FETCHES))
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: Any
    iteration_details: Any = None
    prefix_cache_stats: dict[str, Any]
    connector_prefix_cache_stats: Any = None
    kv_cache_eviction_events: list[Any] = []
    spec_decoding_stats: Any = None
    kv_connector_stats: Any = None
    ec_connector_stats: Any = None
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}
    cudagraph_stats: Any = None
    perf_stats: Any = None


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """A batch of rows, or statistics, or a utility reply; 9 elements."""

    engine_index: int
    outputs: list[Any]
    scheduler_stats: Any
    timestamp: float
    utility_output: list[Any] | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = "default"


class EngineCoreReadyResponse(msgspec.Struct, kw_only=True):
    """The registration map. A dense rank says data-parallel size 1, with its true rank beside it."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None = None
    dtype: str
    vllm_version: str = VERSION
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool = False
    max_loras: int = 0
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int
    kv_cache_max_concurrency: float
    kv_events_config: dict[str, Any] | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int
    recipe_fingerprint: str | msgspec.UnsetType = msgspec.UNSET

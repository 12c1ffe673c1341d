"""The concurrency table: one workload at several slot counts, computed by running it, and checked for corruption.

Concurrency is the number of slots. A level's tokens are compared with those of every job run alone: a
batch that changes a single token is corrupt, however well it performs.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine_stub.backend import Backend, BackendInfo, registry
from engine_stub.config import StubConfig
from engine_stub.running import run_to_completion, tick_bound
from engine_stub.scheduler import ForwardOutput, Request, Scheduler, StepPlan
from engine_stub.telemetry import Telemetry


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Equal jobs with different prompts, submitted at once."""

    jobs: int = 8
    prompt_tokens: int = 4
    new_tokens: int = 8

    def requests(self, vocab_size: int) -> list[Request]:
        """The jobs as greedy requests; token ids are spread over the vocabulary."""
        return [
            Request(
                id=f"job-{job}",
                prompt_ids=[(37 * job + 11 * place + 3) % vocab_size for place in range(self.prompt_tokens)],
                max_tokens=self.new_tokens,
            )
            for job in range(self.jobs)
        ]


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. Occupancy counts decode rows over the ticks that decoded.

    `kv_peak_bytes` is what finished ticks left behind at most, `kv_high_water_bytes` what was stored at
    any moment, `kv_reserved_peak_bytes` the whole blocks behind the first.
    """

    concurrency: int
    ticks: int
    decode_ticks: int
    forwards: int
    occupancy_avg: float
    occupancy_max: int
    tokens_per_tick: float
    kv_peak_bytes: int
    kv_high_water_bytes: int
    kv_reserved_peak_bytes: int
    is_corruption_free: bool


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The table and its two conclusions."""

    backend: BackendInfo
    workload: Workload
    levels: list[Level]
    saturation_concurrency: int
    """The smallest level whose mean occupancy no higher level beats."""
    corruption_free: bool


class Counted:
    """A backend that counts its forward calls."""

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self.info = backend.info
        self.forwards = 0
        self._backend = backend

    def forward(self, plan: StepPlan) -> ForwardOutput:
        """See `Backend.forward`."""
        self.forwards += 1
        return self._backend.forward(plan)


def sweep(backend: str, config: StubConfig, workload: Workload, concurrencies: Sequence[int]) -> Sweep:
    """Run the workload at each concurrency. Raises BackendError, and NoProgressError for a scheduler that hangs."""
    made = registry.create(backend, config)
    requests = workload.requests(config.model.vocab_size)
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= _run_alone(config, made, request)
    levels = [_level(config, made, requests, alone, concurrency) for concurrency in concurrencies]
    return Sweep(
        backend=made.info,
        workload=workload,
        levels=levels,
        saturation_concurrency=saturation(levels),
        corruption_free=all(level.is_corruption_free for level in levels),
    )


def saturation(levels: Sequence[Level]) -> int:
    """The smallest concurrency whose mean occupancy no higher one beats."""
    best = max(level.occupancy_avg for level in levels)
    return min(level.concurrency for level in levels if level.occupancy_avg == best)


def render(result: Sweep) -> str:
    """The table as text."""
    head = ("conc", "ticks", "decode", "occ avg", "occ max", "tok/tick", "peak KV", "high water", "reserved", "ok")
    lines = [head] + [
        (
            str(level.concurrency),
            str(level.ticks),
            str(level.decode_ticks),
            f"{level.occupancy_avg:.3f}",
            str(level.occupancy_max),
            f"{level.tokens_per_tick:.3f}",
            str(level.kv_peak_bytes),
            str(level.kv_high_water_bytes),
            str(level.kv_reserved_peak_bytes),
            "yes" if level.is_corruption_free else "NO",
        )
        for level in result.levels
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    load, info = result.workload, result.backend
    title = (
        f"{load.jobs} jobs of {load.prompt_tokens} + {load.new_tokens} tokens, backend {info.name}, "
        f"{info.kv_bytes_per_token} bytes of KV per token"
    )
    verdict = [
        f"saturation_concurrency {result.saturation_concurrency}",
        f"corruption_free {str(result.corruption_free).lower()}",
    ]
    return "\n".join([title, *table, *verdict])


def _run_alone(config: StubConfig, backend: Backend, request: Request) -> dict[str, list[int]]:
    single = msgspec.structs.replace(config.scheduler, max_active=1)
    scheduler = Scheduler(single)
    scheduler.submit(request)
    return run_to_completion(scheduler, backend, tick_bound([request]))


def _level(
    config: StubConfig, backend: Backend, requests: list[Request], alone: dict[str, list[int]], concurrency: int
) -> Level:
    scheduler = Scheduler(
        msgspec.structs.replace(config.scheduler, max_active=concurrency, max_queue_depth=len(requests))
    )
    counted, telemetry = Counted(backend), Telemetry(scheduler, backend.info)
    for request in requests:
        admission = scheduler.submit(request)
        if not admission.is_accepted:
            raise ValueError(f"{request.id} was refused: {admission.value}; the workload doesn't fit the profile")
    tokens = run_to_completion(scheduler, counted, tick_bound(requests), telemetry)
    kv: dict[str, Any] = telemetry.snapshot(0.0)["kv"]
    return Level(
        concurrency=concurrency,
        ticks=telemetry.ticks,
        decode_ticks=telemetry.decode_ticks,
        forwards=counted.forwards,
        occupancy_avg=telemetry.occupancy_avg,
        occupancy_max=telemetry.occupancy_max,
        tokens_per_tick=(telemetry.decode_tokens + telemetry.prefill_tokens) / telemetry.ticks,
        kv_peak_bytes=kv["used_peak_bytes"],
        kv_high_water_bytes=kv["high_water_bytes"],
        kv_reserved_peak_bytes=kv["reserved_peak_bytes"],
        is_corruption_free=tokens == alone,
    )

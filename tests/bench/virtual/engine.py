"""One rank in virtual time: the stub's own scheduler, a formula for the duration of a step, no tokens.

A step is `begin` -> (its duration passes) -> `finish`. Requests that arrive in between wait for the next step, as in
the real engines; aborts act at once. The load report is taken after the commit, as vLLM does. An idle rank is silent.
"""

from engine_stub.backend.synthetic import StepTime
from engine_stub.scheduler import Admission, ForwardOutput, Request, Scheduler, SchedulerConfig, StepPlan
from gateway.types import EngineBatch, EngineLoad, EngineRequest, RankInfo

STEP_TIME = StepTime()
"""Llama-8B on one H100, estimated: 6.5 ms + 30 us/prompt token + 20 us/row + 49 ns/context token + 1.05 ns/product."""

SCHEDULER = SchedulerConfig(max_active=256, token_budget=8192, kv_tokens=400_000, prefix_cache=False)


def rank_info(config: SchedulerConfig, max_model_len: int) -> RankInfo:
    """What such a rank says of itself when it joins."""
    return RankInfo(
        max_model_len=max_model_len,
        num_gpu_blocks=config.total_blocks,
        block_size=config.block_size,
        kv_capacity_tokens=config.capacity_tokens,
        max_num_seqs=config.max_active,
        max_num_batched_tokens=config.token_budget,
    )


def unloaded_prefill_s(prompt_tokens: int, config: SchedulerConfig = SCHEDULER, time: StepTime = STEP_TIME) -> float:
    """Seconds that an empty rank takes for a prompt: its chunks, one step each."""
    total_ms, start = 0.0, 0
    budget = config.token_budget or prompt_tokens
    while start < prompt_tokens:
        count = min(budget, prompt_tokens - start)
        total_ms += time.fixed_ms + 1e-3 * time.per_prefill_token_us * count
        total_ms += 1e-6 * time.per_prefill_context_ns * count * (start + (count + 1) / 2)
        start += count
    return total_ms / 1e3


class VirtualRank:
    """One rank's scheduler and inbox. `is_awake`: a step runs, or is about to begin."""

    __slots__ = ("_inbox", "_plan", "_time", "busy_s", "is_awake", "scheduler", "steps")

    def __init__(self, config: SchedulerConfig = SCHEDULER, time: StepTime = STEP_TIME) -> None:
        self.scheduler = Scheduler(config)
        self.is_awake = False
        self.busy_s = 0.0
        self.steps = 0
        self._time = time
        self._inbox: dict[str, Request] = {}
        self._plan: StepPlan | None = None

    def receive(self, request: EngineRequest) -> None:
        """Take a request; the next step sees it."""
        self._inbox[request.wire_id] = Request(
            id=request.wire_id, prompt_ids=request.prompt_token_ids, max_tokens=request.sampling.max_tokens
        )

    def abort(self, wire_id: str) -> None:
        """End a request wherever it is; unknown ids are ignored."""
        if self._inbox.pop(wire_id, None) is None:
            self.scheduler.abort(wire_id)

    def begin(self) -> float | None:
        """Start a step; its duration in seconds, or None when there is nothing to do."""
        inbox = self._inbox
        if inbox:
            for request in inbox.values():
                admission = self.scheduler.submit(request)
                assert admission in (Admission.ADMITTED, Admission.QUEUED), admission
            inbox.clear()
        plan = self._plan = self.scheduler.plan()
        if plan is None:
            return None
        duration_s = self._time.of(plan) / 1e3
        self.busy_s += duration_s
        self.steps += 1
        return duration_s

    def finish(self) -> EngineBatch:
        """Commit the step that was begun: its rows, and the load after it."""
        plan = self._plan
        assert plan is not None, "no step was begun"
        firsts = [0 if chunk.is_last else None for chunk in plan.prefills]
        scheduler = self.scheduler
        rows = scheduler.commit(plan, ForwardOutput([0] * len(plan.decodes), firsts))
        pool = scheduler.pool
        return EngineBatch(
            ids=[sequence.id for sequence in rows.sequences],
            token_ids=rows.tokens,
            finish=rows.finishes,  # type: ignore[arg-type]  # only "" and "length" without stop ids and faults
            load=EngineLoad(
                running=scheduler.active_count,
                waiting=scheduler.waiting_count,
                kv_usage=pool.used / pool.total,
            ),
        )

"""Stepping a scheduler with a model and nothing else: no sockets, no waiting. For tables and tests."""

from collections.abc import Iterable

from engine_stub.backend import Backend
from engine_stub.scheduler import Request, Rows, Scheduler, StepPlan
from engine_stub.telemetry import Telemetry

SPARE_TICKS = 16


class NoProgressError(RuntimeError):
    """The scheduler has live sequences and doesn't get on with them."""


def tick(scheduler: Scheduler, backend: Backend, telemetry: Telemetry | None = None) -> tuple[StepPlan, Rows] | None:
    """One step; None when there was nothing to run. The clock stands still."""
    plan = scheduler.plan()
    if plan is None:
        return None
    rows = scheduler.commit(plan, backend.forward(plan))
    if telemetry is not None:
        telemetry.observe(plan, 0.0)
    return plan, rows


def tick_bound(requests: Iterable[Request]) -> int:
    """Ticks that any sane scheduler needs at most when nothing is preempted: one per position, and some."""
    return sum(len(request.prompt_ids) + request.max_tokens for request in requests) + SPARE_TICKS


def run_to_completion(
    scheduler: Scheduler, backend: Backend, max_ticks: int, telemetry: Telemetry | None = None
) -> dict[str, list[int]]:
    """Step until nothing is live; the tokens of every sequence that got any, by id.

    Raises `NoProgressError` when sequences are live but no step can be planned (held, or a bug), and
    when `max_ticks` steps weren't enough.
    """
    tokens: dict[str, list[int]] = {}
    for _ in range(max_ticks):
        done = tick(scheduler, backend, telemetry)
        if done is None:
            if scheduler.live_count:
                raise NoProgressError(f"{scheduler.live_count} sequences are live and nothing can be planned")
            return tokens
        for sequence, new in zip(done[1].sequences, done[1].tokens, strict=True):
            tokens.setdefault(sequence.id, []).extend(new)
    if scheduler.live_count:
        raise NoProgressError(f"{scheduler.live_count} sequences are live after {max_ticks} ticks")
    return tokens

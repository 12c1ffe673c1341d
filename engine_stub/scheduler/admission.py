"""The decision on a submitted request, as a pure function of configuration and counts."""

from engine_stub.scheduler.config import SchedulerConfig
from engine_stub.scheduler.plan import Admission
from engine_stub.scheduler.sequence import Request


def never_fits(request: Request, config: SchedulerConfig) -> Admission | None:
    """The permanent refusal of a request whatever the load is, or None.

    `single` counts prompt + all new tokens, as DGR-012 does; the others count the positions that are
    really stored, which is one less: the last token's KV never is.
    """
    whole = len(request.prompt_ids) + request.max_tokens
    stored = whole if config.kv_admission == "single" else whole - 1
    if stored > config.capacity_tokens:
        return Admission.REJECTED_KV_BUDGET
    return Admission.REJECTED_SCRATCH_BUDGET if config.active_cap == 0 else None


def place_for(config: SchedulerConfig, *, waiting: int, free_slots: int) -> Admission:
    """Slot, queue or refusal of a request that fits. `free_slots`: those that the waiting ones can have now."""
    queued = waiting - free_slots
    if queued < 0:
        return Admission.ADMITTED
    depth = config.max_queue_depth
    return Admission.QUEUED if depth is None or queued < depth else Admission.REJECTED_QUEUE_FULL

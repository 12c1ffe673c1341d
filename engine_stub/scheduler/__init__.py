"""The pure tick machine: no clock, no I/O, no randomness. `machine.Scheduler` is the one mutator."""

from engine_stub.scheduler.blocks import BlockPool
from engine_stub.scheduler.config import KvAdmission, SchedulerConfig
from engine_stub.scheduler.machine import Scheduler
from engine_stub.scheduler.plan import Admission, ForwardOutput, PrefillChunk, Rows, StepItem, StepPlan
from engine_stub.scheduler.prefix import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from engine_stub.scheduler.sequence import Finish, Phase, Request, Sampling, Sequence

__all__ = [
    "Admission",
    "AllBlocksCleared",
    "BlockPool",
    "BlocksRemoved",
    "BlocksStored",
    "CacheEvent",
    "Finish",
    "ForwardOutput",
    "KvAdmission",
    "Phase",
    "PrefillChunk",
    "Request",
    "Rows",
    "Sampling",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "StepItem",
    "StepPlan",
]

"""The pure tick machine: no clock, no I/O, no randomness. `machine.Scheduler` is the one mutator."""

from engine_stub.scheduler.blocks import BlockPool
from engine_stub.scheduler.config import KvAdmission, SchedulerConfig
from engine_stub.scheduler.machine import Scheduler
from engine_stub.scheduler.plan import Admission, ForwardOutput, PrefillChunk, Rows, StepPlan
from engine_stub.scheduler.sequence import Finish, Phase, Request, Sequence

__all__ = [
    "Admission",
    "BlockPool",
    "Finish",
    "ForwardOutput",
    "KvAdmission",
    "Phase",
    "PrefillChunk",
    "Request",
    "Rows",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "StepPlan",
]

"""One fused model call, and what a failure of it costs: the requests that caused it, not the others.

A step that raises is run again without its prefills. If that works, the prompts were at fault: they end,
the running sequences don't notice (a model may be asked again: it stores the same K and V). If it raises
again, or there was nothing else in the step, all of the step ends. The scheduler lives on either way.
"""

import msgspec

from engine_stub.backend import Backend
from engine_stub.scheduler import ForwardOutput, StepPlan


class Outcome(msgspec.Struct):
    """What was computed, and what failed. Both plans are parts of the one that was asked for."""

    plan: StepPlan | None
    output: ForwardOutput | None
    failed: StepPlan | None = None
    error: Exception | None = None


def run(backend: Backend, plan: StepPlan) -> Outcome:
    """Forward a plan; an exception becomes part of the outcome."""
    try:
        return Outcome(plan, backend.forward(plan))
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises ends requests, not the rank
        if not plan.decodes or not plan.prefills:
            return Outcome(None, None, plan, error)
        decodes = plan.without_prefills()
        try:
            output = backend.forward(decodes)
        except Exception as again:  # noqa: BLE001 - as above
            return Outcome(None, None, plan, again)
        return Outcome(decodes, output, plan.without_decodes(), error)

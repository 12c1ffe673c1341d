"""The one seam to a model: a backend turns a step's plan into the next tokens, in one fused call.

To add a backend: a module beside `synthetic` with a class that implements `Backend`, and one line in
`registry.py`.
"""

from typing import Protocol

from engine_stub.scheduler.plan import ForwardOutput, StepPlan


class Backend(Protocol):
    """A model. The scheduler decides what runs; the backend only computes it."""

    name: str

    def forward(self, plan: StepPlan) -> ForwardOutput:
        """Compute one step: the next token of every decode row and of every last prefill chunk.

        A sequence's text is `request.prompt_ids + output`, its position is `computed`, its KV pages are
        `blocks`. State that the backend keeps per sequence goes into `model_state`. A sequence may be
        aborted after the call; the backend is not told.
        """
        ...

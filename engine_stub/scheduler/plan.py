"""What goes into a step and what comes out of it: the shapes between scheduler, model and codecs."""

from enum import StrEnum

import msgspec

from engine_stub.scheduler.sequence import Finish, Sequence

TopLogprobs = list[tuple[int, float]]
"""(token id, log probability) of the candidates for one position, the chosen token first."""


class Admission(StrEnum):
    """What became of a submitted request; stable strings for logs, the control socket and tests."""

    ADMITTED = "ADMITTED"
    QUEUED = "QUEUED"
    REJECTED_DUPLICATE = "REJECTED_DUPLICATE"
    REJECTED_KV_BUDGET = "REJECTED_KV_BUDGET"
    REJECTED_QUEUE_FULL = "REJECTED_QUEUE_FULL"

    @property
    def is_accepted(self) -> bool:
        """Whether the request is live now."""
        return self in (Admission.ADMITTED, Admission.QUEUED)


class PrefillChunk(msgspec.Struct, gc=False):
    """Positions `start .. start + count - 1` of one sequence; the last chunk yields a token."""

    sequence: Sequence
    start: int
    count: int
    is_last: bool


class StepPlan(msgspec.Struct):
    """One step: every decode row and prefill chunk, for one fused forward call.

    `context_tokens` are the KV positions that the decode rows attend to; `prefill_context` is the sum
    over chunks of tokens x mean positions attended to (the quadratic part of attention).
    """

    decodes: list[Sequence]
    prefills: list[PrefillChunk]
    prefill_tokens: int
    context_tokens: int
    prefill_context: float


class ForwardOutput(msgspec.Struct):
    """The model's answer, parallel to the plan. A chunk that isn't the last yields None.

    `duration_ms` is modelled time for the shell to let pass; a backend that computes for real says 0.
    `decode_logprobs` and `prefill_logprobs` are None when no sequence of the step asked.
    """

    decode_tokens: list[int]
    prefill_tokens: list[int | None]
    duration_ms: float = 0.0
    decode_logprobs: list[TopLogprobs | None] | None = None
    prefill_logprobs: list[TopLogprobs | None] | None = None


class Rows(msgspec.Struct):
    """Output rows of one step as parallel columns. `tokens` are new since the sequence's last row."""

    sequences: list[Sequence] = []
    tokens: list[list[int]] = []
    finishes: list[Finish] = []

    def add(self, sequence: Sequence, tokens: list[int], finish: Finish) -> None:
        """Append one row."""
        self.sequences.append(sequence)
        self.tokens.append(tokens)
        self.finishes.append(finish)

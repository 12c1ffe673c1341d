"""Backend `synthetic`: no model, a closed-form step time and the checkable token stream of `tokens.py`.

Step time in milliseconds, for the whole batch:
`a + b * prefill tokens + c * decode rows + d * context tokens + e * prefill tokens x context`, where the
last product is taken per chunk with the mean number of positions its tokens attend to. The default
coefficients describe an 8B dense model on one H100-class accelerator: `a` reads the weights once, `b` is
the compute of a prompt token, `d` reads a position's KV (128 KiB at about 80 % of 3.35 TB/s). They are
estimates from public figures, not measurements.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from engine_stub.backend import BackendInfo
from engine_stub.scheduler.plan import ForwardOutput, StepPlan, TopLogprobs
from engine_stub.scheduler.sequence import Sequence
from engine_stub.tokens import checksum, expected_top_logprobs, generate, usable_ids

NonNegative = Annotated[float, Meta(ge=0)]

# Tokens made per refill: long enough to spread the call's cost, short enough that an abort wastes little.
AHEAD = 64


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Coefficients of the step-time model; the units are in the names."""

    fixed_ms: NonNegative = 6.5
    per_prefill_token_us: NonNegative = 30.0
    per_decode_row_us: NonNegative = 20.0
    per_context_token_ns: NonNegative = 49.0
    per_prefill_context_ns: NonNegative = 1.05

    def of(self, plan: StepPlan) -> float:
        """Duration of a step in ms."""
        return (
            self.fixed_ms
            + 1e-3 * (self.per_prefill_token_us * plan.prefill_tokens + self.per_decode_row_us * len(plan.decodes))
            + 1e-6
            * (self.per_context_token_ns * plan.context_tokens + self.per_prefill_context_ns * plan.prefill_context)
        )


class _Stream:
    """A sequence's place in its token stream: tokens made ahead, from number `base` on."""

    __slots__ = ("ahead", "base", "state")

    def __init__(self, state: int) -> None:
        self.state = state
        self.base = 0
        self.ahead: list[int] = []


class SyntheticBackend:
    """Tokens by hash, time by formula. Deterministic in the text and the seed; knows no clock."""

    name = "synthetic"

    def __init__(
        self,
        *,
        vocab_size: int,
        excluded: tuple[int, ...] = (),
        step_time: StepTime | None = None,
        kv_bytes_per_token: int = 131_072,
    ) -> None:
        self._usable, self._skipped = usable_ids(vocab_size, excluded)
        self._vocab_size = vocab_size
        self._step_time = step_time or StepTime()
        self._info = BackendInfo(
            name=self.name,
            numerics="modelled",
            batch_invariant=True,
            kv_bytes_per_token=kv_bytes_per_token,
            recipe={"stream": "crc32", "vocab_size": vocab_size, "excluded": list(self._skipped)},
        )

    @property
    def info(self) -> BackendInfo:
        """See `Backend.info`; there are no weights to measure."""
        return self._info

    def forward(self, plan: StepPlan) -> ForwardOutput:
        """See `Backend.forward`."""
        decode_tokens: list[int] = []
        has_logprobs = False
        for sequence in plan.decodes:
            stream: _Stream = sequence.model_state  # set by the prefill
            index = sequence.generated - stream.base
            if index == len(stream.ahead):
                self._refill(sequence, stream)
                index = 0
            decode_tokens.append(stream.ahead[index])
            has_logprobs = has_logprobs or sequence.logprobs is not None
        prefill_tokens = [self._token(chunk.sequence) if chunk.is_last else None for chunk in plan.prefills]
        has_logprobs = has_logprobs or any(chunk.sequence.logprobs is not None for chunk in plan.prefills)
        output = ForwardOutput(decode_tokens, prefill_tokens, self._step_time.of(plan))
        if has_logprobs:
            output.decode_logprobs = [
                self._logprobs(sequence, token) for sequence, token in zip(plan.decodes, decode_tokens, strict=True)
            ]
            output.prefill_logprobs = [
                self._logprobs(chunk.sequence, token)
                for chunk, token in zip(plan.prefills, prefill_tokens, strict=True)
            ]
        return output

    def _token(self, sequence: Sequence) -> int:
        """The next token of any sequence, whether it was seen before or not."""
        stream: _Stream | None = sequence.model_state
        if stream is None:
            stream = sequence.model_state = _Stream(checksum(sequence.request.prompt_ids))
        if sequence.generated - stream.base == len(stream.ahead):
            self._refill(sequence, stream)
        return stream.ahead[sequence.generated - stream.base]

    def _refill(self, sequence: Sequence, stream: _Stream) -> None:
        stream.base = sequence.generated
        stream.ahead, stream.state = generate(
            stream.state,
            sequence.prompt_len + sequence.generated,
            min(AHEAD, sequence.limit - sequence.generated),
            sequence.request.seed,
            self._usable,
            self._skipped,
        )

    def _logprobs(self, sequence: Sequence, token: int | None) -> TopLogprobs | None:
        wanted = sequence.request.logprobs
        if wanted is None or token is None:
            return None
        return expected_top_logprobs(token, max(1, wanted), self._vocab_size)

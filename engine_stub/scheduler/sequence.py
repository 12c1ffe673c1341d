"""A request as the engine runs it, and its live state."""

from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from typing import Any, Literal

import msgspec

Finish = Literal["", "stop", "length", "abort", "error", "cache_miss"]
"""Why a sequence ended; the empty string means that it runs on.

`cache_miss`: its KV was evicted (`kv_admission: single`). Nothing is lost but time: the prompt and the
tokens that were delivered can be prefilled again.
"""

TopLogprobs = list[tuple[int, float]]
"""(token id, log probability) of the candidates for one position, the chosen token first."""

NO_IDS: frozenset[int] = frozenset()


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How the next token is chosen from logits. The defaults change nothing; temperature 0 is greedy.

    Order of application: penalties (over prompt and output as in both real engines: repetition over
    both, presence and frequency over the output), banned ids, temperature, min-p, top-k, top-p, draw.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


GREEDY = Sampling(temperature=0.0)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a codec hands to the scheduler. `logprobs` is the number of alternatives asked for, None for none.

    `row_interval` k reports tokens in rows of k (the first token and the last row always go out).
    `uses_prefix_cache` is the request's own switch, `cache_salt` keeps its blocks apart from others'.
    """

    id: str
    prompt_ids: SequenceOf[int]
    max_tokens: int
    min_tokens: int = 0
    eos_ids: frozenset[int] = NO_IDS
    stop_ids: frozenset[int] = NO_IDS
    seed: int | None = None
    logprobs: int | None = None
    row_interval: int = 1
    sampling: Sampling = GREEDY
    uses_prefix_cache: bool = True
    cache_salt: str = ""
    client: int = 0
    """Which of the front ends it came from; its rows go there."""


class Phase(IntEnum):
    """Where a sequence is. WAITING covers new and preempted ones."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    ENDED = 3


class Sequence:
    """Live state of one request. Only the scheduler writes it, except `model_state`, which the backend owns.

    While decoding, `computed == len(prompt) + generated - 1`: the newest token's KV isn't stored yet.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "capacity",
        "computed",
        "generated",
        "hashes",
        "id",
        "inserted",
        "interval",
        "is_plain",
        "limit",
        "logprobs",
        "min_tokens",
        "model_state",
        "order",
        "output",
        "phase",
        "promised",
        "prompt_len",
        "reason",
        "reported",
        "request",
        "slot",
        "stop_token",
        "stops",
        "target",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.id = request.id
        self.order = order
        self.phase = Phase.WAITING
        self.prompt_len = len(request.prompt_ids)
        self.target = self.prompt_len
        """Positions that must be computed before the next token: the prompt, or all text after a preemption."""
        self.limit = request.max_tokens
        self.min_tokens = request.min_tokens
        self.stops = request.eos_ids | request.stop_ids
        self.interval = request.row_interval
        self.is_plain = self.interval == 1 and request.logprobs is None and not self.stops
        """Every token is a row of its own and only the length ends it: the fast path of a step."""
        self.computed = 0
        self.generated = 0
        self.reported = 0
        self.output: list[int] = []
        self.logprobs: list[list[tuple[int, float]]] | None = None if request.logprobs is None else []
        self.stop_token: int | None = None
        self.reason: str | None = None
        """Why it was refused or ended early, as a stable string; None for an ordinary end."""
        self.slot = -1
        """Number of its batch slot; -1 without one."""
        self.blocks: list[int] = []
        """Block table: position p is stored in pool block `blocks[p // block_size]`."""
        self.capacity = 0
        self.promised = 0
        self.cached_tokens: int | None = None
        """Prompt positions that the prefix cache had when it first started; None before that."""
        self.hashes: list[bytes] = []
        """Chained hashes of the full blocks of its text, as far as they were needed."""
        self.inserted = 0
        """Leading blocks that the prefix cache has seen."""
        self.model_state: Any = None

    def append(self, token: int, top: TopLogprobs | None) -> Finish:
        """Record the next token, with its candidates if any were asked for; whether it is the last, and why."""
        self.output.append(token)
        self.generated += 1
        if self.logprobs is not None:
            self.logprobs.append(top or [])
        if token in self.stops and self.generated >= self.min_tokens:
            self.stop_token = token
            return "stop"
        return "length" if self.generated >= self.limit else ""

    def is_due(self, finish: Finish) -> bool:
        """Whether a row goes out now: the first token, every interval's last one, and the end."""
        return bool(finish) or self.interval == 1 or self.generated == 1 or not self.generated % self.interval

    def unreported(self) -> list[int]:
        """The tokens since the last row; they count as reported from now on."""
        tokens = self.output[self.reported :]
        self.reported = self.generated
        return tokens

    def text(self, start: int, end: int) -> list[int]:
        """Token ids of positions `start .. end - 1` of prompt + output."""
        prompt_len = self.prompt_len
        if end <= prompt_len:
            return list(self.request.prompt_ids[start:end])
        if start >= prompt_len:
            return self.output[start - prompt_len : end - prompt_len]
        return [*self.request.prompt_ids[start:], *self.output[: end - prompt_len]]

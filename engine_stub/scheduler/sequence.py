"""A request as the engine runs it, and its live state."""

from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from typing import Any, Literal

import msgspec

Finish = Literal["", "stop", "length", "abort", "error"]
"""Why a sequence ended; the empty string means that it runs on."""

NO_IDS: frozenset[int] = frozenset()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a codec hands to the scheduler. `logprobs` is the number of alternatives asked for, None for none.

    `row_interval` k reports tokens in rows of k (the first token and the last row always go out).
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
        "capacity",
        "computed",
        "generated",
        "id",
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
        "reported",
        "request",
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
        self.blocks: list[int] = []
        self.capacity = 0
        self.promised = 0
        self.model_state: Any = None

"""The outbox of a sequence: tokens that no flush has taken yet, and the record of all there were."""

from array import array
from collections.abc import Sequence as Seq

from gateway.types import FinishReason, TokenLogprob

PACK_AT_TOKENS = 128
BYTES_PER_TOKEN = 4


class Record:
    """Everything that a sequence generated: for another rank, and as an answer for the response cache.

    Another rank needs the tokens, of which up to `token_bytes` are kept. An answer has log probabilities as well: up to
    `cache_bytes` of both. Beyond that it is none any more (`is_answer`), and they are dropped; the tokens stay.
    """

    __slots__ = ("_answer_bytes", "cache_bytes", "is_answer", "logprobs", "token_bytes", "token_ids")

    def __init__(self, *, cache_bytes: int, token_bytes: int = 0) -> None:
        self.cache_bytes = cache_bytes
        self.token_bytes = token_bytes
        self.is_answer = cache_bytes > 0
        self.token_ids = array("I")
        self.logprobs: list[TokenLogprob] = []
        self._answer_bytes = 0

    @property
    def is_lasting(self) -> bool:
        """Whether it is kept for another rank, and so until the end."""
        return self.token_bytes > 0

    def extend(self, token_ids: Seq[int], logprobs: Seq[TokenLogprob] | None) -> bool:
        """Keep more output. False when it got too large to be worth keeping."""
        self.token_ids.extend(token_ids)
        if self.is_answer:
            self._extend_answer(len(token_ids), logprobs)
        return self.is_answer or BYTES_PER_TOKEN * len(self.token_ids) <= self.token_bytes

    def _extend_answer(self, tokens: int, logprobs: Seq[TokenLogprob] | None) -> None:
        self._answer_bytes += BYTES_PER_TOKEN * tokens
        if logprobs is not None:
            self.logprobs.extend(logprobs)
            self._answer_bytes += logprob_bytes(logprobs)
        if self._answer_bytes > self.cache_bytes:
            self.is_answer = False
            self.logprobs.clear()


def logprob_bytes(logprobs: Seq[TokenLogprob]) -> int:
    """What log probabilities are charged with: 64 bytes a token and 16 per alternative."""
    return sum(64 + 16 * len(item.top) for item in logprobs)


class Outbox:
    """What a sequence generated and nobody has taken yet. Whoever reads it does so by `take`, or as `take` does.

    `pending` is the youngest part, as it came; `packed` what waits for longer. `held_bytes` of it waited for their turn, not
    for the reader. `is_dirty` once it is listed for the next flush, until that takes it. `record` keeps all tokens of a
    sequence whose answer may be cached or that another rank may have to go on with.
    """

    # What a token touches, in one place: the slots of a base class come first.
    __slots__ = (
        "cached_tokens",
        "completion_tokens",
        "finish",
        "held_bytes",
        "is_dirty",
        "logprobs",
        "packed",
        "pending",
        "record",
    )

    cached_tokens: int
    completion_tokens: int
    finish: FinishReason
    held_bytes: int
    is_dirty: bool
    logprobs: list[TokenLogprob] | None
    packed: "array[int] | None"
    pending: list[int] | tuple[int, ...]
    record: Record | None

    def append(self, token_ids: Seq[int], logprobs: Seq[TokenLogprob] | None) -> bool:
        """Add new tokens. True when the backlog was long enough to be packed to four bytes a token."""
        pending = self.pending
        if not pending and type(token_ids) is tuple:
            pending = self.pending = token_ids  # most are taken before the next ones come: no list for them
        else:
            if type(pending) is not list:
                pending = self.pending = [*pending]
            pending += token_ids
        self.completion_tokens += len(token_ids)
        if logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(logprobs)
        if self.record is not None and not self.record.extend(token_ids, logprobs):
            self.record = None
        is_long = len(pending) >= PACK_AT_TOKENS
        if is_long:
            self.pack()
        return is_long

    def pack(self) -> None:
        """Keep the backlog at four bytes a token from now on."""
        self.packed = self.packed or array("I")
        self.packed.extend(self.pending)
        self.pending = ()

    @property
    def backlog_tokens(self) -> int:
        """Tokens that wait in the outbox."""
        return len(self.pending) + (len(self.packed) if self.packed is not None else 0)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait in the outbox (logprobs count 64 bytes a token and 16 per alternative)."""
        total = BYTES_PER_TOKEN * self.backlog_tokens
        return total if self.logprobs is None else total + logprob_bytes(self.logprobs)

    def put_back(self) -> None:
        """Leave what waits for a later flush: new output marks it dirty again. It does not wait for the reader."""
        self.is_dirty = False
        self.held_bytes = self.backlog_bytes

    def take(self) -> tuple[Seq[int], list[TokenLogprob] | None]:
        """Everything pending, and an empty outbox. Clears the dirty mark."""
        self.is_dirty = False
        self.held_bytes = 0
        tokens: Seq[int] = self.pending or []
        self.pending = ()
        logprobs, self.logprobs = self.logprobs, None
        if self.packed is not None:
            self.packed.extend(tokens)
            tokens, self.packed = self.packed, None
        return tokens, logprobs

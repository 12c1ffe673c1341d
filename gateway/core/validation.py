"""Everything that is checked before a request may reach a rank.

A bad request must never leave the gateway: a real engine rank can lose its input thread or die on
values that its own front end would have refused (a negative temperature, a token id outside the
vocabulary, an empty prompt, a duplicate id). Each rule here protects a rank; each has a test.
"""

from gateway.config.limits import Limits
from gateway.config.schema import Model
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.token_range import TokenRange
from gateway.types import FAMILIES, Protocol, Sampling

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_MAX_PENALTY = 2.0
MAX_KNOWN_SAMPLINGS = 256
_PENALTIES = f"[{-_MAX_PENALTY:g}, {_MAX_PENALTY:g}]"


def invalid(field: str, message: str) -> GatewayError:
    """An INVALID_REQUEST error that names its field."""
    return GatewayError(Reason.INVALID_REQUEST, f"{field}: {message}", field=field)


def prompt_too_long(prompt_tokens: int, longest: int) -> GatewayError:
    """A PROMPT_TOO_LONG error with both lengths."""
    return GatewayError(
        Reason.PROMPT_TOO_LONG,
        f"the prompt has {prompt_tokens} tokens; at most {longest} leave room for one new token",
        prompt_tokens=prompt_tokens,
        limit_tokens=longest,
    )


class Validator:
    """The rules of one deployment: its model, limits and engine family."""

    def __init__(self, model: Model, limits: Limits, protocol: Protocol, ranks: int) -> None:
        self._model = model
        self._limits = limits
        self._protocol = protocol
        self._family = FAMILIES[protocol]
        self._ranks = ranks
        self._max_context_tokens = model.max_context_tokens
        self._max_id_bytes = limits.max_request_id_bytes
        self.has_known_tokens = TokenRange(model.vocab_size).holds
        self._valid: dict[int, Sampling] = {}
        """Parameters that have passed, by their identity: callers that ask for the same share the object."""

    def check(self, arrived: RequestArrived) -> None:
        """Raise the first problem as a `GatewayError`; return silently when the request may go on."""
        self.check_shape(arrived)
        self.check_tokens(arrived)

    def check_shape(self, arrived: RequestArrived) -> None:
        """The part of `check` that costs the same for every prompt."""
        if self.is_common(arrived):
            return
        self._check_identity(arrived)
        self._check_lengths(arrived)
        self._check_numbers(arrived.sampling)
        self._check_stops(arrived.sampling)
        self._remember(arrived.sampling)

    def is_common(self, arrived: RequestArrived) -> bool:
        """Whether it is one sequence for any rank with parameters that have passed: then nothing of its shape is wrong.

        Most requests are, and a few comparisons tell; everything else is looked at rule by rule.
        """
        sampling, request_id = arrived.sampling, arrived.request_id
        return (
            self._valid.get(id(sampling)) is sampling
            and 0 < len(arrived.prompt_token_ids) <= self._max_context_tokens - sampling.max_tokens
            and arrived.n == 1
            and arrived.priority == 0
            and arrived.pinned_rank is None
            and arrived.model is None
            and len(request_id) <= self._max_id_bytes
            and request_id.isascii()
        )

    def _remember(self, sampling: Sampling) -> None:
        """Nothing of them can change, and an object that is kept here shares its identity with no other."""
        if len(self._valid) >= MAX_KNOWN_SAMPLINGS:
            self._valid.clear()
        self._valid[id(sampling)] = sampling

    def check_tokens(self, arrived: RequestArrived) -> None:
        """The part of `check` that looks at every prompt token."""
        if not self.has_known_tokens(arrived.prompt_token_ids):
            raise invalid("prompt_token_ids", f"ids must be in 0..{self._model.vocab_size - 1}")

    def _check_identity(self, arrived: RequestArrived) -> None:
        limits = self._limits
        if len(arrived.request_id.encode()) > limits.max_request_id_bytes:
            raise invalid("request_id", f"longer than {limits.max_request_id_bytes} bytes")
        if arrived.model is not None and arrived.model != self._model.name:
            raise GatewayError(
                Reason.MODEL_NOT_FOUND,
                f"model {arrived.model[:128]!r} is not served here; use {self._model.name!r} or leave it unset",
                model=self._model.name,
            )
        if not 1 <= arrived.n <= limits.max_n:
            raise invalid("n", f"must be in 1..{limits.max_n}, got {arrived.n}")
        if not _INT32_MIN <= arrived.priority <= _INT32_MAX:
            raise invalid("priority", "must fit 32 bits")
        pin = arrived.pinned_rank
        if pin is not None and not 0 <= pin < self._ranks:
            raise GatewayError(
                Reason.INVALID_RANK,
                f"data_parallel_rank {pin} does not exist; valid ranks are 0..{self._ranks - 1}",
                rank=pin,
                valid_min=0,
                valid_max=self._ranks - 1,
            )

    def _check_lengths(self, arrived: RequestArrived) -> None:
        prompt_tokens, sampling = len(arrived.prompt_token_ids), arrived.sampling
        if not prompt_tokens:
            raise invalid("prompt_token_ids", "must not be empty")
        room = self._model.max_context_tokens - prompt_tokens
        if room < 1:
            raise prompt_too_long(prompt_tokens, self._model.max_context_tokens - 1)
        if sampling.max_tokens < 1:
            raise invalid("max_tokens", f"must be at least 1, got {sampling.max_tokens}")
        if sampling.max_tokens > room:
            raise invalid("max_tokens", f"{sampling.max_tokens} exceeds the {room} tokens that the context leaves")
        if not 0 <= sampling.min_tokens <= sampling.max_tokens:
            raise invalid("min_tokens", f"must be in 0..max_tokens ({sampling.max_tokens})")

    def _check_numbers(self, sampling: Sampling) -> None:
        # NaN is in no range: it compares false with both ends.
        hottest = self._family.max_temperature
        if not 0.0 <= sampling.temperature <= hottest:
            raise _out_of_range("temperature", sampling.temperature, f"[0, {hottest:g}]")
        if not 0.0 < sampling.top_p <= 1.0:
            raise _out_of_range("top_p", sampling.top_p, "(0, 1]")
        if not 0.0 <= sampling.min_p <= 1.0:
            raise _out_of_range("min_p", sampling.min_p, "[0, 1]")
        if not -_MAX_PENALTY <= sampling.frequency_penalty <= _MAX_PENALTY:
            raise _out_of_range("frequency_penalty", sampling.frequency_penalty, _PENALTIES)
        if not -_MAX_PENALTY <= sampling.presence_penalty <= _MAX_PENALTY:
            raise _out_of_range("presence_penalty", sampling.presence_penalty, _PENALTIES)
        highest = self._family.max_repetition_penalty
        if not 0.0 < sampling.repetition_penalty <= highest:
            raise _out_of_range("repetition_penalty", sampling.repetition_penalty, f"(0, {highest:g}]")
        if sampling.top_k != -1 and not 1 <= sampling.top_k <= _INT32_MAX:
            raise invalid("top_k", f"must be -1 (off) or at least 1, got {sampling.top_k}")
        if sampling.seed is not None and not _INT64_MIN <= sampling.seed <= _INT64_MAX:
            raise invalid("seed", "must fit 64 bits")

    def _check_stops(self, sampling: Sampling) -> None:
        limits = self._limits
        stops = sampling.stop_token_ids
        if len(stops) > limits.max_stop_token_ids:
            raise invalid("stop_token_ids", f"more than {limits.max_stop_token_ids} ids")
        if stops and (max(stops) >= self._model.vocab_size or min(stops) < 0):
            raise invalid("stop_token_ids", f"ids must be in 0..{self._model.vocab_size - 1}")
        logprobs = sampling.logprobs
        if logprobs is None:
            return
        if not 0 <= logprobs <= limits.max_logprobs:
            raise invalid("logprobs", f"must be in 0..{limits.max_logprobs}, got {logprobs}")
        if logprobs > 0 and not self._family.has_logprob_alternatives:
            raise GatewayError(
                Reason.UNSUPPORTED_FIELD,
                f"logprobs: alternatives are not available from {self._protocol} ranks; use 0 for the chosen token's",
                field="logprobs",
            )


def _out_of_range(field: str, value: float, interval: str) -> GatewayError:
    return invalid(field, f"must be in {interval}, got {value:g}")

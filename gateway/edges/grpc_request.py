"""What a call says: metadata and deadline for every service, and `gateway.v1` requests as events.

Ranges are the core's to check (`gateway.core.validation`); this module refuses only what can't be expressed in a
`RequestArrived`.
"""

import itertools
import re
import secrets
from typing import Any

import msgspec

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.validation import invalid, prompt_too_long
from gateway.edges.grpc_context import Metadata, RpcContext
from gateway.edges.grpc_memo import keep
from gateway.types import Sampling
from gateway.v1 import gateway_pb2

ANYONE = ""
"""The client key of all calls but GenerateMany's.

Callers aren't told apart yet: they share one space of request ids, and Abort works in it. A router aborts from any of
its connections.
"""

REQUEST_ID_KEY = "x-request-id"
RANK_PIN_KEY = "x-data-parallel-rank"
TENANT_KEY = "x-tenant-id"
CACHE_SALT_KEY = "x-cache-salt"
QUEUE_TIMEOUT_KEY = "x-queue-timeout-ms"
MAX_CACHE_SALT_BYTES = 256
MAX_SESSION_ID_BYTES = 256

_CALL_KEYS = frozenset((REQUEST_ID_KEY, RANK_PIN_KEY, TENANT_KEY, CACHE_SALT_KEY, QUEUE_TIMEOUT_KEY))
# The client's own deadline fires a little before the one that its call carried to the server.
DEADLINE_SLACK_S = 0.02
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_WHOLE_NUMBER = re.compile(r"[0-9]{1,10}")
# As a name in the configuration: every tenant that is let in can be given settings of its own there.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a call's metadata and deadline say, whatever the service. None (or "") where they say nothing.

    `deadline_at` is in seconds of the driver's clock; `queue_timeout_s` in seconds, above 0.
    """

    request_id: str | None = None
    pinned_rank: int | None = None
    deadline_at: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    queue_timeout_s: float | None = None

    def early_end(self, now: float) -> Reason:
        """Why a handler that is told to stop has to: the deadline, or the client left."""
        is_late = self.deadline_at is not None and now >= self.deadline_at - DEADLINE_SLACK_S
        return Reason.DEADLINE_EXCEEDED if is_late else Reason.CANCELLED


_PLAIN = Call()
# No request says this: it stands for an absent one until the room for it is known.
NO_MAX_TOKENS = -1


class RequestReader:
    """Turns calls and requests into `RequestArrived` for one configuration."""

    def __init__(self, config: Config) -> None:
        self.configure(config)
        self._id_prefix = f"rg-{secrets.token_hex(6)}-"
        self._id_numbers = itertools.count(1)
        self._samplings: dict[bytes, tuple[Sampling, int]] = {}

    def configure(self, config: Config) -> None:
        """Go by this configuration from the next call on."""
        self._max_context_tokens = config.model.max_context_tokens
        self._most_kv_tokens = _most_kv_tokens(config)
        self._default_deadline_s = config.limits.default_deadline_s
        self._rank_count = sum(group.ranks for group in config.groups)

    def call(self, context: RpcContext, now: float) -> Call:
        """Read metadata and deadline. `now` is in seconds of the driver's clock. Raises as `headers` does."""
        call = self.headers(context.invocation_metadata())
        remaining_s = context.time_remaining()
        return call if remaining_s is None else msgspec.structs.replace(call, deadline_at=now + remaining_s)

    def headers(self, metadata: Metadata | None) -> Call:
        """Read metadata alone.

        Raises INVALID_RANK for a bad pin, INVALID_REQUEST with the key as its field for other bad values.
        """
        # One pass: most calls carry none of these keys, and pay for no more than that.
        ours = [pair for pair in metadata or () if pair[0] in _CALL_KEYS]
        if not ours:
            return _PLAIN
        first = {name: value for name, value in reversed(ours) if isinstance(value, str)}
        if len(first) < len(ours):
            self._check_repeated(ours)
        return Call(
            request_id=first.get(REQUEST_ID_KEY),
            pinned_rank=self._pin(first.get(RANK_PIN_KEY)),
            tenant=_tenant(first.get(TENANT_KEY)),
            cache_salt=_cache_salt(first.get(CACHE_SALT_KEY)),
            queue_timeout_s=_queue_timeout_s(first.get(QUEUE_TIMEOUT_KEY)),
        )

    def request_id(self, given: str, call: Call) -> str:
        """The field, else the metadata, else a new one. It is echoed in metadata, so it must fit there."""
        request_id = given or call.request_id
        if not request_id:
            return f"{self._id_prefix}{next(self._id_numbers)}"
        if not (request_id.isascii() and request_id.isprintable()) or request_id != request_id.strip():
            raise invalid("request_id", "must be printable ASCII without spaces at its ends")
        return request_id

    def pin(self, field: int | None, call: Call) -> int | None:
        """The pin of the request and of the call's metadata, which must agree."""
        if call.pinned_rank is None or field == call.pinned_rank:
            return field
        if field is not None:
            raise self._invalid_rank(
                f"data_parallel_rank {field} and {RANK_PIN_KEY} {call.pinned_rank} disagree; send one of them", field
            )
        return call.pinned_rank

    def prompt(self, token_ids: Any) -> list[int]:
        """A copy of a message's repeated field. Raises PROMPT_TOO_LONG before it makes one that is too long."""
        if len(token_ids) >= self._max_context_tokens:
            raise prompt_too_long(len(token_ids), self._max_context_tokens - 1)
        prompt: list[int] = token_ids[:]
        return prompt

    def with_room(self, sampling: Sampling, prompt_tokens: int) -> Sampling:
        """Parameters without `max_tokens` for a prompt: what the context and the budgets leave behind it.

        At least 1, so that the prompt is at fault.
        """
        return msgspec.structs.replace(sampling, max_tokens=max(1, self._most_kv_tokens - prompt_tokens))

    def deadline_at(self, call: Call, now: float) -> float | None:
        """A request's deadline: its call's, else the default from `now` on."""
        if call.deadline_at is not None or self._default_deadline_s is None:
            return call.deadline_at
        return now + self._default_deadline_s

    def generate(
        self,
        request: gateway_pb2.GenerateRequest,
        call: Call,
        now: float,
        *,
        client_key: str,
        arrived_at_unix_s: float,
        sink: Any,
    ) -> RequestArrived:
        """Decode a `gateway.v1` request. Raises `GatewayError` for what no event can express."""
        prompt = self.prompt(request.prompt_token_ids)
        key = request.sampling.SerializeToString()
        sampling, n = self._samplings.get(key) or self._read_sampling(key, request.sampling)
        if sampling.max_tokens == NO_MAX_TOKENS:
            sampling = self.with_room(sampling, len(prompt))
        session_id = request.session_id
        if session_id and len(session_id.encode()) > MAX_SESSION_ID_BYTES:
            raise invalid("session_id", f"longer than {MAX_SESSION_ID_BYTES} bytes")
        return RequestArrived(
            client_key=client_key,
            request_id=self.request_id(request.request_id, call),
            prompt_token_ids=prompt,
            sampling=sampling,
            n=n,
            model=request.model if request.HasField("model") else None,
            pinned_rank=self.pin(_optional(request, "data_parallel_rank"), call),
            priority=request.priority,
            deadline_at=self.deadline_at(call, now),
            tenant=call.tenant,
            session_id=session_id,
            allow_resume=request.allow_resume if request.HasField("allow_resume") else None,
            cache_salt=call.cache_salt,
            use_cache=not request.no_cache,
            queue_timeout_s=call.queue_timeout_s,
            arrived_at_unix_s=arrived_at_unix_s,
            sink=sink,
        )

    def _read_sampling(self, key: bytes, message: gateway_pb2.Sampling) -> tuple[Sampling, int]:
        read = read_sampling(message, NO_MAX_TOKENS), message.n if message.HasField("n") else 1
        keep(self._samplings, key, read)
        return read

    def _check_repeated(self, metadata: Metadata) -> None:
        """Repeating a value is fine, contradicting oneself is not. Of request ids the first counts."""
        problem = "given more than once, with different values"
        for key in _CALL_KEYS - {REQUEST_ID_KEY}:
            if len({value for name, value in metadata if name == key}) <= 1:
                continue
            if key == RANK_PIN_KEY:
                raise self._invalid_rank(f"{key} is {problem}", None)
            raise invalid(key, problem)

    def _pin(self, text: str | None) -> int | None:
        if text is None:
            return None
        if _INTEGER.fullmatch(text) is None:
            raise self._invalid_rank(f"{RANK_PIN_KEY} must be a whole number, got {text[:32]!r}", text)
        return int(text)

    def _invalid_rank(self, message: str, rank: object) -> GatewayError:
        last = self._rank_count - 1
        return GatewayError(
            Reason.INVALID_RANK, f"{message}; valid ranks are 0..{last}", rank=rank, valid_min=0, valid_max=last
        )


def _most_kv_tokens(config: Config) -> int:
    """The longest sequence, prompt included, that is let in at all: in the model's context and within the budgets."""
    context = config.model.max_context_tokens
    most = [context if group.budget.max_kv_tokens is None else group.budget.max_kv_tokens for group in config.groups]
    return min(context, max(most), config.admission.max_kv_tokens or context)


def read_sampling(sampling: gateway_pb2.Sampling, room: int) -> Sampling:
    """`gateway.v1.Sampling` in the gateway's terms; `room` stands in for an absent max_tokens."""
    values: dict[str, Any] = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    values.pop("n", None)
    values["stop_token_ids"] = tuple(sampling.stop_token_ids)
    values.setdefault("max_tokens", room)
    return Sampling(**values)


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _tenant(text: str | None) -> str:
    if text is None:
        return ""
    if _TENANT.fullmatch(text) is None:
        raise invalid(TENANT_KEY, "must be 1 to 128 letters, digits or . _ / - with a letter or digit first")
    return text


def _cache_salt(text: str | None) -> str:
    if text is None:
        return ""
    if len(text.encode()) > MAX_CACHE_SALT_BYTES:
        raise invalid(CACHE_SALT_KEY, f"longer than {MAX_CACHE_SALT_BYTES} bytes")
    return text


def _queue_timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    if _WHOLE_NUMBER.fullmatch(text) is None or not int(text):
        raise invalid(QUEUE_TIMEOUT_KEY, f"must be a whole number of milliseconds above 0, got {text[:32]!r}")
    return int(text) / 1e3

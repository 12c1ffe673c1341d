"""The errors that the router itself ends or refuses requests with, in one place for their wording."""

from collections import Counter

from gateway.core.decisions import Decision
from gateway.core.eligibility import GROUP_BUDGET, STATE_OF_CODE
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.queue_timeouts import WaitLimit
from gateway.core.request import Attempt, Sequence

# Another rank can take it at once; the short wait only spreads a lost rank's callers.
_RETRY_ELSEWHERE_S = 0.1
_RETRY_REFUSED_S = 1.0
_RETRY = "; retry"

_ENDINGS = {
    Reason.CANCELLED: "the caller cancelled the request",
    Reason.ABORTED: "the request was aborted by an Abort call",
    Reason.DEADLINE_EXCEEDED: "the deadline passed before the request ended",
    Reason.MAX_AGE_EXCEEDED: "the request reached limits.max_request_age_s",
    Reason.SLOW_READER: "the reader stood still, or fell behind the per-stream buffer limit; read faster or raise the limit",
    Reason.DRAINING: "the gateway is shutting down; retry on another one",
    Reason.INTERNAL: "the gateway failed while it handled the request; its log has the details",
}


def ended_by(reason: Reason) -> GatewayError:
    """The request ends (or is refused) for a reason that needs no more facts."""
    return GatewayError(reason, _ENDINGS[reason], retryable=reason is Reason.DRAINING)


def no_rank(decision: Decision, arrived: RequestArrived, retry_after_s: float) -> GatewayError:
    """No rank was eligible; the decision's record shows why for each of them."""
    reason = decision.refusal or Reason.NO_ELIGIBLE_RANK
    facts: dict[str, object] = {"decision_id": decision.id}
    if arrived.pinned_rank is not None:
        facts["rank"] = arrived.pinned_rank
    is_over_budget = GROUP_BUDGET in (decision.codes or b"")
    message = {
        Reason.PROMPT_TOO_LONG: "the prompt exceeds what any rank can hold",
        Reason.KV_TOO_SMALL: f"the prompt and max_tokens, {_kv_tokens(decision)} together, exceed the KV tokens that any"
        " group of ranks may use; ask for fewer tokens"
        if is_over_budget
        else "the prompt exceeds the KV capacity of every rank",
        Reason.KV_FULL: "no rank has enough free KV tokens for the prompt; retry later",
        Reason.RANKS_FULL: "every rank that could take the request is at its limit or not taking more; retry later",
        Reason.PINNED_RANK_UNAVAILABLE: f"rank {arrived.pinned_rank} is not READY{_states(decision)}; retry later or drop"
        " the pin",
    }.get(reason, f"no rank that could take the request is READY{_states(decision)}; retry later")
    is_transient = reason not in (Reason.PROMPT_TOO_LONG, Reason.KV_TOO_SMALL)
    error = GatewayError(reason, message, retryable=is_transient, retry_after_s=retry_after_s if is_transient else None)
    error.facts.update(facts)
    return error


def too_many_sequences(decision: Decision, arrived: RequestArrived, most: int) -> GatewayError:
    """Mode direct: a request whose sequences go to ranks together has more of them than all ranks could take."""
    return GatewayError(
        decision.refusal or Reason.RANKS_FULL,
        f"n is {arrived.n}, and even with nothing else in flight the ranks that could take such a request take {most}:"
        " ask for fewer sequences or tokens",
        n=arrived.n,
        limit=most,
        decision_id=decision.id,
    )


def no_rank_for_long(wait_s: float, retry_after_s: float) -> GatewayError:
    """The request waited for any rank to be READY."""
    return GatewayError(
        Reason.NO_ELIGIBLE_RANK,
        f"no rank that could take the request was READY for {wait_s:g} s; retry later",
        retryable=True,
        retry_after_s=retry_after_s,
        waited_s=wait_s,
    )


def _states(decision: Decision) -> str:
    """What the ranks that were looked at are instead of READY: the one state of one rank, else how many are what."""
    counts = Counter(decision.codes or b"")
    found = [(STATE_OF_CODE[code], count) for code, count in sorted(counts.items()) if code in STATE_OF_CODE]
    if not found:
        return ""
    if decision.pinned is not None or decision.size == 1:
        return f" ({found[0][0]})"
    return f" ({', '.join(f'{count} {state}' for state, count in found)})"


def _kv_tokens(decision: Decision) -> int:
    _, prompt_tokens, _, _, max_tokens, *_ = decision.request
    return int(prompt_tokens + max_tokens)


def queue_timeout(waited_s: float, limit: WaitLimit, retry_after_s: float) -> GatewayError:
    """The request waited too long for a rank."""
    whose = "the call's own time-out" if limit.is_calls else "the queue's time-out"
    return GatewayError(
        Reason.QUEUE_TIMEOUT,
        f"no rank had room for {waited_s:.3f} s, and {whose} is {limit.wait_s:g} s; retry later",
        retryable=True,
        retry_after_s=retry_after_s,
        waited_ms=round(waited_s * 1e3, 3),
        timeout_of="call" if limit.is_calls else "queue",
        timeout_s=round(limit.wait_s, 6),
    )


def rank_lost(rank: int, cause: str) -> GatewayError:
    """The rank that served the request is gone."""
    return GatewayError(
        Reason.RANK_LOST,
        f"rank {rank} was lost ({cause}){_RETRY}",
        retryable=True,
        retry_after_s=_RETRY_ELSEWHERE_S,
        rank=rank,
    )


def send_failed(rank: int, cause: str) -> GatewayError:
    """The rank never got the request."""
    return GatewayError(
        Reason.SEND_FAILED,
        f"rank {rank} did not take the request ({cause}){_RETRY}",
        retryable=True,
        retry_after_s=_RETRY_ELSEWHERE_S,
        rank=rank,
    )


def with_progress(error: GatewayError, sequence: Sequence) -> GatewayError:
    """The same loss, with how far the sequence had come."""
    error.facts["delivered_tokens"] = sequence.completion_tokens
    error.facts["attempts"] = sequence.attempts
    return error


def nobody_else(loss: GatewayError, why: GatewayError, sequence: Sequence) -> GatewayError:
    """A queued sequence that had lost its rank found no other one: the loss is what ended it, `why` only says for how long."""
    text = loss.message.removesuffix(_RETRY)
    error = GatewayError(
        loss.reason,
        f"{text}, and no other rank could go on: {why.message}",
        retryable=loss.retryable,
        retry_after_s=why.retry_after_s or loss.retry_after_s,
        **(why.facts | loss.facts),
    )
    return with_progress(error, sequence)


def refused_by_engine(attempt: Attempt, finish: str) -> GatewayError:
    """The engine ended the attempt with something else than stop or length."""
    after = f"after {attempt.tokens_out} tokens" if attempt.tokens_out else "before its first token"
    if finish == "error":
        return GatewayError(
            Reason.ENGINE_ERROR,
            f"rank {attempt.rank} failed on the request {after}; its log has the cause",
            rank=attempt.rank,
        )
    # Capacity, an evicted cache, a pause: the wire does not say which, and each can pass.
    return GatewayError(
        Reason.ENGINE_REJECTED,
        f"rank {attempt.rank} gave the request up {after}; retry later, and look into its log if that does not help",
        retryable=True,
        retry_after_s=_RETRY_REFUSED_S,
        rank=attempt.rank,
    )


def overrun(attempt: Attempt) -> GatewayError:
    """The engine sent more tokens than it was asked for: it is not generating what the client wanted."""
    return GatewayError(
        Reason.ENGINE_ERROR,
        f"rank {attempt.rank} sent more than the {attempt.max_tokens} tokens that were asked for; check the engine",
        rank=attempt.rank,
        max_tokens=attempt.max_tokens,
    )


def ended_short(attempt: Attempt, tokens_out: int) -> GatewayError:
    """The engine said that it had generated all that it was asked for, and less arrived."""
    return GatewayError(
        Reason.DATA_LOSS,
        f"rank {attempt.rank} ended at {attempt.max_tokens} tokens, and {tokens_out} arrived",
        rank=attempt.rank,
        delivered_tokens=attempt.tokens_out,
    )


def slow_reader(limit_bytes: int) -> GatewayError:
    """More output waits for the client than is kept for one."""
    return GatewayError(
        Reason.SLOW_READER,
        f"more than {limit_bytes} bytes of output wait for the reader; read faster or raise the limit",
        limit_bytes=limit_bytes,
    )

"""One sequence that waits in the gateway for a rank."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.core.request import Sequence
    from gateway.core.tenants import Account


class Entry:
    """A queued sequence. `number` is the gateway-wide arrival number: equal keys are served in its order.

    `key` is the queue's own (seconds but for `hrrn`; 0 for `fcfs`). `expires_at` is when the queue's time-out strikes,
    in seconds of the core's clock; `held_since` when `hold_ratio` began to keep it back; `is_delayed` that its
    time-out has passed and it goes behind all that are in time.
    """

    __slots__ = (
        "account",
        "enqueued_at",
        "expires_at",
        "held_since",
        "is_delayed",
        "is_queued",
        "key",
        "max_tokens",
        "number",
        "pinned_rank",
        "prefill_ms",
        "priority",
        "prompt_tokens",
        "sequence",
        "service_tokens",
    )

    def __init__(
        self,
        sequence: "Sequence",
        account: "Account",
        number: int,
        now: float,
        *,
        prefill_ms: float,
        service_tokens: float,
    ) -> None:
        arrived = sequence.request.arrived
        self.sequence = sequence
        self.account = account
        self.number = number
        self.priority = arrived.priority
        self.pinned_rank = arrived.pinned_rank
        self.prompt_tokens = len(arrived.prompt_token_ids) + sequence.completion_tokens
        self.max_tokens = arrived.sampling.max_tokens - sequence.completion_tokens
        self.prefill_ms = prefill_ms
        self.service_tokens = service_tokens
        """Prompt and expected output tokens: what the tenant's share is measured in."""
        self.enqueued_at = now
        self.expires_at: float | None = None
        self.held_since: float | None = None
        self.key = 0.0
        self.is_delayed = False
        self.is_queued = False

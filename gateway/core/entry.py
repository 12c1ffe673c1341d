"""One sequence that waits in the gateway for a rank."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gateway.core.errors import GatewayError
    from gateway.core.request import Sequence
    from gateway.core.tenants import Account


class Narrow(NamedTuple):
    """A lane of the queue for what some ranks only could ever take: bit r of the mask is rank r."""

    mask: int


Lane = int | Narrow | None
"""Where an entry waits: with others of its pin, or of what the same ranks could ever take; None: any rank could."""


class Entry:
    """A queued sequence. `number` is the gateway-wide arrival number: equal keys are served in its order.

    `enqueued_at` is what it is ordered by, `queued_at` when its wait began: they differ for a sequence that lost its rank,
    which stands where it stood before; `loss` is the error of that. All are seconds of the core's clock.

    `key` is the queue's own (seconds but for `hrrn`; 0 for `fcfs`). `expires_at` is when the queue's time-out strikes,
    `gives_up_at` when the call's own ends the wait whatever the queue's does;
    `held_since` when `hold_ratio` began to keep it back; `is_delayed` that its time-out has passed and it goes behind
    all that are in time.
    """

    __slots__ = (
        "account",
        "enqueued_at",
        "expires_at",
        "gives_up_at",
        "held_since",
        "is_delayed",
        "is_queued",
        "key",
        "lane",
        "loss",
        "max_tokens",
        "number",
        "pinned_rank",
        "prefill_ms",
        "priority",
        "prompt_tokens",
        "queued_at",
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
        self.lane: Lane = arrived.pinned_rank
        self.prompt_tokens = len(arrived.prompt_token_ids) + sequence.completion_tokens
        self.max_tokens = arrived.sampling.max_tokens - sequence.completion_tokens
        self.prefill_ms = prefill_ms
        self.service_tokens = service_tokens
        """Prompt and expected output tokens: what the tenant's share is measured in."""
        self.enqueued_at = self.queued_at = now
        self.loss: GatewayError | None = None
        self.expires_at: float | None = None
        self.gives_up_at: float | None = None
        self.held_since: float | None = None
        self.key = 0.0
        self.is_delayed = False
        self.is_queued = False

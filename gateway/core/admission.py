"""Bounded admission: what may be accepted, and when a refused caller may come back.

Budgets count sequences from their acceptance to their end, queued or in flight: requests, prompt tokens, and KV tokens
of the whole generation. `check` and `reserve` run in one synchronous step, so nothing can come between them; `give_back`
returns a request's sequences as they end. A bound on ranks and groups is a filter of the policy instead, since another
rank may have room.
"""

from collections.abc import Iterable

from gateway.config.scheduling import Admission as Settings
from gateway.config.scheduling import Tenant
from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.request import Request
from gateway.core.tenants import Account, Tenants

MIN_RETRY_S = 0.05
MAX_RETRY_S = 5.0
_SMOOTHING = 0.05
_ANYBODY_HELPS = (Reason.GATEWAY_FULL, Reason.QUEUE_FULL, Reason.RANKS_FULL, Reason.KV_FULL)


def kv_tokens(arrived: RequestArrived) -> int:
    """KV tokens of one sequence at its end."""
    return len(arrived.prompt_token_ids) + arrived.sampling.max_tokens


def _is_scarce(used: int, limit: int) -> bool:
    """Whether so much of a budget is used that each tenant is held to its share of it."""
    return 2 * used > limit


def _bounds_tokens(settings: Settings | Tenant) -> bool:
    return settings.max_prompt_tokens is not None or settings.max_kv_tokens is not None


class Admission:
    """The budgets of the gateway and of its tenants."""

    def __init__(self, config: Config) -> None:
        self._use(config)
        self.tenants = Tenants(config.admission.tenants)
        self.sequences = 0
        self.prompt_tokens = 0
        self.kv_tokens = 0
        # Sequences that were refused lately and are expected back: each of them needs a release of its own.
        self._expected_back = 0
        self._mean_gap_s: float | None = None
        self._last_release_at: float | None = None

    def configure(self, config: Config, live: Iterable[Request]) -> None:
        """Go by other budgets. What `live` requests have of them stays charged, to the accounts it is charged to."""
        self._use(config)
        self.tenants.configure(config.admission.tenants)
        # Tokens may not have been counted until now.
        charged = [(each, each.account) for each in live if not each.is_settled and each.account is not None]
        self.prompt_tokens = self.kv_tokens = 0
        for _, account in charged:
            account.prompt_tokens = account.kv_tokens = 0
        for request, account in charged if self._counts_tokens else ():
            self._charge_tokens(request, account, request.unfinished)

    def _use(self, config: Config) -> None:
        settings = config.admission
        self._settings = settings
        self._has_queue = config.scheduling.mode != "direct"
        self._level_depths = {
            level.priority: level.max_depth for level in config.scheduling.queue.levels if level.max_depth is not None
        }
        tenants = (settings.tenants.default, *settings.tenants.named.values())
        # Most configurations bound sequences only, and then nobody counts tokens.
        self._counts_tokens = _bounds_tokens(settings) or any(map(_bounds_tokens, tenants))
        bounds_tenants = any(tenant.max_in_flight is not None for tenant in tenants)
        self.plenty = 0 if self._counts_tokens or bounds_tenants else settings.max_in_flight // 2
        """Up to so many sequences nobody is held to anything."""

    def check(self, arrived: RequestArrived, now: float, *, queued: int = 0, queued_at_level: int = 0) -> Account:
        """The account to charge. Raises `GatewayError` with the budget that the request does not fit in."""
        n, limit = arrived.n, self._settings.max_in_flight
        if self._counts_tokens or self.sequences + n > limit:
            self._check_gateway(arrived)
        account = self.tenants.account(arrived.tenant, now)
        # Nobody is held to anything while there is plenty, unless it has bounds of its own.
        if self._counts_tokens or 2 * (self.sequences + n) > limit or account.settings.max_in_flight is not None:
            self._check_tenant(arrived, account, now)
        if self._has_queue:
            self._check_queue(arrived, account, now, queued, queued_at_level)
        return account

    def reserve(self, request: Request, account: Account) -> None:
        """Charge all sequences of an accepted request."""
        count = request.arrived.n
        self.sequences += count
        account.in_flight += count
        if self._counts_tokens:
            self._charge_tokens(request, account, count)
        request.account = account

    def give_back(self, request: Request, count: int, now: float) -> None:
        """Return the budgets of `count` sequences of the request, which have ended."""
        account = request.account
        assert account is not None
        self.sequences -= count
        account.in_flight -= count
        if self._counts_tokens:
            self._charge_tokens(request, account, -count)
        if self._expected_back:
            # Whoever waits longest takes the place; with nothing live there is room for all of them.
            self._expected_back = max(0, self._expected_back - count) if self.sequences else 0
        last = self._last_release_at
        self._last_release_at = now
        if last is None:
            return
        gap, weight, mean = now - last, _SMOOTHING, self._mean_gap_s
        if count > 1:
            # Sequences that end together share the gap: as many samples, which are all the same.
            gap, weight = gap / count, 1 - (1 - _SMOOTHING) ** count
        self._mean_gap_s = gap if mean is None else mean + weight * (gap - mean)

    def retry_after_s(self, needed: int) -> float:
        """Seconds until `needed` sequences are likely to have ended, beside those that callers refused earlier wait for.

        From the recent rate; bounded. So callers that are refused together come back one after the other.
        """
        if self._mean_gap_s is None:
            return 1.0
        return min(MAX_RETRY_S, max(MIN_RETRY_S, (needed + self._expected_back) * self._mean_gap_s))

    def note_refusal(self, error: GatewayError, count: int) -> None:
        """A caller with `count` sequences was refused. It is expected back where a release of anybody's can help.

        Only as long as the hint is below its bound, so what is counted is bounded too.
        """
        hint_s = error.retry_after_s
        if self._mean_gap_s is not None and error.reason in _ANYBODY_HELPS and hint_s is not None:
            self._expected_back += count if hint_s < MAX_RETRY_S else 0

    def check_sums(self, live: list[Request]) -> None:
        """Assert that the budgets equal the sums over the live requests; for tests."""
        unfinished = [(request, request.unfinished) for request in live if not request.is_settled]
        assert self.sequences == sum(count for _, count in unfinished)
        if self._counts_tokens:
            assert self.prompt_tokens == sum(len(r.arrived.prompt_token_ids) * count for r, count in unfinished)
            assert self.kv_tokens == sum(kv_tokens(r.arrived) * count for r, count in unfinished)
        by_account: dict[Account, int] = {}
        for request, count in unfinished:
            assert request.account is not None
            by_account[request.account] = by_account.get(request.account, 0) + count
        for account, count in by_account.items():
            assert account.in_flight == count, account.name

    def _charge_tokens(self, request: Request, account: Account, count: int) -> None:
        prompt, kv = count * len(request.arrived.prompt_token_ids), count * kv_tokens(request.arrived)
        self.prompt_tokens += prompt
        self.kv_tokens += kv
        account.prompt_tokens += prompt
        account.kv_tokens += kv

    def _check_gateway(self, arrived: RequestArrived) -> None:
        settings, n = self._settings, arrived.n
        if self.sequences + n > settings.max_in_flight:
            raise self._gateway_full("sequences", self.sequences, n, settings.max_in_flight)
        if not self._counts_tokens:
            return
        limit = settings.max_prompt_tokens
        if limit is not None:
            wanted = n * len(arrived.prompt_token_ids)
            if self.prompt_tokens + wanted > limit:
                raise self._gateway_full("prompt_tokens", self.prompt_tokens, wanted, limit)
        limit = settings.max_kv_tokens
        if limit is not None:
            wanted = n * kv_tokens(arrived)
            if self.kv_tokens + wanted > limit:
                raise self._gateway_full("kv_tokens", self.kv_tokens, wanted, limit)

    def _gateway_full(self, budget: str, used: int, wanted: int, limit: int) -> GatewayError:
        is_transient = wanted <= limit
        return GatewayError(
            Reason.GATEWAY_FULL,
            f"{used} {budget} are in flight and {wanted} more exceed the limit of {limit}; retry later"
            if is_transient
            else f"the request needs {wanted} {budget}, more than the limit of {limit}: it can never be accepted",
            retryable=is_transient,
            retry_after_s=self._retry_for(used + wanted - limit, used) if is_transient else None,
            budget=budget,
            in_flight=used,
            wanted=wanted,
            limit=limit,
        )

    def _check_tenant(self, arrived: RequestArrived, account: Account, now: float) -> None:
        settings, n, limit = account.settings, arrived.n, self._settings.max_in_flight
        if _is_scarce(self.sequences + n, limit):
            share = max(n, int(self.tenants.share(account, now) * limit))
            self._check_tenant_budget(account, "share", account.in_flight, n, share)
        if settings.max_in_flight is not None:
            self._check_tenant_budget(account, "sequences", account.in_flight, n, settings.max_in_flight)
        if not self._counts_tokens:
            return
        if settings.max_prompt_tokens is not None:
            wanted = n * len(arrived.prompt_token_ids)
            used = account.prompt_tokens
            self._check_tenant_budget(account, "prompt_tokens", used, wanted, settings.max_prompt_tokens)
        if settings.max_kv_tokens is not None:
            wanted = n * kv_tokens(arrived)
            self._check_tenant_budget(account, "kv_tokens", account.kv_tokens, wanted, settings.max_kv_tokens)

    def _check_tenant_budget(self, account: Account, budget: str, used: int, wanted: int, limit: int) -> None:
        if used + wanted <= limit:
            return
        is_transient = wanted <= limit
        raise GatewayError(
            Reason.TENANT_LIMIT,
            f"tenant {account.name!r} has {used} in its budget of {limit} ({budget}) and wants {wanted} more"
            + ("; retry later" if is_transient else ": it can never be accepted"),
            retryable=is_transient,
            retry_after_s=self._retry_for(used + wanted - limit, used) if is_transient else None,
            tenant=account.name,
            budget=budget,
            in_flight=used,
            wanted=wanted,
            limit=limit,
        )

    def _check_queue(
        self, arrived: RequestArrived, account: Account, now: float, queued: int, queued_at_level: int
    ) -> None:
        n, limit = arrived.n, self._settings.max_queue_depth
        if queued + n > limit:
            raise self._queue_full(f"{queued} sequences are queued, the limit is {limit}", queued, limit, n)
        level = self._level_depths.get(arrived.priority)
        if level is not None and queued_at_level + n > level:
            text = f"{queued_at_level} sequences of priority {arrived.priority} are queued, the limit is {level}"
            raise self._queue_full(text, queued_at_level, level, n)
        if _is_scarce(queued + n, limit):
            share = max(n, int(self.tenants.share(account, now) * limit))
            self._check_tenant_budget(account, "queue_share", account.queued, n, share)
        depth = account.settings.max_queue_depth
        if depth is not None:
            self._check_tenant_budget(account, "queue_depth", account.queued, n, depth)

    def _queue_full(self, text: str, queued: int, limit: int, n: int) -> GatewayError:
        is_transient = n <= limit
        return GatewayError(
            Reason.QUEUE_FULL,
            f"{text}; " + ("retry later" if is_transient else f"{n} can never be accepted"),
            retryable=is_transient,
            retry_after_s=self.retry_after_s(queued + n - limit) if is_transient else None,
            queue_depth=queued,
            limit=limit,
        )

    def _retry_for(self, missing: int, used: int) -> float:
        """Time until `missing` of `used` units are likely free, if every live sequence holds as much as the mean."""
        if not self.sequences or not used:
            return self.retry_after_s(1)
        return self.retry_after_s(max(1, round(missing * self.sequences / used)))

"""Tenants: whom work is charged to, and which share of the gateway is theirs.

Rules:

* The set of accounts is bounded. Tenants with settings of their own and the tenant "" (calls that name none) always have
  an account; others get one when they show up and lose it once they are idle. When all are taken, newcomers share one
  account and so compete among themselves for one share.
* A tenant is active while something of it is queued or in flight, and for `active_s` after its last request. Admission
  writes the counts without telling anybody, so they are looked at when an account falls due, not by a scan: a tenant
  may count as active for up to `RECHECK_S` longer than it is.
* Weights are added and later subtracted again, so they are whole numbers of a small unit.
"""

from heapq import heappop, heappush, heapreplace
from math import inf

from gateway.config.scheduling import Tenant
from gateway.config.scheduling import Tenants as Settings

OVERFLOW = "(others)"
"""Name of the account of tenants that are not told apart."""
RECHECK_S = 1.0
WEIGHT_UNITS = 1 << 32
"""Units of weight 1. A weight of 1e-6 is still exact to 0.03 %."""
_MAX_WEIGHT = 1e9


class Account:
    """What one tenant has in the gateway.

    `in_flight`, `prompt_tokens`, `kv_tokens` (sequences and tokens, queued ones included) and `queued` are written by
    admission and the queue's owner; `tag`, the virtual time of its next service, by the queue (`queue_turns`). The rest
    is `Tenants`' own.
    """

    __slots__ = (
        "in_flight",
        "is_active",
        "kv_tokens",
        "last_seen_at",
        "name",
        "prompt_tokens",
        "queued",
        "settings",
        "tag",
        "weight",
        "weight_units",
    )

    def __init__(self, name: str, settings: Tenant) -> None:
        self.name = name
        self.use(settings)
        self.in_flight = 0
        self.prompt_tokens = 0
        self.kv_tokens = 0
        self.queued = 0
        self.tag = 0
        self.last_seen_at = -inf
        self.is_active = False

    def use(self, settings: Tenant) -> None:
        """Go by these settings; what is charged stays."""
        self.settings = settings
        self.weight = settings.weight
        self.weight_units = max(1, int(min(settings.weight, _MAX_WEIGHT) * WEIGHT_UNITS))

    @property
    def is_busy(self) -> bool:
        """Whether something of it is queued or in flight."""
        return bool(self.in_flight or self.queued or self.prompt_tokens or self.kv_tokens)


class Tenants:
    """The accounts. Each call costs O(log n) at most, over many calls; none raises."""

    def __init__(self, settings: Settings) -> None:
        self._default = settings.default
        self._max_tracked = settings.max_tracked
        self._active_s = settings.active_s
        self._lasting = {name: Account(name, tenant) for name, tenant in settings.named.items()}
        self._lasting.setdefault("", Account("", settings.default))
        self._tracked: dict[str, Account] = {}
        self._overflow = Account(OVERFLOW, settings.default)
        # One item per active account: when to see whether it still is. The number breaks ties.
        self._due: list[tuple[float, int, Account]] = []
        self._active_units = 0
        self._number = 0
        self.overflowed = 0
        """Calls that got the shared account."""

    def configure(self, settings: Settings) -> None:
        """Go by other settings. Every account goes on with what is charged to it.

        A tenant that is named no more is one of those that show up; one that is named now keeps the account it has.
        """
        self._default, self._max_tracked, self._active_s = settings.default, settings.max_tracked, settings.active_s
        wanted = {**settings.named}
        wanted.setdefault("", settings.default)
        known = {**self._tracked, **self._lasting}
        self._lasting = {name: known.get(name) or Account(name, each) for name, each in wanted.items()}
        # What lasted and isn't active would never be swept away.
        self._tracked = {name: each for name, each in known.items() if name not in wanted and each.is_active}
        for name, account in self._lasting.items():
            account.use(wanted[name])
        for account in (*self._tracked.values(), self._overflow):
            account.use(settings.default)
        self._active_units = sum(account.weight_units for _, _, account in self._due)

    def account(self, name: str, now: float) -> Account:
        """The tenant's account, from now on active. An unnamed tenant gets the shared one when there are too many."""
        if self._due and self._due[0][0] <= now:
            self._sweep(now)
        account = self._lasting.get(name) or self._tracked.get(name)
        if account is None:
            account = self._track(name)
        account.last_seen_at = now
        if not account.is_active:
            account.is_active = True
            self._active_units += account.weight_units
            self._number += 1
            heappush(self._due, (now + self._active_s, self._number, account))
        return account

    def share(self, account: Account, now: float) -> float:
        """The account's weight over the sum of those of all active accounts and itself; in (0, 1]."""
        self._sweep(now)
        total = self._active_units
        if not account.is_active:
            total += account.weight_units
        return account.weight_units / total

    @property
    def named(self) -> list[Account]:
        """The accounts that the configuration names, and that of calls without a tenant; for metrics."""
        return list(self._lasting.values())

    def active(self) -> list[Account]:
        """The active accounts by name, as of the last call; for listings."""
        return sorted((item[2] for item in self._due), key=lambda account: account.name)

    def _track(self, name: str) -> Account:
        if len(self._tracked) >= self._max_tracked:
            self.overflowed += 1
            return self._overflow
        account = self._tracked[name] = Account(name, self._default)
        return account

    def _sweep(self, now: float) -> None:
        """Look at the accounts that are due: still active, or not any more."""
        due = self._due
        while due and due[0][0] <= now:
            _, number, account = due[0]
            active_until = account.last_seen_at + self._active_s
            if active_until > now:
                heapreplace(due, (active_until, number, account))
            elif account.is_busy:
                heapreplace(due, (now + RECHECK_S, number, account))
            else:
                heappop(due)
                self._retire(account)

    def _retire(self, account: Account) -> None:
        account.is_active = False
        self._active_units -= account.weight_units
        # By identity: a tenant may call itself what the shared account is called.
        if self._tracked.get(account.name) is account:
            del self._tracked[account.name]

"""A queue, its tenants and entries in one line each, for tests of what waits."""

from types import SimpleNamespace

import msgspec

from gateway.config.scheduling import Queue, Slo
from gateway.config.scheduling import Tenants as TenantSettings
from gateway.core.entry import Entry
from gateway.core.queue import RequestQueue
from gateway.core.slo import SloTargets
from gateway.core.tenants import Tenants


class AnyLane:
    """Every pin and none."""

    def __contains__(self, pin):
        return True


ANY = AnyLane()


class Waiting:
    """A queue with `settings`, a clock that moves when told, and arrival numbers."""

    def __init__(self, weights=None, slo=None, **settings):
        self.queue = RequestQueue(
            msgspec.convert(settings, Queue, strict=False), SloTargets(msgspec.convert(slo or {}, Slo, strict=False))
        )
        named = {name: {"weight": weight} for name, weight in (weights or {}).items()}
        # Nobody counts what is queued here, so nobody may be taken for idle.
        self.tenants = Tenants(msgspec.convert({"named": named, "active_s": 1e9}, TenantSettings, strict=False))
        self.now = 100.0
        self._number = 0

    def entry(self, tenant="", *, prefill_ms=10.0, prompt=10, tokens=100, priority=0, pin=None, timeout_s=None):
        """An entry that isn't queued."""
        self._number += 1
        arrived = SimpleNamespace(
            sampling=SimpleNamespace(max_tokens=16),
            priority=priority,
            pinned_rank=pin,
            prompt_token_ids=range(prompt),
            queue_timeout_s=timeout_s,
        )
        sequence = SimpleNamespace(completion_tokens=0, request=SimpleNamespace(arrived=arrived))
        account = self.tenants.account(tenant, self.now)
        return Entry(sequence, account, self._number, self.now, prefill_ms=prefill_ms, service_tokens=tokens)

    def push(self, tenant="", **more):
        entry = self.entry(tenant, **more)
        self.queue.push(entry, self.now)
        self.queue.check()
        return entry

    def order(self, lanes=ANY):
        """All that would be served, as a list."""
        return list(self.queue.in_order(self.now, lanes))

    def serve(self, lanes=ANY):
        """Take the next entry, as a caller with room for one does; None if there is none."""
        entry = next(self.queue.in_order(self.now, lanes), None)
        if entry is not None:
            self.queue.taken(entry)
        return entry

"""Keys of the service orders: within one priority, the smaller key goes first."""

from gateway.config.scheduling import Queue
from gateway.core.entry import Entry
from gateway.core.slo import SloTargets

Ranked = tuple[int, float, int, Entry]
"""Priority, key, number, entry."""
HRRN_OFFSET_S = 0.010
"""Added to wait and prefill: keeps the ratio of tiny prompts from running away after a few milliseconds."""
_MAX_ALPHA = 1e9
"""Infinity times a prefill of 0 would have no place in an order."""


class Order:
    """One of the orders that `scheduling.queue.order` names. `is_dynamic`: keys change as time passes."""

    __slots__ = ("_alpha", "_name", "_slo", "is_dynamic")

    def __init__(self, settings: Queue, slo: SloTargets) -> None:
        self._name = settings.order
        self._alpha = min(settings.alpha, _MAX_ALPHA)
        self._slo = slo
        self.is_dynamic = settings.order == "hrrn"

    def key(self, entry: Entry, now: float) -> float:
        """The entry's key: in seconds, but for `hrrn`. Its predicted prefill must be finite."""
        prefill_s = entry.prefill_ms / 1e3
        match self._name:
            case "fcfs":
                return 0.0
            case "aging":
                # A lead that is fixed at arrival: whoever comes later than it lasts goes behind.
                return entry.enqueued_at + self._alpha * prefill_s
            case "spf":
                return prefill_s
            case "edf":
                due_us = self._slo.edf_deadline_us(entry.prompt_tokens, entry.priority, round(entry.prefill_ms * 1e3))
                return entry.enqueued_at + due_us / 1e6
            case "hrrn":
                return (entry.enqueued_at - (now + HRRN_OFFSET_S)) / (prefill_s + HRRN_OFFSET_S)

    def rekeyed(self, items: list[Ranked], now: float) -> list[Ranked]:
        """The items with their keys as `key` gives them for `now`, for `hrrn`; inlined, as it runs over all of them."""
        waited_from = now + HRRN_OFFSET_S
        return [
            (priority, (entry.enqueued_at - waited_from) / (entry.prefill_ms / 1e3 + HRRN_OFFSET_S), number, entry)
            for priority, _, number, entry in items
        ]

"""Bounded admission: how much may be in flight, and when a refused caller may come back."""

from gateway.config.schema import Admission as AdmissionSettings
from gateway.core.errors import GatewayError, Reason

MIN_RETRY_S = 0.05
MAX_RETRY_S = 5.0
_SMOOTHING = 0.05


class Admission:
    """Checks the total bound; the per-rank bound is a filter, since another rank may have room."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._max_in_flight = settings.max_in_flight
        self._mean_gap_s: float | None = None
        self._last_release_at: float | None = None

    def check_total(self, in_flight: int, wanted: int) -> None:
        """Raise `GATEWAY_FULL` when `wanted` more sequences would exceed the bound."""
        if in_flight + wanted > self._max_in_flight:
            raise GatewayError(
                Reason.GATEWAY_FULL,
                f"{in_flight} sequences are in flight and {wanted} more exceed the limit of {self._max_in_flight}; "
                "retry later",
                retryable=True,
                retry_after_s=self.retry_after_s(in_flight + wanted - self._max_in_flight),
                in_flight=in_flight,
                limit=self._max_in_flight,
            )

    def released(self, now: float) -> None:
        """Note one release, for the drain rate."""
        last, self._last_release_at = self._last_release_at, now
        if last is None:
            return
        gap = now - last
        mean = self._mean_gap_s
        self._mean_gap_s = gap if mean is None else mean + _SMOOTHING * (gap - mean)

    def retry_after_s(self, needed: int) -> float:
        """Seconds until `needed` releases are likely, from the recent release rate; bounded."""
        if self._mean_gap_s is None:
            return 1.0
        return min(MAX_RETRY_S, max(MIN_RETRY_S, needed * self._mean_gap_s))

"""What metrics say of the time between a request's arrival and its rank, and of answers on their way out.

The rules of `gateway.edges.metrics` hold here too: plain integers on the event loop, reading in the scrape's thread.
What a configuration switches off has no series.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

from prometheus_client.core import Metric

from gateway.config.schema import Config
from gateway.core.errors import Reason
from gateway.core.request import Request
from gateway.core.router import Router
from gateway.edges import metrics_catalogue as catalogue
from gateway.edges.metrics_families import Histogram, Series, grow, make_family, make_histogram, per_rank

T = TypeVar("T")

# Gates open every few milliseconds while ranks are busy; waits of minutes are those of an overload.
WAIT_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 320.0, 640.0),
)
GAP_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZE_BOUNDS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
NO_TENANT = "(none)"
"""Label of calls that name no tenant: an empty label is the same as none. No configured name has parentheses."""
_READS = 5


class SchedulingMetrics:
    """Counts requests as they end, and reads the queue, the batches, the order and the response cache."""

    def __init__(self, config: Config, router: Router) -> None:
        self._router = router
        self._has_queue = config.scheduling.mode != "direct"
        self._has_model = config.predictor is not None
        # Whether ended requests say anything here.
        self.is_busy = self._has_queue or self._has_model
        size = router.ranks.size
        self._waits = {outcome: Histogram(WAIT_BOUNDS) for outcome in catalogue.QUEUE_OUTCOME_VALUES}
        self._gaps = Histogram(GAP_BOUNDS)
        # Whole microseconds: sums of floats would drift apart from each other.
        self._predicted_us = [0] * size
        self._actual_us = [0] * size

    def configure(self, config: Config) -> None:
        """Another configuration is in force."""
        self._has_model = config.predictor is not None
        self.is_busy = self._has_queue or self._has_model
        for column in (self._predicted_us, self._actual_us):
            grow(column, self._router.ranks.size)

    def observe_ended(self, request: Request, ended_at: float) -> None:
        """Note how long an ended request's sequences waited here, and what their prefill took."""
        if self._has_queue and not request.is_cached:
            self._observe_waits(request, ended_at)
        if self._has_model:
            self._observe_prefill(request)

    def _observe_waits(self, request: Request, ended_at: float) -> None:
        error = request.error
        without_rank = "timeout" if error is not None and error.reason is Reason.QUEUE_TIMEOUT else "ended"
        for sequence in request.sequences:
            if sequence.sent_at is not None:
                self._waits["dispatched"].observe(sequence.sent_at - request.accepted_at)
            else:
                # Its answer may have waited for its turn since then.
                self._waits[without_rank].observe((request.settled_at or ended_at) - request.accepted_at)

    def _observe_prefill(self, request: Request) -> None:
        for sequence in request.sequences:
            attempt = sequence.attempt
            if attempt is None or attempt.actual_prefill_us is None:
                continue
            predicted, actual = attempt.prefill_us, attempt.actual_prefill_us
            self._predicted_us[attempt.rank] += predicted
            self._actual_us[attempt.rank] += actual
            self._gaps.observe(abs(predicted - actual) / 1e6)

    def families(self, now: float) -> Iterator[Metric]:
        """Every family of this module."""
        yield from self._queue_families(now)
        yield from self._prediction_families()
        yield from self._answer_families()
        yield from self._tenant_families()

    def _queue_families(self, now: float) -> Iterator[Metric]:
        router = self._router
        yield make_family(catalogue.QUEUE_DEPTH, [((), router.queue_depth)] if self._has_queue else [])
        waits = [((outcome,), histogram) for outcome, histogram in self._waits.items()]
        yield make_histogram(catalogue.QUEUE_DURATION, waits if self._has_queue else [])
        batches = router.batches
        ranks = range(router.ranks.size)
        sizes = Histogram(SIZE_BOUNDS)
        for size, count in router.counters.batch_sizes.copy().items():
            sizes.observe(size, count)
        yield make_histogram(catalogue.BATCH_SIZE, [((), sizes)] if batches is not None else [])
        counts = per_rank(ranks, batches.count) if batches is not None else []
        in_flight: list[Series] = [((str(rank),), count) for rank, count in counts]
        yield make_family(catalogue.BATCHES_IN_FLIGHT, in_flight)
        age_s = _walked(lambda: router.oldest_age_s(now))
        yield make_family(catalogue.OLDEST_AGE, [((), age_s)] if age_s is not None else [])

    def _prediction_families(self) -> Iterator[Metric]:
        predictor, has_model = self._router.predictor, self._has_model
        for spec, sums in (
            (catalogue.PREFILL_PREDICTED, self._predicted_us),
            (catalogue.PREFILL_ACTUAL, self._actual_us),
        ):
            known = sums[: self._router.ranks.size]
            series: list[Series] = [((str(rank),), value / 1e6) for rank, value in enumerate(known)]
            yield make_family(spec, series if has_model else [])
        yield make_histogram(catalogue.PREFILL_GAP, [((), self._gaps)] if has_model else [])
        yield make_family(catalogue.PREDICTOR_SCALE, [((), predictor.scale)] if has_model else [])
        yield make_family(catalogue.PREDICTOR_FAULTS, [((), predictor.faults)] if has_model else [])

    def _answer_families(self) -> Iterator[Metric]:
        for owner, specs in (
            (self._router.ordering, catalogue.ORDERING),
            (self._router.response_cache, catalogue.RESPONSE_CACHE),
        ):
            for name, spec in specs.items():
                yield make_family(spec, [((), getattr(owner, name))] if owner is not None else [])

    def _tenant_families(self) -> Iterator[Metric]:
        accounts = _walked(self._router.accounts) or []
        for name, spec in catalogue.TENANTS.items():
            series: list[Series] = [((account.name or NO_TENANT,), getattr(account, name)) for account in accounts]
            yield make_family(spec, series)


def _walked(read: Callable[[], T]) -> T | None:
    """What the core finds by walking over a dict. It may grow under the walk: again, and None in the end."""
    for _ in range(_READS):
        try:
            return read()
        except RuntimeError:
            continue
    return None

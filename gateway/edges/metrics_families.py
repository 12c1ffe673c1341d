"""How plain numbers become metric families: what the collectors share."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.core.counters import Counters
from gateway.edges import metrics_catalogue as catalogue
from gateway.edges.metrics_catalogue import Spec

NumberT = TypeVar("NumberT", int, float)
ValueT = TypeVar("ValueT")

Series = tuple[tuple[str, ...], float]
"""Label values and a number."""


class Histogram:
    """Bucket counts in a plain list. `observe` costs one bisection."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value`, in the unit of the metric's name, `weight` times."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def cumulative(self) -> list[tuple[str, float]]:
        """`(le, count of values <= le)` pairs, the last one `+Inf`."""
        running = 0
        pairs: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts[:], strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


class Book:
    """Accepted requests of one RPC that ended for one reason, and where the durations of such are counted."""

    __slots__ = ("code", "count", "durations")

    def __init__(self, code: str, durations: Histogram) -> None:
        self.code = code
        self.count = 0
        self.durations = durations


def grow(column: list[NumberT], size: int) -> None:
    """Give a list with one number per rank zeros up to `size` ranks. It is never cut."""
    column.extend(type(column[0])() for _ in range(size - len(column)))


def per_rank(ranks: Iterable[int], read: Callable[[int], ValueT]) -> list[tuple[int, ValueT]]:
    """What `read` says of each rank, up to the one that was removed while this thread was reading."""
    found: list[tuple[int, ValueT]] = []
    with suppress(IndexError):
        for rank in ranks:
            found.append((rank, read(rank)))  # noqa: PERF401 - what was read until then is kept
    return found


def make_family(spec: Spec, series: list[Series]) -> Metric:
    """A counter or gauge family."""
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = kind(spec.full_name, spec.help, labels=spec.labels)
    for labels, value in series:
        family.add_metric(labels, value)
    return family


def make_histogram(spec: Spec, histograms: Iterable[tuple[tuple[str, ...], Histogram]]) -> Metric:
    """A histogram family; each histogram with its label values."""
    family = HistogramMetricFamily(spec.full_name, spec.help, labels=spec.labels)
    for labels, histogram in histograms:
        family.add_metric(labels, histogram.cumulative(), histogram.total)
    return family


def series_of(value: object) -> list[Series]:
    """A number, one number per rank, or numbers by a bounded key."""
    if isinstance(value, list):
        return [((str(rank),), count) for rank, count in enumerate(value[:])]
    if isinstance(value, dict):
        return [((str(key),), count) for key, count in value.copy().items()]
    assert isinstance(value, int)
    return [((), value)]


def core_counters(counters: Counters) -> Iterator[Metric]:
    """The core's counters."""
    for name, spec in catalogue.CORE_COUNTERS.items():
        yield make_family(spec, series_of(getattr(counters, name)))


def link_counters(counters: object) -> Iterator[Metric]:
    """The link's counters under their own names: its code bounds the names and the reasons."""
    events: list[Series] = []
    faults: list[Series] = []
    for name, value in vars(counters).copy().items():
        family = faults if isinstance(value, dict) else events
        family.extend(((name, *labels), count) for labels, count in series_of(value))
    yield make_family(catalogue.LINK_EVENTS, events)
    yield make_family(catalogue.LINK_FAULTS, faults)

"""One exposition out of those of all processes. Pure.

Counts and what is in flight add up. Of what has one value for the whole gateway the one is taken that an operator has to
know of: the oldest request, whether any process drains, whether every one has the file in force. What only makes sense
for one process, such as its own view of a rank that all share, gets the label `process`.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gateway.edges.metrics_catalogue import Spec

PROCESS = "process"
UP = Spec("process_up", "gauge", "1 while the process serves.", (PROCESS,))
RESTARTS = Spec(
    "process_restarts_total", "counter", "Times that the process had ended and was started again.", (PROCESS,)
)
_ADDING = ("counter", "histogram", "summary")
_PREFIX = "rankgate_"
SUMS = frozenset(
    {
        *("rank_requests_in_flight", "rank_requests_in_flight_limit", "rank_requests_without_token"),
        *("rank_queued_prompt_tokens", "rank_context_tokens", "rank_batches_in_flight"),
        *("live_requests", "client_streams", "client_connections", "queue_depth"),
        *("ordering_places", "ordering_held_bytes", "response_cache_entries", "response_cache_bytes"),
        *("tenant_requests_in_flight", "tenant_requests_queued"),
    }
)
"""Gauges that add up."""
LARGEST = frozenset(
    {"rank_kv_capacity_tokens", "build_info", "draining", "oldest_request_age_seconds", "config_reload"}
)
"""Also a counter: every process takes part in each reload."""
SMALLEST = frozenset({"config_last_reload_successful", "config_last_reload_success_timestamp_seconds"})
LEFT_OUT = frozenset({"config_info"})
"""Each process has its share of the configuration: the supervisor exports the whole one's."""
_PROCESS_SUMS = frozenset({"process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds"})
_Labels = tuple[tuple[str, str], ...]
_Values = dict[tuple[str, _Labels], float]


class Page(NamedTuple):
    """What one process exports. `ranks` are those that only it has, None where all have all."""

    process: int
    text: str
    ranks: frozenset[int] | None


class Family(NamedTuple):
    """A family with its values by (sample, labels), in the order of the first page that has it."""

    kind: str
    help: str
    values: _Values


def read(pages: Iterable[Page]) -> dict[str, Family]:
    """The pages' families merged."""
    families: dict[str, Family] = {}
    for page in pages:
        for metric in text_string_to_metric_families(page.text):
            if metric.name.removeprefix(_PREFIX) in LEFT_OUT:
                continue
            family = families.setdefault(metric.name, Family(metric.type, metric.documentation, {}))
            for sample in metric.samples:
                _merge(family, metric.name, sample, page)
    return families


def add_retired(families: dict[str, Family], retired: Mapping[str, Family]) -> None:
    """Add the counts of processes that have ended, so that no counter ever goes back."""
    for name, old in retired.items():
        values = families.setdefault(name, Family(old.kind, old.help, {})).values
        for key, value in old.values.items():
            values[key] = values.get(key, 0.0) + value


def counts_of(families: Mapping[str, Family]) -> dict[str, Family]:
    """What `add_retired` takes of a process that has ended."""
    return {name: family for name, family in families.items() if _adds(name, family.kind)}


def _adds(name: str, kind: str) -> bool:
    return kind in _ADDING and name.removeprefix(_PREFIX) not in LARGEST


def metrics(families: Mapping[str, Family]) -> Iterable[Metric]:
    """As the metrics library renders them."""
    for name, family in families.items():
        metric = Metric(name, family.help, family.kind)
        metric.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in family.values.items()]
        yield metric


def _merge(family: Family, name: str, sample: Sample, page: Page) -> None:
    labels = sample.labels
    rank = labels.get("rank")
    if page.ranks is not None and rank is not None and int(rank) not in page.ranks:
        return  # another process's: here nothing ever happens on it
    key = (sample.name, tuple(labels.items()))
    if _adds(name, family.kind):
        family.values[key] = family.values.get(key, 0.0) + sample.value
        return
    short = name.removeprefix(_PREFIX)
    before = family.values.get(key)
    if short in SUMS or name in _PROCESS_SUMS:
        family.values[key] = sample.value + (before or 0.0)
    elif short in LARGEST:
        family.values[key] = sample.value if before is None else max(before, sample.value)
    elif short in SMALLEST:
        family.values[key] = sample.value if before is None else min(before, sample.value)
    elif page.ranks is not None and rank is not None:
        family.values[key] = sample.value
    else:
        family.values[(sample.name, ((PROCESS, str(page.process)), *labels.items()))] = sample.value

"""How several expositions become one."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

from gateway.edges import metrics_catalogue as catalogue
from gateway.processes import exposition
from gateway.processes.exposition import Page


def page(process, fill, ranks=None):
    registry = CollectorRegistry()
    fill(registry)
    return Page(process, generate_latest(registry).decode(), ranks)


def values(families):
    return {
        (sample, labels): value
        for family in families.values()
        for (sample, labels), value in family.values.items()
        if not sample.endswith("_created")  # the library's own; the gateway exports none
    }


def test_counts_add_up():
    def fill(amount):
        def fill(registry):
            Counter("rankgate_requests", "h", ["code"], registry=registry).labels("OK").inc(amount)
            histogram = Histogram("rankgate_time_to_first_token_seconds", "h", buckets=[1, 2], registry=registry)
            histogram.observe(amount / 2)
            Summary("rankgate_rank_time_to_first_token_seconds", "h", ["rank"], registry=registry).labels("0").observe(
                amount
            )

        return fill

    found = values(exposition.read([page(0, fill(1)), page(1, fill(3))]))
    assert found["rankgate_requests_total", (("code", "OK"),)] == 4
    assert found["rankgate_time_to_first_token_seconds_bucket", (("le", "1.0"),)] == 1
    assert found["rankgate_time_to_first_token_seconds_bucket", (("le", "+Inf"),)] == 2
    assert found["rankgate_time_to_first_token_seconds_sum", ()] == 2
    assert found["rankgate_rank_time_to_first_token_seconds_count", (("rank", "0"),)] == 2


def gauges(**values):
    def fill(registry):
        for name, value in values.items():
            if name.startswith("rank_"):
                Gauge(f"rankgate_{name}", "h", ["rank"], registry=registry).labels("1").set(value)
            else:
                Gauge(f"rankgate_{name}", "h", registry=registry).set(value)

    return fill


def test_gauges_add_up_or_tell_the_worst_or_are_each_process_own():
    first = gauges(live_requests=2, draining=0, config_last_reload_successful=1, rank_kv_cache_usage_ratio=0.5)
    second = gauges(live_requests=5, draining=1, config_last_reload_successful=0, rank_kv_cache_usage_ratio=0.25)
    assert values(exposition.read([page(0, first), page(1, second)])) == {
        ("rankgate_live_requests", ()): 7,
        ("rankgate_draining", ()): 1,
        ("rankgate_config_last_reload_successful", ()): 0,
        ("rankgate_rank_kv_cache_usage_ratio", (("process", "0"), ("rank", "1"))): 0.5,
        ("rankgate_rank_kv_cache_usage_ratio", (("process", "1"), ("rank", "1"))): 0.25,
    }


def test_of_a_rank_with_one_process_only_that_one_has_a_say():
    def fill(state):
        def fill(registry):
            gauge = Gauge("rankgate_rank_state", "h", ["rank", "state"], registry=registry)
            gauge.labels("1", state).set(1)

        return fill

    pages = [page(0, fill("ABSENT"), frozenset({0})), page(1, fill("READY"), frozenset({1}))]
    assert values(exposition.read(pages)) == {("rankgate_rank_state", (("rank", "1"), ("state", "READY"))): 1}


def test_every_process_takes_part_in_a_reload_that_counts_once():
    def fill(registry):
        Counter("rankgate_config_reload", "h", ["result"], registry=registry).labels("applied").inc()

    found = values(exposition.read([page(0, fill), page(1, fill)]))
    assert found["rankgate_config_reload_total", (("result", "applied"),)] == 1


def test_a_process_that_ended_still_counts():
    def fill(registry):
        Counter("rankgate_requests", "h", registry=registry).inc(5)
        Gauge("rankgate_live_requests", "h", registry=registry).set(3)

    ended = exposition.counts_of(exposition.read([page(1, fill)]))
    families = exposition.read([page(0, fill)])
    exposition.add_retired(families, ended)
    assert values(families)["rankgate_requests_total", ()] == 10
    assert values(families)["rankgate_live_requests", ()] == 3


def test_what_is_rendered_says_the_same():
    def fill(registry):
        Counter("rankgate_requests", 'with "quotes" and \\', ["code"], registry=registry).labels('a"b\\c\n').inc(2)
        Histogram("rankgate_time_to_first_token_seconds", "h", buckets=[1], registry=registry).observe(0.5)

    class Merged:
        def collect(self):
            return exposition.metrics(exposition.read([page(0, fill)]))

    registry = CollectorRegistry()
    registry.register(Merged())
    again = Page(0, generate_latest(registry).decode(), None)
    assert values(exposition.read([again])) == values(exposition.read([page(0, fill)]))
    assert "# TYPE rankgate_requests_total counter" in again.text


@pytest.mark.parametrize(
    "name", sorted(exposition.SUMS | exposition.LARGEST | exposition.SMALLEST | exposition.LEFT_OUT)
)
def test_the_rules_name_metrics_that_exist(name):
    assert name in {spec.name.removesuffix("_total") for spec in catalogue.CATALOGUE}

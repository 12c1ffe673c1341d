"""The metrics of answers on their way out, of tenants, and of a core that queues."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.scheduling import Preserve, ResponseCache, Tenant
from gateway.core.batcher import BatchReason
from gateway.core.counters import DISPATCH_REASONS, Counters
from gateway.core.events import Tick
from gateway.core.lifecycle import Evidence
from gateway.core.ordering import Ordering
from gateway.core.request import Request
from gateway.core.response_cache import CachedAnswer
from gateway.core.response_cache import ResponseCache as Cache
from gateway.core.tenants import Account
from gateway.edges import metrics_catalogue as catalogue
from gateway.edges import metrics_values as meanings
from tests.support.core import load, wire_id
from tests.support.metrics_world import PREDICTED, World, busy_world


def test_the_order_s_places_and_bytes():
    world = World(1)
    ordering = world.scheduled.ordering = Ordering(Preserve())
    for _ in range(3):
        ordering.reserve(Request(0, world.arrived(), world.now), "", 100)
    got = world.samples()
    assert got["rankgate_ordering_places",] == 3
    assert got["rankgate_ordering_held_bytes",] == 200  # the head streams


def test_the_response_cache_s_counts_and_sizes():
    world = World(1)
    cache = world.scheduled.response_cache = Cache(ResponseCache(max_bytes=250, max_entry_bytes=150, ttl_s=10.0))
    for key in (b"a", b"b", b"c"):
        cache.put(key, CachedAnswer((), 1, 100), 0.0)
    cache.put(b"large", CachedAnswer((), 1, 151), 0.0)
    assert [cache.get(key, at) is not None for key, at in ((b"b", 9.0), (b"c", 9.0), (b"b", 10.0), (b"a", 1.0))] == [
        True,
        True,
        False,
        False,
    ]
    cache.used(b"c")
    prefix = "rankgate_response_cache_"
    got = {key[0].removeprefix(prefix): value for key, value in world.samples().items() if key[0].startswith(prefix)}
    assert got == {
        "entries": 1,
        "bytes": 100,
        "hits_total": 1,
        "misses_total": 2,
        "inserts_total": 3,
        "evictions_total": 1,
        "expired_total": 1,
        "too_large_total": 1,
        "flushes_total": 0,
    }


def test_what_the_default_configuration_switches_off_has_no_series():
    world = World(1)
    request = world.request(prompt=[1] * 4)
    world.batch(0, [(wire_id(request), [1], "stop")], load(1, 1, 0.5))
    world.metrics.observe_ended(request, world.now)
    empty = {family.name for family in world.metrics.collect() if not family.samples}
    switched = {spec.full_name.removesuffix("_total") for spec in catalogue.SWITCHED}
    # Nothing was refused or went wrong either.
    assert empty == switched | {"rankgate_rejections"}


# --- tenants and requests -----------------------------------------------------------------------------


def test_named_tenants_have_their_counts():
    world = World(1)
    account = Account("team/a", Tenant())
    account.in_flight, account.queued = 5, 2
    world.scheduled.accounts = lambda: [account]
    got = world.samples()
    assert got["rankgate_tenant_requests_in_flight", ("tenant", "team/a")] == 5
    assert got["rankgate_tenant_requests_queued", ("tenant", "team/a")] == 2


def test_tenants_without_settings_have_no_series():
    world = World(1, admission={"tenants": {"named": {"a": {}}}})
    for tenant in ("a", "", "", "b", "(none)"):
        world.request(tenant=tenant)
    name = "rankgate_tenant_requests_in_flight"
    got = {key[1][1]: value for key, value in world.samples().items() if key[0] == name}
    assert got == {"a": 1, "(none)": 2}


# --- a core that queues ---------------------------------------------------------------------------------


def test_a_queueing_core_s_own_numbers():
    world = World(1, scheduling={"mode": "batch", "batch": {"max_requests": 4}}, predictor=PREDICTED)
    requests = [world.request() for _ in range(3)]
    got = world.samples()
    # The first one goes to the idle rank, the others collect.
    assert got["rankgate_queue_depth",] == 2
    assert got["rankgate_batch_size_sequences_count",] == got["rankgate_rank_batches_in_flight", ("rank", "0")] == 1
    assert got["rankgate_dispatches_total", ("reason", "idle_rank")] == 1
    world.now += 2.0
    assert world.samples()["rankgate_oldest_request_age_seconds",] == 2.0
    for _ in range(3):
        world.send(Tick())
        world.finish_some()
    for request in requests:
        assert request.is_ended
        world.metrics.observe_ended(request, world.now)
    got = world.samples()
    assert got["rankgate_queue_depth",] == got["rankgate_oldest_request_age_seconds",] == 0
    name, outcome = "rankgate_queue_duration_seconds", ("outcome", "dispatched")
    assert (got[name + "_count", outcome], got[name + "_sum", outcome]) == (3, 4.0)
    assert got["rankgate_dispatches_total", ("reason", "window")] == 2
    assert got["rankgate_prefill_gap_seconds_count",] == 3
    assert got["rankgate_rank_prefill_predicted_seconds_total", ("rank", "0")] > 0
    assert got["rankgate_releases_total", ("evidence", "engine")] == 3


def test_the_oldest_request_s_age_goes_by_the_scrape_s_clock():
    world = World(1)
    accepted_at = world.now
    world.scheduled.oldest_age_s = lambda now: now - accepted_at
    world.now += 42.5
    assert world.samples()["rankgate_oldest_request_age_seconds",] == 42.5


class Walk:
    """A walk that the event loop disturbs `failures` times."""

    def __init__(self, failures, value):
        self.failures, self.value = failures, value

    def __call__(self, *_):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("dictionary changed size during iteration")
        return self.value


@pytest.mark.parametrize(("failures", "is_seen"), [(1, True), (1000, False)])
def test_a_walk_that_is_disturbed_is_tried_again_a_few_times(failures, is_seen):
    world = World(1)
    world.scheduled.oldest_age_s = Walk(failures, 1.0)
    world.scheduled.accounts = Walk(failures, [Account("t", Tenant())])
    got = world.samples()
    assert (("rankgate_oldest_request_age_seconds",) in got) is is_seen
    assert (("rankgate_tenant_requests_queued", ("tenant", "t")) in got) is is_seen


# --- the core's counters --------------------------------------------------------------------------------


def test_counters_of_the_core_by_their_keys():
    world = World(1)
    counters = world.scheduled.counters
    counters.releases = {Evidence.ENGINE: 3, Evidence.RANK_LOST: 1}
    counters.dispatch_reasons = {BatchReason.WINDOW: 2, "direct": 1}
    counters.audit_findings = {"silent": 1}
    counters.queue_timeouts = 4
    counters.slo_shadow_rejects, counters.slo_rejects = 6, 7
    got = world.samples()
    assert got["rankgate_releases_total", ("evidence", "engine")] == 3
    assert got["rankgate_releases_total", ("evidence", "rank_lost")] == 1
    assert got["rankgate_dispatches_total", ("reason", "window")] == 2
    assert got["rankgate_audit_findings_total", ("kind", "silent")] == 1
    assert got["rankgate_queue_timeouts_total",] == 4
    assert got["rankgate_slo_shadow_rejections_total",] == 6
    assert got["rankgate_slo_rejections_total",] == 7


def test_every_value_that_the_core_knows_is_explained():
    assert set(meanings.EVIDENCE_VALUES) == {*Evidence}
    assert set(catalogue.DISPATCH_REASON_VALUES) == {*DISPATCH_REASONS} >= {*BatchReason}
    assert set(meanings.AUDIT_VALUES) == set(Counters(1).audit_findings)


def test_attributes_that_are_exported_exist():
    owners = (
        (catalogue.RESPONSE_CACHE, Cache(ResponseCache())),
        (catalogue.ORDERING, Ordering(Preserve())),
        (catalogue.TENANTS, Account("t", Tenant())),
    )
    for specs, owner in owners:
        assert all(isinstance(getattr(owner, name), int) for name in specs)


def test_names_of_tenants_are_escaped():
    world = busy_world()
    world.scheduled.accounts = lambda: [Account('a"b\\c\nd', Tenant())]
    registry = CollectorRegistry()
    registry.register(world.metrics)
    text = generate_latest(registry).decode()
    labels = {
        sample.labels["tenant"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "tenant" in sample.labels
    }
    assert labels == {'a"b\\c\nd'}

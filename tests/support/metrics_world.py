"""A core with metrics over it, busy enough that every family has something to say."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.scheduling import Predictor as PredictorSettings
from gateway.config.scheduling import Preserve, ResponseCache, Tenant
from gateway.core.batches_in_flight import BatchesInFlight
from gateway.core.errors import GatewayError
from gateway.core.lifecycle import Evidence
from gateway.core.ordering import Ordering
from gateway.core.predictor import Predictor
from gateway.core.request import Attempt, Request
from gateway.core.response_cache import ResponseCache as Cache
from gateway.core.tenants import Account
from gateway.edges.engine_link.counters import LinkCounters
from gateway.edges.metrics import Metrics
from gateway.edges.security import Security
from gateway.h2.protocol.errors import ErrorCode
from tests.support.core import Bench, load, wire_id


def link_counters():
    counters = LinkCounters()
    counters.frames = 3
    for reason in ("hello", "hello", "garbage"):
        counters.handshakes.add(reason)
    return counters


class SinkOf:
    def __init__(self, rpc):
        self.rpc = rpc


class Over:
    """Another object with some attributes of its own."""

    def __init__(self, under, **own):
        vars(self).update(own, _under=under)

    def __getattr__(self, name):
        return getattr(vars(self)["_under"], name)


def scheduled(router):
    """The router as the metrics see it: what a test sets here stands for what the router has."""
    return Over(router, counters=Over(router.counters))


class World(Bench):
    """A core with metrics over it; `now` is the clock of both."""

    def __init__(self, ranks=2, **more):
        super().__init__(ranks, **more)
        self.link = link_counters()
        self.scheduled = scheduled(self.router)
        self.metrics = Metrics(self.config, self.scheduled, self.link, clock=lambda: self.now)

    def count_ended(self, *, reason=None, waited_s=0.0, prefills=((1, 2),), n=1, is_cached=False, **more):
        """Count a request that ended `waited_s` after its acceptance, if it never got to a rank.

        `prefills` are predicted and actual microseconds per attempt; None stands for an actual one that isn't known.
        The sequences beyond them have no attempt. The i-th attempt was sent to rank i, `waited_s` after acceptance.
        """
        request = Request(0, self.arrived(n=n, **more), self.now)
        request.is_cached = is_cached
        request.error = None if reason is None else GatewayError(reason, "it ended")
        request.ended_at = self.now + waited_s
        for number, (sequence, (predicted, actual)) in enumerate(zip(request.sequences, prefills, strict=False)):
            attempt = sequence.attempt = Attempt(sequence, "w", 1, number, 1, self.now + waited_s)
            attempt.prefill_us, attempt.actual_prefill_us = predicted, actual
            sequence.sent_at = attempt.sent_at
        self.metrics.observe_ended(request, self.now)

    def finish_all(self, request, **more):
        self.finish(request, **more)
        self.metrics.observe_ended(request, self.now)

    def finish_some(self):
        """Everything that is in flight produces a token and ends."""
        dispatched, self.dispatched = self.dispatched, []
        for effect in dispatched:
            self.batch(effect.rank, [(effect.request.wire_id, [9], "stop")])

    def scrape(self):
        registry = CollectorRegistry()
        registry.register(self.metrics)
        return generate_latest(registry).decode()

    def samples(self):
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.scrape())
            for sample in family.samples
        }


class Refusing(Security):
    """Open to all, with the counts of one that is not."""

    def failures(self):
        yield ("grpc", "unknown"), 2

    def loads(self):
        yield ("tls", "loaded"), 1


PREDICTED = {"prefill_ms": "5 + 0.03 * total_new_tokens"}


def busy_world():
    """Everything that can be said is said."""
    world = World(2, scheduling={"mode": "batch"}, predictor=PREDICTED)
    world.metrics._security = Refusing(world.config.listen)
    for number in range(3):
        request = world.request(sink=SinkOf("test.Service/Generate"))
        world.now += 0.25
        world.batch(request.last_rank, [(wire_id(request), [1], "")], load(5, 2, 0.25))
        world.now += 0.5
        world.finish_all(request)
        assert request.is_ended, number
    world.request(sink=SinkOf("test.Service/Generate"))
    refused = world.arrived(prompt=())
    world.send(refused)
    fill(world.scheduled, world.now)
    world.metrics._gate.http2_faults.note(ErrorCode.PROTOCOL_ERROR, "of a client", "ipv4:127.0.0.1:1")
    return world


def fill(router, now):
    """Give every part of the scheduling something to say."""
    router.queue_depth = 3
    router.predictor = Predictor(PredictorSettings(**PREDICTED))
    router.ordering = Ordering(Preserve())
    router.response_cache = Cache(ResponseCache())
    router.batches = BatchesInFlight(2)
    router.accounts = lambda: [Account("t", Tenant())]
    router.oldest_age_s = lambda now: 0.5
    counters = router.counters
    counters.batch_sizes = {1: 2, 8: 3}
    counters.dispatch_reasons = {"direct": 1}
    counters.releases = dict.fromkeys(Evidence, 1)
    counters.audit_findings = {"silent": 1}

"""A core with metrics over it, busy enough that every family has something to say."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.edges.engine_link.counters import LinkCounters
from gateway.edges.metrics import Metrics
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


class World(Bench):
    """A core with metrics over it; `now` is the clock of both."""

    def __init__(self, ranks=2, **more):
        super().__init__(ranks, **more)
        self.link = link_counters()
        self.metrics = Metrics(self.config, self.router, self.link, clock=lambda: self.now)

    def finish_all(self, request, **more):
        self.finish(request, **more)
        self.metrics.observe_ended(request, self.now)

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


def busy_world():
    """Everything that can be said is said."""
    world = World(2)
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
    return world

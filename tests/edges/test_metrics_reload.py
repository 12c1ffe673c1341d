"""Metrics while ranks come and go, and of the reloads themselves."""

from gateway.core.events import Reconfigured
from tests.support.core import make_config, wire_id
from tests.support.metrics_world import World


def reconfigure(world, ranks, **sections):
    config = make_config(ranks, **sections)
    world.send(Reconfigured(config))
    world.metrics.configure(config)


def samples(world, name):
    """Label values and value of every sample."""
    (family,) = [
        family for family in world.metrics.collect() if f"rankgate_{name}" in (family.name, family.name + "_total")
    ]
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_ranks_that_come_have_series_and_those_that_are_gone_have_none():
    world = World(2)
    reconfigure(world, 3)
    world.join(2)
    world.finish_all(world.request(pinned_rank=2))
    assert samples(world, "rank_requests_in_flight") == {("0",): 0, ("1",): 0, ("2",): 0}
    assert samples(world, "decisions_total")["2",] == 1
    reconfigure(world, 1)
    for name in ("rank_requests_in_flight", "decisions_total", "rank_prefill_predicted_seconds_total"):
        assert {rank for (rank, *_) in samples(world, name)} <= {"0"}, name
    assert {rank for rank, _ in samples(world, "rank_state")} == {"0"}


def test_a_scrape_while_ranks_come_is_answered():
    """The router has them some time before the metrics do."""
    world = World(1)
    world.send(Reconfigured(make_config(3)))
    assert set(samples(world, "rank_time_to_first_token_seconds")) == {("0",)}
    assert {rank for rank, _ in samples(world, "rank_state")} == {"0", "1", "2"}


def test_a_request_that_ends_after_its_rank_is_gone_is_counted():
    """Its answer may have waited for its turn, or left in the same loop turn."""
    predictor = {"prefill_ms": "total_new_tokens"}
    world = World(3, predictor=predictor)
    request = world.request(pinned_rank=2)
    world.batch(2, [(wire_id(request), [7])])
    world.finish(request)
    reconfigure(world, 1, predictor=predictor)
    assert world.router.ranks.size == 1
    world.metrics.observe_ended(request, world.now)
    assert sum(samples(world, "requests_total").values()) == 1
    # The number is used again: what it counted before is not forgotten.
    reconfigure(world, 3, predictor=predictor)
    assert samples(world, "rank_time_to_first_token_seconds")["2",] >= 0


def test_a_predictor_that_comes_has_series():
    world = World(2)
    assert samples(world, "predictor_scale_ratio") == {}
    reconfigure(world, 2, predictor={"prefill_ms": "total_new_tokens"})
    assert samples(world, "predictor_scale_ratio") == {(): 1.0}


def test_without_a_file_nothing_was_reloaded():
    world = World(1)
    assert set(samples(world, "config_reload_total").values()) == {0}
    assert samples(world, "config_last_reload_successful") == {(): 1}
    ((before,),) = samples(world, "config_info")
    reconfigure(world, 1, policy={"preset": "p2c"})
    ((after,),) = samples(world, "config_info")
    assert before != after

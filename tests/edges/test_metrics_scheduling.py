"""The metrics of the queue, of batches and of predictions."""

import pytest

from gateway.config.scheduling import Batch
from gateway.core.batches_in_flight import BatchesInFlight
from gateway.core.errors import Reason
from gateway.core.request import Attempt, Request
from gateway.edges import metrics_catalogue as catalogue
from gateway.edges import metrics_scheduling
from gateway.types import Sampling
from tests.support.core import wire_id
from tests.support.metrics_world import PREDICTED, World

QUEUE = {"scheduling": {"mode": "queue"}}
MODEL = {"predictor": PREDICTED}
WAIT = "rankgate_queue_duration_seconds"
GAP = "rankgate_prefill_gap_seconds"


def waits(world):
    """Observations and their sum by outcome."""
    got = world.samples()
    return {
        outcome: (got[WAIT + "_count", ("outcome", outcome)], got[WAIT + "_sum", ("outcome", outcome)])
        for outcome in catalogue.QUEUE_OUTCOME_VALUES
    }


NONE = dict.fromkeys(catalogue.QUEUE_OUTCOME_VALUES, (0, 0))


@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_the_wait_ends_where_the_sequence_was_sent(mode):
    world = World(2, scheduling={"mode": mode})
    world.count_ended(waited_s=0.5)
    assert waits(world) == NONE | {"dispatched": (1, 0.5)}


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (Reason.QUEUE_TIMEOUT, "timeout"),
        (Reason.CANCELLED, "ended"),
        (Reason.DEADLINE_EXCEEDED, "ended"),
        (Reason.DRAINING, "ended"),
        (Reason.RANK_LOST, "ended"),
    ],
)
def test_a_wait_without_a_rank_goes_by_what_ended_it(reason, outcome):
    world = World(2, **QUEUE)
    world.count_ended(reason=reason, waited_s=2.0, prefills=())
    assert waits(world) == NONE | {outcome: (1, 2.0)}


def test_each_sequence_waits_for_itself():
    world = World(3, **QUEUE)
    world.count_ended(reason=Reason.CANCELLED, waited_s=1.0, prefills=((1, 1), (1, 1)), n=3)
    assert waits(world) == NONE | {"dispatched": (2, 2.0), "ended": (1, 1.0)}


def test_an_error_after_the_queue_is_no_end_in_it():
    world = World(2, **QUEUE)
    world.count_ended(reason=Reason.RANK_LOST, waited_s=1.0)
    assert waits(world) == NONE | {"dispatched": (1, 1.0)}


def test_a_sequence_that_goes_on_elsewhere_has_waited_for_its_first_rank_only():
    world = World(2, failure={"reroute": True, "resume": True}, **QUEUE)
    request = world.request(sampling=Sampling(max_tokens=16, temperature=0.0))
    world.batch(request.last_rank, [(wire_id(request), [1, 2, 3])])
    world.tick(100.0)
    world.lose(request.last_rank)
    assert request.sequences[0].attempts == 2
    world.finish_all(request)
    assert waits(world) == NONE | {"dispatched": (1, 0.0)}


def test_the_wait_for_a_turn_in_the_preserved_order_is_no_wait_for_a_rank():
    queue = {"order": "fcfs", "max_in_flight_per_rank": 1, "timeout_s": 1.0}
    world = World(
        1, ordering="preserve", limits={"default_deadline_s": 1000}, scheduling={"mode": "queue", "queue": queue}
    )
    head, late = world.request(), world.request()
    world.tick(1.0)
    assert late.is_settled
    world.tick(100.0)
    world.finish(head)
    assert late.is_ended
    world.metrics.observe_ended(late, late.ended_at)
    assert waits(world) == NONE | {"timeout": (1, 1.0)}


def test_a_cached_answer_waits_for_nothing():
    world = World(2, **QUEUE, **MODEL)
    world.count_ended(is_cached=True, waited_s=1.0, prefills=())
    assert waits(world) == NONE


def test_cached_answers_found_nothing_in_a_rank_s_prefix_cache():
    world = World(1)
    for is_cached in (True, False):
        request = Request(0, world.arrived(prompt=[1] * 8), world.now)
        request.is_cached = is_cached
        request.sequences[0].cached_tokens = 5
        world.metrics.observe_ended(request, world.now)
    got = world.samples()
    assert got["rankgate_cached_prompt_tokens_total",] == 5
    assert got["rankgate_prompt_tokens_total",] == 16


def test_mode_direct_has_no_queue():
    world = World(2)
    world.count_ended(waited_s=1.0)
    world.scheduled.queue_depth = 9
    assert not [
        name for name, *_ in world.samples() if name.startswith(("rankgate_queue_depth", "rankgate_queue_duration"))
    ]


def test_the_depth_is_read_at_the_scrape():
    world = World(2, **QUEUE)
    for depth in (7, 0):
        world.scheduled.queue_depth = depth
        assert world.samples()["rankgate_queue_depth",] == depth


# --- batches -----------------------------------------------------------------------------------------


def test_sizes_are_a_histogram_of_batches():
    world = World(1, scheduling={"mode": "batch"})
    world.scheduled.batches = BatchesInFlight(1)
    world.scheduled.counters.batch_sizes = {1: 4, 5: 2, 2000: 1}
    got = world.samples()
    name = "rankgate_batch_size_sequences"
    assert (got[name + "_count",], got[name + "_sum",]) == (7, 4 + 10 + 2000)
    buckets = {le: got[name + "_bucket", ("le", le)] for le in ("1.0", "4.0", "6.0", "1024.0", "+Inf")}
    assert buckets == {"1.0": 4, "4.0": 4, "6.0": 6, "1024.0": 6, "+Inf": 7}


def test_the_usual_largest_batch_has_a_bucket_of_its_own():
    assert float(Batch().max_requests) in metrics_scheduling.SIZE_BOUNDS


def test_batches_in_flight_by_rank():
    world = World(2, scheduling={"mode": "batch"})
    batches = world.scheduled.batches = BatchesInFlight(2)
    request = Request(0, world.arrived(), world.now)
    attempt = Attempt(request.sequences[0], "w", 1, 1, 1, world.now)
    batches.open(1, [attempt])
    name = "rankgate_rank_batches_in_flight"
    assert [world.samples()[name, ("rank", rank)] for rank in "01"] == [0, 1]
    batches.leave(attempt)
    assert world.samples()[name, ("rank", "1")] == 0


def test_without_batches_there_is_nothing_to_say_of_them():
    world = World(2, **QUEUE)
    world.scheduled.counters.batch_sizes = {1: 1}
    assert not [
        name for name, *_ in world.samples() if name.startswith(("rankgate_batch_", "rankgate_rank_batches_in"))
    ]


# --- predictions -------------------------------------------------------------------------------------


def test_predicted_and_actual_prefill_by_rank():
    world = World(3, **MODEL)
    world.count_ended(prefills=((250_000, 1_000_000), (40_000, 10_000)), n=2)
    world.count_ended(prefills=((500_000, 500_000),))
    got = world.samples()

    def seconds(which):
        return [got[f"rankgate_rank_prefill_{which}_seconds_total", ("rank", rank)] for rank in "012"]

    assert seconds("predicted") == [0.75, 0.04, 0]
    assert seconds("actual") == [1.5, 0.01, 0]
    assert got[GAP + "_count",] == 3
    assert got[GAP + "_sum",] == pytest.approx(0.75 + 0.03)
    assert got[GAP + "_bucket", ("le", "0.0005")] == 1


def test_only_pairs_count():
    world = World(2, **MODEL)
    world.count_ended(prefills=((250_000, None), (1, 1)), n=2, reason=Reason.CANCELLED)
    world.count_ended(prefills=(), reason=Reason.CANCELLED)
    got = world.samples()
    assert got["rankgate_rank_prefill_predicted_seconds_total", ("rank", "0")] == 0
    assert got[GAP + "_count",] == 1


def test_guesses_without_a_model_are_not_predictions():
    world = World(2)
    world.count_ended(prefills=((10, 20),))
    assert not [name for name, *_ in world.samples() if "prefill_" in name or "predictor" in name]


def test_the_predictor_s_scale_and_faults():
    world = World(1, **MODEL)
    world.scheduled.predictor.scale, world.scheduled.predictor.faults = 1.25, 4
    got = world.samples()
    assert got["rankgate_predictor_scale_ratio",] == 1.25
    assert got["rankgate_predictor_faults_total",] == 4

"""When a batch goes, how large it is, and what closes it."""

import pytest

from gateway.config.scheduling import Predictor as PredictorSettings
from gateway.core.batcher import BatchReason
from gateway.core.predictor import Predictor
from tests.support.batching import FixedPredictor, Rig, make_request, numbers

LATE = 1000.0


def busy(**settings):
    """A rank with work of others, a gate that does not matter here and a window of 100 ms."""
    return Rig(others=1, **({"window_ms": 100, "max_in_flight_batches": 100} | settings))


def refuse(*refused):
    return lambda entry, tokens: entry.number not in refused


def test_nothing_queued_is_no_batch():
    assert busy().peek(LATE) is None
    assert Rig().peek(LATE) is None


def test_an_idle_rank_gets_one_request_at_once():
    rig = Rig(window_ms=300)
    rig.arrive(at=5.0)
    (batch,) = rig.step(5.0)
    assert numbers(batch) == [1]
    assert batch.reason == "idle_rank"


def test_an_idle_rank_gets_all_that_is_there():
    rig = Rig(window_ms=300)
    rig.arrive(5)
    assert [len(batch.entries) for batch in rig.step(0.0)] == [5]


def test_the_rank_is_busy_after_its_first_batch():
    rig = Rig(window_ms=100, max_in_flight_batches=2)
    rig.arrive(1)
    rig.step(0.0)
    rig.arrive(1, at=0.01)
    assert rig.step(0.05) == []
    rig.finish_oldest()
    assert rig.step(0.05)[0].reason == "idle_rank"


def test_a_full_batch_leaves_at_once_on_a_busy_rank():
    rig = busy(max_requests=8, window_ms=300)
    rig.arrive(7)
    assert rig.peek(0.0) is None
    rig.arrive(1)
    batch = rig.peek(0.0)
    assert numbers(batch) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.reason == "batch_full"


def test_a_busy_rank_waits_for_exactly_the_window():
    rig = busy()
    rig.arrive(at=5.0)
    rig.arrive(at=5.05)
    assert rig.peek(5.099) is None
    batch = rig.peek(5.0 + 0.1)
    assert numbers(batch) == [1, 2]
    assert batch.reason == "window"


def test_no_window_sends_what_there_is():
    rig = busy(window_ms=0)
    rig.arrive(3)
    batch = rig.peek(0.0)
    assert numbers(batch) == [1, 2, 3]
    assert batch.reason == "window"


def test_newcomers_that_sort_first_do_not_renew_the_window():
    rig = busy(window_ms=100)
    old = rig.arrive(at=0.0)
    for arrived_at in (0.05, 0.099):
        rig.arrive(at=arrived_at, priority=1)
        assert rig.step(arrived_at) == []
    rig.arrive(at=0.1, priority=1)
    (batch,) = rig.step(0.1)
    assert old in numbers(batch)
    assert numbers(batch)[0] != old


def test_the_oldest_member_counts_not_the_oldest_queued():
    rig = busy(max_requests=3, window_ms=100, preferred_sizes=(2,))
    rig.arrive(at=0.0)
    rig.arrive(2, at=1.0, priority=1)
    batch = rig.peek(1.0)
    assert numbers(batch) == [2, 3]
    assert batch.reason == "preferred_size", "not late: the late one is not in it"


def test_tokens_are_bounded_by_their_real_sum():
    rig = busy(max_tokens=30)
    rig.arrive(3, prompt_tokens=10)
    batch = rig.peek(0.0)
    assert len(batch.entries) == 3
    assert batch.reason == "token_cap", "nothing more fits: there is nothing to wait for"
    rig = busy(max_tokens=29)
    rig.arrive(3, prompt_tokens=10)
    assert numbers(rig.peek(0.0)) == [1, 2]


def test_padded_tokens_are_bounded_by_the_longest_times_the_count():
    rig = busy(max_padded_tokens=60)
    rig.arrive(prompt_tokens=5)
    rig.arrive(prompt_tokens=20)
    assert rig.peek(0.0) is None, "2 x 20 leaves room for a third of up to 20"
    rig.arrive(prompt_tokens=21)
    batch = rig.peek(0.0)
    assert numbers(batch) == [1, 2]
    assert batch.reason == "token_cap"
    rig = busy(max_padded_tokens=59)
    rig.arrive(2, prompt_tokens=20)
    assert rig.peek(0.0).reason == "token_cap", "3 x 20 cannot be"


def test_predicted_time_caps_growth_before_it_is_exceeded():
    rig = busy(max_predicted_ms=30, predictor=FixedPredictor(per_token_us=1000))
    rig.arrive(3, prompt_tokens=10)
    assert rig.peek(0.0) is None, "exactly the cap is within it"
    rig.arrive(1, prompt_tokens=1)
    batch = rig.peek(0.0)
    assert numbers(batch) == [1, 2, 3]
    assert batch.reason == "predicted_cap"
    assert batch.predicted_us == 30_000


@pytest.mark.parametrize(
    ("formula", "size", "predicted_us"),
    [
        ("0.5 * total_prompt_tokens + 2", 5, 27_000),
        ("total_prompt_tokens * batch_size", 1, 10_000),  # two of 10 would be 40 ms
        ("log(0)", 8, 2_400),  # a fault counts 30 us a token
    ],
)
def test_the_cap_follows_the_formula(formula, size, predicted_us):
    rig = busy(max_predicted_ms=27, predictor=Predictor(PredictorSettings(prefill_ms=formula)))
    rig.arrive(9)
    batch = rig.peek(0.0)
    assert len(batch.entries) == size
    assert batch.predicted_us == predicted_us


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_tokens": 9}, "token_cap"),
        ({"max_padded_tokens": 9}, "token_cap"),
        ({"max_predicted_ms": 9}, "predicted_cap"),
    ],
)
def test_a_head_beyond_a_cap_goes_alone_and_at_once(settings, reason):
    rig = busy(**settings)
    rig.arrive(1, prompt_tokens=10)
    batch = rig.peek(0.0)
    assert numbers(batch) == [1]
    assert batch.reason == reason
    rig.arrive(1, prompt_tokens=1)
    assert numbers(rig.peek(LATE)) == [1]


def test_the_first_that_does_not_fit_closes_the_batch():
    rig = busy(fits=refuse(3))
    rig.arrive(5)
    batch = rig.peek(0.0)
    assert numbers(batch) == [1, 2], "4 and 5 would fit, and 3 would starve"
    assert batch.reason == "closed"


@pytest.mark.parametrize("settings", [{"max_tokens": 25}, {"max_padded_tokens": 39}, {"max_predicted_ms": 25}])
def test_small_ones_do_not_overtake_a_large_one(settings):
    rig = busy(**settings)
    for prompt_tokens in (10, 20, 1, 1):
        rig.arrive(prompt_tokens=prompt_tokens)
    assert numbers(rig.peek(LATE)) == [1]


def test_the_rank_is_asked_with_the_tokens_before_and_never_about_the_head():
    asked = []
    rig = busy(fits=lambda entry, tokens: asked.append((entry.number, tokens)) or True)
    for prompt_tokens in (10, 20, 5):
        rig.arrive(prompt_tokens=prompt_tokens)
    rig.peek(LATE)
    assert asked == [(2, 10), (3, 30)]


@pytest.mark.parametrize(
    "settings", [{"max_requests": 2}, {"max_tokens": 20}, {"max_padded_tokens": 29}, {"preferred_sizes": (2,)}]
)
def test_a_complete_batch_reads_no_further(settings):
    rig = busy(**settings)
    rig.arrive(9)
    entries = iter(rig.queue)
    rig.former.form(entries, 0.0, is_idle=False, fits=rig.fits)
    assert next(entries).number == 3


def test_sequences_of_one_request_are_members_like_all_others():
    request = make_request(1, n=3)
    rig = busy(max_requests=2)
    rig.arrive(3)
    for entry, sequence in zip(rig.queue, request.sequences, strict=True):
        entry.sequence = sequence
    assert [len(batch.entries) for batch in rig.step(LATE)] == [2, 1]


def test_no_bound_on_predicted_time_means_one_prediction_per_batch():
    rig = busy(max_requests=4)
    rig.arrive(3)
    assert rig.peek(0.0) is None
    assert rig.predictor.calls == 0
    rig.arrive(1)
    assert rig.peek(0.0).predicted_us == 40_000
    assert rig.predictor.calls == 1


@pytest.mark.parametrize("broken", ["predictor", "fits"])
def test_a_fault_while_forming_loses_nothing(broken):
    rig = busy(max_requests=3, max_predicted_ms=1000)
    rig.arrive(3)
    before = [[getattr(entry, name) for name in entry.__slots__] for entry in rig.queue]

    def fail(entry, tokens):
        raise ZeroDivisionError

    fits = fail if broken == "fits" else rig.fits
    rig.predictor.fault = ZeroDivisionError() if broken == "predictor" else None
    with pytest.raises(ZeroDivisionError):
        rig.former.form(iter(rig.queue), 0.0, is_idle=False, fits=fits)
    assert [[getattr(entry, name) for name in entry.__slots__] for entry in rig.queue] == before
    rig.predictor.fault = None
    assert numbers(rig.peek(0.0)) == [1, 2, 3]


def test_next_due_is_when_the_window_ends():
    rig = busy(window_ms=100)
    assert rig.former.next_due([], 3.0) is None
    rig.arrive(at=5.0)
    rig.arrive(at=5.05, priority=1)
    due = rig.former.next_due(iter(rig.queue), 5.06)
    assert due == 5.0 + 0.1
    assert rig.peek(5.09) is None
    assert numbers(rig.peek(due)) == [2, 1]


@pytest.mark.parametrize("settings", [{"window_ms": 0}, {"max_requests": 2}, {"preferred_sizes": (2,)}])
def test_next_due_is_now_when_nothing_keeps_the_batch(settings):
    rig = busy(**settings)
    rig.arrive(2, at=5.0)
    assert rig.former.next_due(rig.queue, 5.01) == 5.01


def test_reasons_are_stable_strings():
    expected = {"batch_full", "preferred_size", "window", "idle_rank", "predicted_cap", "token_cap", "closed"}
    assert {str(reason) for reason in BatchReason} == expected

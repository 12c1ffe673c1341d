"""Calibration: the scale follows actual over predicted time, from below and within bounds."""

import random
from collections import deque

import pytest

from gateway.config.scheduling import Predictor as Settings
from gateway.core.predictor import MAX_US, MIN_SAMPLES, Predictor


def predictor(**more):
    return Predictor(Settings(prefill_ms="0.1 * sum(new_tokens)", step_ms="5", **{"calibrate": True} | more))


def feed(model, *ratios, times=1):
    """Whole samples: each is complete once the next prefill is observed, which a last one without a prediction does."""
    for ratio in ratios * times:
        model.observe(1000, round(1000 * ratio))
    model.observe(0, 1)


def test_predictions_follow_what_prefills_take():
    model = predictor()
    feed(model, 1.5, times=100)
    assert model.scale == pytest.approx(1.5)
    assert model.prefill_us(1000) == 150_000
    assert model.batch_us([(1000, 0), (3000, 1000)]) == 450_000
    assert model.step_us(1, 1) == 5_000


def test_off_by_default():
    model = predictor(calibrate=False)
    feed(model, 3, times=100)
    model.observe_prefill(1000, 0, 300_000)
    assert model.scale == 1.0
    assert model.prefill_us(1000) == 100_000


def test_a_few_samples_change_nothing():
    model = predictor()
    feed(model, 2, times=MIN_SAMPLES - 1)
    assert model.scale == 1.0
    feed(model, 2)
    assert model.scale == pytest.approx(2.0)


@pytest.mark.parametrize(("ratio", "scale"), [(1000, 10.0), (0.001, 0.1), (10, 10.0), (0.1, 0.1)])
def test_the_scale_is_bounded(ratio, scale):
    model = predictor()
    feed(model, ratio, times=3 * MIN_SAMPLES)
    assert model.scale == pytest.approx(scale)
    assert 0.1 <= model.scale <= 10.0


def test_a_scaled_prediction_is_no_longer_than_an_hour():
    model = predictor()
    feed(model, 10, times=100)
    assert model.prefill_us(20_000_000) == MAX_US
    assert model.batch_us([(10_000_000, 0)] * 2) == MAX_US
    assert model.faults == 0


def test_predictions_of_nothing_say_nothing():
    model = predictor()
    feed(model, 1.5, times=50)
    for _ in range(500):
        model.observe(0, 5000)
        model.observe(-3, 5000)
    assert model.scale == pytest.approx(1.5)


def test_prefills_that_ran_together_are_one_sample():
    """The rank's time goes to the first of them, the others get 0."""
    model = predictor()
    for size in (1, 4, 2, 8) * 50:
        model.observe(1000, 1000 * size)
        for _ in range(size - 1):
            model.observe(1000, 0)
    assert model.scale == pytest.approx(1.0)


def test_a_first_prefill_without_a_time_is_no_sample():
    model = predictor()
    for _ in range(10):
        model.observe(1000, 0)
        model.observe(1000, -5)
    feed(model, 1.5, times=50)
    assert model.scale == pytest.approx(1.5)


def test_down_is_quick_and_up_is_slow():
    down, up = predictor(), predictor()
    feed(down, 1, times=500)
    feed(up, 1, times=500)
    feed(down, 0.5, times=16)
    feed(up, 2, times=16)
    assert down.scale < 0.7
    assert 1.0 < up.scale < 1.15
    feed(up, 2, times=500)
    assert up.scale == pytest.approx(2.0, rel=0.02)


def test_a_quick_rise_is_not_kept_after_a_fall():
    """The lower average counts also where it is the quick one."""
    model = predictor()
    feed(model, 2, times=500)
    feed(model, 1, times=60)
    assert 1.0 <= model.scale < 1.05


def test_one_prefill_that_hung_does_not_count_for_many():
    model = predictor()
    feed(model, 1, times=200)
    feed(model, 1e9)
    assert 1.0 <= model.scale < 1.03


def test_noise_does_not_push_predictions_up():
    noise = random.Random(5)
    model, scales = predictor(), []
    for number in range(3000):
        model.observe(1000, round(1000 * noise.lognormvariate(0, 0.7)))
        if number > 200:
            scales.append(model.scale)
    assert 0.7 < sum(scales) / len(scales) < 1.0
    assert max(scales) < 1.2


def test_the_scale_does_not_overshoot_however_much_is_in_flight():
    model, waiting, scales = predictor(), deque(), []
    for _ in range(4000):
        waiting.append(model.prefill_us(1000))
        if len(waiting) > 1000:
            waiting.popleft()
            model.observe_prefill(1000, 0, 250_000)  # 2.5 times what the formula says
            scales.append(model.scale)
    assert max(scales) == pytest.approx(2.5)
    assert min(scales[MIN_SAMPLES:]) == pytest.approx(2.5)
    assert waiting[-1] == 250_000


def test_cached_tokens_count_in_what_is_predicted_anew():
    model = predictor()
    for _ in range(100):
        model.observe_prefill(5000, 4000, 200_000)
    assert model.scale == pytest.approx(2.0)


def test_the_same_prefills_give_the_same_scale():
    noise = random.Random(9)
    seen = [(noise.randint(0, 9999), noise.randint(0, 9999)) for _ in range(500)]
    models = predictor(), predictor()
    for model in models:
        for predicted_us, actual_us in seen:
            model.observe(predicted_us, actual_us)
    assert models[0].scale == models[1].scale != 1.0

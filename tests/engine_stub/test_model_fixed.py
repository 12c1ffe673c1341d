"""The exact arithmetic: bounds, tables, and that sums are exact where they are said to be."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from engine_stub.config import LLAMA_8B
from engine_stub.model import ModelError, fixed, tables
from engine_stub.model.shape import RopeScaling, Shape, of_architecture
from tests.support.models import SHAPE


def shape(**changes):
    fields = {name: getattr(SHAPE, name) for name in SHAPE.__struct_fields__}
    return Shape(**fields | changes)


def test_exp_is_within_one_unit_in_the_last_place():
    x = np.concatenate([-np.geomspace(1e-9, 700, 2000), [0.0, -1.0, -math.log(2)]])
    with localcontext() as context:
        context.prec = 40
        exact = [Decimal(value).exp() for value in x.tolist()]
        errors = [
            abs(Decimal(found) - true) / Decimal(math.ulp(float(true)))
            for found, true in zip(fixed.exp_negative(x).tolist(), exact, strict=True)
        ]
    assert max(errors) <= 1
    assert fixed.exp_negative(np.array([0.0, -701.0, -math.inf])).tolist() == [1.0, 0.0, 0.0]


def test_softmax_numerators_are_rounded_exponentials_down_to_zero():
    table = tables.softmax_numerators()
    expected = [round(math.exp(-(step + 0.5) / 4096) * 2**20) for step in range(len(table))]
    assert table.tolist() == expected
    assert table[-1] == 0
    assert table[-2] == 1


def test_silu_is_rounded_for_every_activation():
    table = tables.silu()
    assert len(table) == 2 * fixed.LIMIT + 1
    for units in (-(2**18), -40_000, -4096, -1, 0, 1, 4096, 40_000, 2**18):
        real = units / 4096
        assert table[units + 2**18] == round(real / (1 + math.exp(-real)) * 4096)
    assert not np.signbit(table[table == 0]).any()


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rotary_tables_are_rounded_cosines_and_sines(theta):
    cosine, sine = tables.rotary(shape(rope_theta=theta), 5000)
    for position in (0, 1, 2, 17, 999, 4999):
        for pair in range(4):
            angle = position * theta ** (-pair / 4)
            assert abs(cosine[position, pair] / 2**20 - math.cos(angle)) < 0.51 * 2**-20
            assert abs(sine[position, pair] / 2**20 - math.sin(angle)) < 0.51 * 2**-20
    assert cosine[0].tolist() == [2**20] * 4
    assert sine[0].tolist() == [0] * 4


def test_scaled_rotary_frequencies_keep_fast_pairs_and_stretch_slow_ones():
    """Llama 3.1's settings: factor 8, original context 8192, wave lengths from 8192/4 to 8192/1 are blended."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)
    plain = tables.frequencies(shape(head_dim=128, rope_theta=500_000.0))
    scaled = tables.frequencies(shape(head_dim=128, rope_theta=500_000.0, rope_scaling=scaling))
    ratios = [float(before / after) for before, after in zip(plain, scaled, strict=True)]
    waves = [2 * math.pi / float(frequency) for frequency in plain]
    for ratio, wave in zip(ratios, waves, strict=True):
        if wave < 8192 / 4:
            assert ratio == 1
        elif wave > 8192:
            assert ratio == pytest.approx(8)
        else:
            share = (8192 / wave - 1) / 3
            assert 1 / ratio == pytest.approx((1 - share) / 8 + share)
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(8)
    assert any(1 < ratio < 7.9 for ratio in ratios)


def test_a_sum_at_the_bound_is_exact_and_one_beyond_it_is_refused():
    """The widest linear layer that `check` lets pass: every product at its bound, the sum checked in integers."""
    width = 2**20
    fixed.check(shape(intermediate=width))
    with pytest.raises(ModelError, match="1048577 inputs needs 54 bits"):
        fixed.check(shape(intermediate=width + 1))
    x = np.full(width, fixed.LIMIT)
    weight = np.full(width, fixed.WEIGHT_LIMIT)
    x[0] -= 1
    weight[0] -= 1
    assert int(x @ weight) == (width - 1) * 2**33 + (2**18 - 1) * (2**15 - 1)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"hidden": 2**18}, "mean square of 262144"), ({"head_dim": 2**18}, "score over head_dim 262144")],
)
def test_shapes_whose_sums_could_round_are_refused(changes, what):
    with pytest.raises(ModelError, match=what):
        fixed.check(shape(**changes))


def test_published_shapes_are_within_the_bounds():
    fixed.check(of_architecture(LLAMA_8B, 128_256))


def test_rounding_goes_to_even_and_clips():
    values = np.array([0.5, 1.5, -0.5, 2.5, 1e9, -1e9], dtype=np.float32) / np.float32(4096)
    assert fixed.weights(values).tolist() == [0, 2, 0, 2, 2**15, -(2**15)]
    assert fixed.activations(values)[4:].tolist() == [2**18, -(2**18)]

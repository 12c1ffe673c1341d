"""Tables of the exact model: softmax numerators, SiLU and rotary angles. Made on the host, without libm."""

from decimal import Decimal, localcontext
from functools import cache

import numpy as np
from numpy.typing import NDArray

from engine_stub.model import fixed
from engine_stub.model.shape import RopeScaling, Shape

ROPE_BITS = 20
_DIGITS = 50
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582")
_TURN_BITS = 64


@cache
def softmax_numerators() -> fixed.Floats:
    """Numerators by distance d >= 0 from the largest score, in steps of 2^-12: entry i is for i <= d < i + 1.

    A value is e^-d at the middle of its step, in units of 2^-20. The last entry is 0 and stands for all
    larger distances, so it is also what hidden positions get.
    """
    # e^-d is below half a unit from d = 21 ln 2 = 14.6 on.
    steps = np.arange(15 << fixed.GRID_BITS, dtype=np.float64)
    values = np.rint(fixed.exp_negative(-(steps + 0.5) * fixed.GRID) * 2.0**fixed.PROBABILITY_BITS)
    assert values[-1] == 0
    table = values[: int(np.argmin(values != 0)) + 1].copy()
    table.setflags(write=False)
    return table


@cache
def silu() -> fixed.Floats:
    """The SiLU x / (1 + e^-x) of every activation x, both in units; entry 0 belongs to the lowest one."""
    magnitude = np.arange(2**fixed.ACTIVATION_BITS + 1, dtype=np.float64)
    small = fixed.exp_negative(-magnitude * fixed.GRID)
    positive = np.rint(magnitude / (1.0 + small))
    # For -x the factor is e^-x / (1 + e^-x).
    negative = np.rint(-magnitude * small / (1.0 + small))
    table = np.concatenate([negative[:0:-1], positive]) + 0.0  # no negative zeros
    table.setflags(write=False)
    return table


def frequencies(shape: Shape) -> list[Decimal]:
    """Angle per position of each rotated pair, in radians, to about 50 digits."""
    half = shape.head_dim // 2
    with localcontext() as context:
        context.prec = _DIGITS
        theta = Decimal(shape.rope_theta)
        plain = [theta ** (Decimal(-pair) / Decimal(half)) for pair in range(half)]
        return [_scaled(frequency, shape.rope_scaling) for frequency in plain]


def phases(shape: Shape) -> NDArray[np.uint64]:
    """Turns per position of each pair, as multiples of 2^-64 of a full turn: products with positions wrap exactly."""
    with localcontext() as context:
        context.prec = _DIGITS
        turns = [frequency / (2 * _PI) * 2**_TURN_BITS for frequency in frequencies(shape)]
        return np.array([int(turn.to_integral_value()) % 2**_TURN_BITS for turn in turns], dtype=np.uint64)


def rotary(shape: Shape, positions: int) -> tuple[fixed.Floats, fixed.Floats]:
    """Cosine and sine `[positions, head_dim / 2]` in units of 2^-20."""
    angles = np.arange(positions, dtype=np.uint64)[:, None] * phases(shape)[None, :]
    return _cosine(angles), _cosine(angles - np.uint64(1 << 62))  # sin a = cos(a - a quarter turn)


def _cosine(angles: NDArray[np.uint64]) -> fixed.Floats:
    """Cosine of angles in units of 2^-64 turn, rounded to 2^-20; separate operations only, as in `exp_negative`."""
    signed = angles.view(np.int64)  # -half a turn .. half a turn
    magnitude = np.abs(signed.astype(np.float64)) * 2.0**-62  # quarter turns, 0 .. 2
    mirrored = magnitude > 1.0
    quarter = np.where(mirrored, 2.0 - magnitude, magnitude)
    square = quarter * quarter
    result = np.full_like(square, _COSINE[0])
    for coefficient in _COSINE[1:]:
        result *= square
        result += coefficient
    return np.rint(np.where(mirrored, -result, result) * 2.0**ROPE_BITS) + 0.0


def _cosine_coefficients(terms: int) -> list[float]:
    """Taylor coefficients of cos(pi/2 q) in q^2, highest first."""
    with localcontext() as context:
        context.prec = _DIGITS
        coefficients, term = [], Decimal(1)
        for index in range(terms):
            coefficients.append(float(term))
            term *= -((_PI / 2) ** 2) / ((2 * index + 1) * (2 * index + 2))
    return coefficients[::-1]


_COSINE = _cosine_coefficients(13)


def _scaled(frequency: Decimal, scaling: RopeScaling | None) -> Decimal:
    """Llama 3.1's rule: slow pairs are divided by the factor, fast ones kept, those between are blended."""
    if scaling is None:
        return frequency
    wave_length = 2 * _PI / frequency
    turns = Decimal(scaling.original_positions) / wave_length
    low, high = Decimal(scaling.low_freq_factor), Decimal(scaling.high_freq_factor)
    slow = frequency / Decimal(scaling.factor)
    if turns < low:
        return slow
    if turns > high:
        return frequency
    share = (turns - low) / (high - low)
    return (1 - share) * slow + share * frequency

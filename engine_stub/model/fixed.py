"""The fixed-point numbers of `exact`, and why no bit of a result depends on how it was computed.

Activations, K and V are multiples of 2^-12 within +-64, weights multiples of 2^-12 within +-8, softmax
numerators multiples of 2^-20 in [0, 1]. All are kept as integers ("units") in float64. Every sum of
products then stays within 2^53, so each partial sum is an exact integer and addition is associative: any
BLAS, order, thread count, tile, padding or fused multiply-add gives the same bits. (Texts of more than
32768 positions are summed in pieces that begin at fixed positions.) What is left between the sums are single operations on one element, correctly rounded by IEEE 754 (+, -, x, /, sqrt, rint), and
look-ups in tables that are made once on the host. `check` refuses a shape that would leave these bounds.
"""

import numpy as np
from numpy.typing import NDArray

from engine_stub.model import ModelError
from engine_stub.model.shape import Shape

Floats = NDArray[np.float64]

GRID_BITS = 12
GRID = 2.0**-GRID_BITS
"""Value of one unit of an activation or a weight."""
LOGIT_UNIT = GRID * GRID
"""Value of one unit of a logit: a product of activation and weight."""
ACTIVATION_BITS = 18
LIMIT = 2.0**ACTIVATION_BITS
"""Bound of an activation, in units: +-64."""
WEIGHT_BITS = 15
WEIGHT_LIMIT = 2.0**WEIGHT_BITS
PROBABILITY_BITS = 20
MANTISSA_BITS = 53


EXACT_POSITIONS = 2 ** (MANTISSA_BITS - PROBABILITY_BITS - ACTIVATION_BITS)
"""Positions over which a weighted sum of values is exact; longer texts are summed in pieces of this length."""


def check(shape: Shape) -> None:
    """Raise `ModelError` unless all sums of the model are exact."""
    width = max(shape.hidden, shape.intermediate, shape.query_width)
    sums = {
        f"a linear layer over {width} inputs": ACTIVATION_BITS + WEIGHT_BITS + _bits(width),
        f"the mean square of {shape.hidden} values": 2 * ACTIVATION_BITS + _bits(shape.hidden),
        f"a score over head_dim {shape.head_dim}": 2 * ACTIVATION_BITS + _bits(shape.head_dim),
    }
    for what, bits in sums.items():
        if bits > MANTISSA_BITS:
            raise ModelError(
                f"exact numerics: {what} needs {bits} bits and float64 has {MANTISSA_BITS}: "
                "use a smaller model, or numerics: fast"
            )


def activations(values: NDArray[np.float32]) -> Floats:
    """Real values as units of an activation: nearest, ties to even, clipped."""
    return _units(values, LIMIT)


def weights(values: NDArray[np.float32]) -> Floats:
    """Real values as units of a weight: nearest, ties to even, clipped."""
    return _units(values, WEIGHT_LIMIT)


def exp_negative(x: Floats) -> Floats:
    """e^x for x <= 0 (0.0 below -700), the same bits on every machine.

    Range reduction by ln 2 in two parts and Horner's rule on the Taylor polynomial of degree 13; each
    step is an operation of its own, so that nothing can be contracted to a fused multiply-add, and no
    mathematical library takes part.
    """
    clipped = np.maximum(x, -700.0)
    powers = np.rint(clipped * _LOG2_E)
    rest = clipped - powers * _LN2_HIGH
    rest = rest - powers * _LN2_LOW
    result = np.full_like(rest, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        result *= rest
        result += coefficient
    result = np.ldexp(result, powers.astype(np.int32))
    result[x < -700.0] = 0.0
    return result


_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
# ln 2 split as in fdlibm: the first part has trailing zeros, so that its product with `powers` is exact.
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


def _taylor(degree: int) -> list[float]:
    """1/degree!, ..., 1/1!, 1/0!: quotients of small integers are correctly rounded everywhere."""
    factorials = [1]
    for number in range(1, degree + 1):
        factorials.append(factorials[-1] * number)
    return [1 / factorial for factorial in reversed(factorials)]


_TAYLOR = _taylor(13)


def _units(values: NDArray[np.float32], limit: float) -> Floats:
    units = values.astype(np.float64)
    units *= 1 / GRID
    np.rint(units, out=units)
    np.clip(units, -limit, limit, out=units)
    return units


def _bits(count: int) -> int:
    """Bits that `count` additions can add to a sum."""
    return (count - 1).bit_length()

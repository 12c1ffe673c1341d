"""How the next token is chosen from a row of logits, on the host, row by row.

The row, the request and (seed, position) decide; neither the batch nor a generator's state does. Weights
are integers, so sums and comparisons are exact and a draw is the same on every machine.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from engine_stub.model.fixed import Floats, exp_negative
from engine_stub.scheduler.plan import StepItem, TopLogprobs
from engine_stub.scheduler.sequence import Sampling

WEIGHT_BITS = 40
"""The best candidate weighs 2^40; 2^22 candidates still fit into 63 bits."""
NEGLIGIBLE = -28.0
"""A candidate this far below the best (in nats) weighs less than 1."""
LOGPROB_BITS = 20
"""Log probabilities are rounded to 2^-20: coarser than any error of `math.log`."""
STEP_BITS = 16
"""Distances from the best logit are rounded to 2^-16 for a draw: a weight is off by at most 1 in 10^5."""
LOW_BITS = 10
NUCLEUS_GUESS = 1024
"""Candidates that usually suffice for top-p: the rest is sorted only when they don't."""
_MASK = (1 << 64) - 1

Weights = NDArray[np.int64]


def choose(logits: Floats, item: StepItem, excluded: Sequence[int] = ()) -> tuple[int, TopLogprobs | None]:
    """The next token of an item, and its log probabilities if asked for.

    `logits` are real values, as the model gave them; `excluded` ids are never chosen. Log probabilities
    are those of the untouched row. Raises ValueError when no id is left to choose.
    """
    sampling = item.sampling
    processed = _penalised(logits, item)
    for ids in (item.banned_ids, excluded):
        if ids:
            processed[list(ids)] = -math.inf
    best = int(processed.argmax())
    if not processed[best] > -math.inf:  # NaN too
        raise ValueError(f"{item.request_id}: every id is banned or excluded, or the logits are not numbers")
    token = best if sampling.temperature == 0 else _drawn(processed, processed[best], item)
    return token, None if item.logprobs is None else top_logprobs(logits, token, item.logprobs)


def is_plain(item: StepItem) -> bool:
    """Whether the item's token is simply the largest logit that isn't banned."""
    sampling = item.sampling
    return sampling.temperature == 0 and item.logprobs is None and not _has_penalties(sampling)


def draw(seed: int | None, position: int) -> int:
    """64 uniform bits for a position of a text: SplitMix64 of both. No seed counts as seed 0."""
    return _mix(_mix((seed or 0) & _MASK) ^ position)


def top_logprobs(logits: Floats, token: int, count: int) -> TopLogprobs:
    """(id, log probability) of the chosen token, then of the best others: max(1, count) entries."""
    highest = logits.max()
    distances = logits - highest
    numerators = exp_negative(distances[distances > NEGLIGIBLE]) * 2.0**WEIGHT_BITS
    total = int(numerators.astype(np.int64).sum())
    normaliser = math.log(total) - WEIGHT_BITS * math.log(2)
    others = [index for index in _top(logits, count) if index != token][: max(0, count - 1)]
    scale = 2.0**LOGPROB_BITS
    return [(index, float(np.rint((distances[index] - normaliser) * scale) / scale)) for index in (token, *others)]


def _has_penalties(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _penalised(logits: Floats, item: StepItem) -> Floats:
    """A copy after penalties: repetition over prompt and output, presence and frequency over the output."""
    processed = logits.copy()
    sampling = item.sampling
    if not _has_penalties(sampling):
        return processed
    if sampling.repetition_penalty != 1:
        seen = sorted({*item.prompt_ids, *item.output_ids})
        values = processed[seen]
        processed[seen] = np.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    counts = Counter(item.output_ids)
    if counts:
        ids = list(counts)
        occurrences = np.array([counts[index] for index in ids], dtype=np.float64)
        processed[ids] -= sampling.frequency_penalty * occurrences
        processed[ids] -= sampling.presence_penalty
    return processed


def _drawn(processed: Floats, highest: float, item: StepItem) -> int:
    """Temperature, min-p, top-k, top-p, then one draw over the ids that are left, in the order of ids."""
    sampling = item.sampling
    distances = (processed - highest) / sampling.temperature
    ids = np.flatnonzero(distances > NEGLIGIBLE)
    distances = distances[ids]
    weights = _weights(distances)
    if sampling.min_p > 0:
        kept = weights >= sampling.min_p * 2.0**WEIGHT_BITS
        ids, distances, weights = ids[kept], distances[kept], weights[kept]
    if 0 < sampling.top_k < len(ids):
        places = np.sort(_top(distances, sampling.top_k))
        ids, weights = ids[places], weights[places]
    if sampling.top_p < 1:
        places = _nucleus(weights, sampling.top_p)
        ids, weights = ids[places], weights[places]
    sums = np.cumsum(weights)
    target = draw(item.seed, item.position) * int(sums[-1]) >> 64
    return int(ids[np.searchsorted(sums, target, side="right")])


def _weights(distances: Floats) -> Weights:
    """Weights of candidates NEGLIGIBLE < distance <= 0, by the product of two small tables."""
    high, low = _exponentials()
    steps = np.rint(distances * -(2.0**STEP_BITS)).astype(np.int64)
    return (high.take(steps >> LOW_BITS) * low.take(steps & (1 << LOW_BITS) - 1)).astype(np.int64)


@cache
def _exponentials() -> tuple[Floats, Floats]:
    """2^40 e^-d for the upper bits of a distance, e^-d for the lower ones."""
    coarse = np.arange(int(-NEGLIGIBLE * 2**STEP_BITS) // 2**LOW_BITS + 1, dtype=np.float64)
    fine = np.arange(2**LOW_BITS, dtype=np.float64)
    return (
        exp_negative(coarse * -(2.0 ** (LOW_BITS - STEP_BITS))) * 2.0**WEIGHT_BITS,
        exp_negative(fine * -(2.0**-STEP_BITS)),
    )


def _top(values: Floats | Weights, count: int) -> NDArray[np.int64]:
    """Places of the `count` largest values, largest first, the lower place first among equals."""
    count = min(count, len(values))
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    places = np.flatnonzero(values >= threshold)
    return places[np.argsort(-values[places], kind="stable")[:count]]


def _nucleus(weights: Weights, top_p: float) -> NDArray[np.int64]:
    """Places, in order, of the smallest set of heaviest candidates that reaches `top_p` of the whole."""
    target = int(top_p * int(weights.sum()))
    order = _top(weights, NUCLEUS_GUESS)
    sums = np.cumsum(weights[order])
    if sums[-1] < target:
        order = _top(weights, len(weights))
        sums = np.cumsum(weights[order])
    count = int(np.searchsorted(sums, target, side="left")) + 1
    return np.sort(order[:count])


def _mix(value: int) -> int:
    """One step of SplitMix64 from state `value`."""
    value = value + 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31

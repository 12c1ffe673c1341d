"""What is offered: arrival times and lengths, seeded. Times are scaled to a rate when a cell runs.

`azure_conv`: the trace of `tools/data`, or any trace file with its columns. Seed s starts at another fifth of it
and goes round at its end.
`bursty`: lognormal lengths with a heavy tail, gamma arrivals, and times of three times the rate.
"""

import csv
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import NamedTuple

TRACE = Path(__file__).resolve().parents[3] / "tools/data/azure_conv_hour.csv"
SEEDS_PER_TURN = 5
MAX_PROMPT_TOKENS = 32_000
CALM_ARRIVALS, BURST_ARRIVALS, BURST_FACTOR = 200, 100, 3.0


class Offer(NamedTuple):
    """One request: when (seconds), how long, for whom."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""


class Workload(NamedTuple):
    """Offers in order of time; `rate` is their mean number per second."""

    name: str
    seed: int
    offers: tuple[Offer, ...]

    @property
    def rate(self) -> float:
        """Mean arrivals per second."""
        return len(self.offers) / self.offers[-1].at_s

    def at_rate(self, rate: float) -> "Workload":
        """The same pattern, faster or slower."""
        factor = self.rate / rate
        return self._replace(offers=tuple(offer._replace(at_s=offer.at_s * factor) for offer in self.offers))


@lru_cache(maxsize=4)
def _trace(path: Path) -> tuple[tuple[float, int, int], ...]:
    with path.open(newline="") as lines:
        rows = [(float(a), int(p), int(o)) for a, p, o in list(csv.reader(lines))[1:]]
    return tuple(sorted(rows))


def azure_conv(seed: int, count: int, path: Path = TRACE) -> Workload:
    """`count` consecutive requests of the trace, from a start that depends on the seed; it goes round at its end."""
    rows = _trace(path)
    start = (seed % SEEDS_PER_TURN) * len(rows) // SEEDS_PER_TURN
    turn_s = rows[-1][0] * len(rows) / (len(rows) - 1)
    origin = rows[start - 1][0] - (0 if start else turn_s)
    offers = []
    for index in range(start, start + count):
        turn, row = divmod(index, len(rows))
        at_s, prompt, output = rows[row]
        offers.append(Offer(at_s + turn * turn_s - origin, prompt, max(1, output)))
    return Workload("azure_conv", seed, tuple(offers))


def _gaps(random: Random) -> Iterator[float]:
    """Gamma gaps (coefficient of variation 2): 200 arrivals at rate 1, 100 at rate 3, in turns; lengths by chance."""
    is_burst, left = False, random.expovariate(1 / CALM_ARRIVALS)
    while True:
        left -= 1
        if left < 0:
            is_burst = not is_burst
            left = random.expovariate(1 / (BURST_ARRIVALS if is_burst else CALM_ARRIVALS))
        yield random.gammavariate(0.25, 4.0) / (BURST_FACTOR if is_burst else 1.0)


def bursty(seed: int, count: int) -> Workload:
    """Prompts: median 700, sigma 1.2 (mean about 1400), at most 32000. Outputs: median 120, sigma 0.8 (mean 165)."""
    random = Random(f"bursty-{seed}")
    gaps, now = _gaps(random), 0.0
    offers = []
    for _ in range(count):
        now += next(gaps)
        prompt = min(MAX_PROMPT_TOKENS, max(8, int(random.lognormvariate(6.55, 1.2))))
        output = min(2000, max(1, int(random.lognormvariate(4.79, 0.8))))
        offers.append(Offer(now, prompt, output))
    return Workload("bursty", seed, tuple(offers))


def two_tenants(workload: Workload, seed: int, share: float) -> Workload:
    """The same offers, `share` of them (by chance) of tenant `light`, the others of tenant `heavy`."""
    random = Random(f"tenants-{seed}")
    offers = tuple(offer._replace(tenant="light" if random.random() < share else "heavy") for offer in workload.offers)
    return workload._replace(offers=offers)

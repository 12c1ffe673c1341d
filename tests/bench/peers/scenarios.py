"""What is measured: how much load, for how long, on which kind of site."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One measurement. `unit` is the figure that ratios are taken of."""

    name: str
    unit: str = "us_per_token"
    step_ms: float = 0.0
    tokens: int = 64
    tokens_per_row: int = 1
    prompt_tokens: int = 16
    conns: int = 8
    streams: int = 32
    slow: int = 0
    """Connections with one reader each that takes less than the ranks send."""
    hold: bool = False
    """Every stream gets its first token and stays open."""
    ramp_s: float = 0.05
    """Time in which the first requests leave."""
    warm_s: float = 0.4
    measure_s: float = 0.7
    fresh: int = 0
    """More than 0: on a site of its own with so many ranks, started for this measurement."""

    @property
    def live(self) -> int:
        """Streams at a time."""
        return self.conns * self.streams

    def quick(self) -> "Scenario":
        """The same in a second, to see that it works."""
        return replace(self, tokens=min(self.tokens, 16), ramp_s=0.05, warm_s=0.2, measure_s=0.3)


def _paced(name: str, conns: int, streams: int, **changes: float) -> Scenario:
    """A row every 20 ms. Requests are out of step with each other: their first leave over the length of one."""
    scenario = Scenario(name=name, step_ms=20.0, conns=conns, streams=streams, ramp_s=1.28, warm_s=1.3, measure_s=1.2)
    return replace(scenario, **changes)  # type: ignore[arg-type]


def _memory(name: str, tokens: int, tokens_per_row: int) -> Scenario:
    """4,096 streams, looked at when all of them have most of their tokens."""
    return Scenario(
        name=name,
        unit="kb_per_stream",
        step_ms=150.0,
        tokens=tokens,
        tokens_per_row=tokens_per_row,
        streams=512,
        ramp_s=4.0,
        warm_s=9.2,
        measure_s=0.4,
        fresh=1,
    )


_EVERYWHERE = (
    Scenario(name="light", unit="ttft_p50_ms", tokens=1, conns=1, streams=1, warm_s=0.2),
    _paced("paced256", 8, 32, measure_s=2.4),
    Scenario(name="flood", measure_s=1.0),
    Scenario(name="short", unit="us_per_request", tokens=1, streams=8),
)
_DIRECT = (
    Scenario(name="short1k", unit="us_per_request", tokens=1, streams=8, prompt_tokens=1000),
    # Within long answers: rows, and hardly a request that begins or ends.
    _paced("rows256", 8, 32, tokens=512),
    _paced("rows1024", 8, 128, tokens=512),
    _paced("paced64", 8, 8),
    _paced("paced1024", 8, 128),
    _paced("paced4096", 8, 512, step_ms=40.0, ramp_s=2.56, warm_s=4.5),
    _paced("slow", 8, 30, slow=16),
    _paced("conns1", 1, 256),
    _paced("conns256", 256, 1),
)
_MEMORY = (
    _memory("memory64", 64, 1),
    _memory("memory1024", 1024, 16),
    Scenario(name="idle10000", unit="kb_per_stream", hold=True, conns=16, streams=625, ramp_s=5.0, warm_s=0.0, fresh=1),
)
RANKS = (1, 4, 16, 64)
ROWS_PER_BATCH = 8
_SCALE = tuple(
    scenario
    for ranks in RANKS
    for scenario in (
        _paced(f"ranks{ranks}", 8, ranks * ROWS_PER_BATCH // 8, fresh=ranks),
        _paced(f"spread{ranks}", 8, 32, fresh=ranks),
    )
)

EVERYWHERE, DIRECT, MEMORY, SCALE = (
    {scenario.name: scenario for scenario in group} for group in (_EVERYWHERE, _DIRECT, _MEMORY, _SCALE)
)
"""For every peer; for those that do the same job; memory, once each; how ours grows, once."""
ALL = EVERYWHERE | DIRECT | MEMORY | SCALE

"""Any policy over a table in any state: what properties of decisions are checked on."""

from random import Random

from hypothesis import strategies as st

from gateway.config.schema import Policy as PolicySettings
from gateway.config.schema import PresetName
from gateway.core.ranks import RankState
from tests.support.policies import make_table, randomise

PRESETS = sorted(PresetName.__args__)
_COSTS = [
    "in_flight - fleet_min(in_flight)",
    "1 / (in_flight - 3)",
    "sqrt(waiting - 1) - kv_usage",
    "snapshot_age_ms",
    "-queued_tokens",
    "0",
]


def predict(table, random):
    """Give every rank with un-started work some predicted prefill of it."""
    for rank, since in enumerate(table.head_since):
        head_us = random.randrange(500_000) if since is not None else 0
        table.set_head(rank, since, head_us)
        table.pending_us[rank] = head_us + random.choice([0, random.randrange(2_000_000)]) if since is not None else 0


def any_policy():
    return st.one_of(
        st.builds(PolicySettings, preset=st.sampled_from(PRESETS)),
        st.builds(
            PolicySettings,
            cost=st.sampled_from(_COSTS),
            picker=st.sampled_from(["argmin", "p2c"]),
            tie_break=st.sampled_from(["random", "rotate", "first"]),
            objective=st.sampled_from(["min", "max"]),
        ),
    )


def shaken(seed, ranks):
    """A table in a random state; the same seed gives the same one."""
    random = Random(seed)
    table = make_table(ranks, max_in_flight_per_rank=55)
    randomise(table, random)
    predict(table, random)
    for rank in range(ranks):
        table.state[rank] = random.choice([RankState.READY] * 5 + [RankState.LOST])
        table.is_blocked[rank] = random.random() < 0.2
        if random.random() < 0.3:
            table.kv_usage[rank] = 0.99
        if random.random() < 0.2:
            table.snapshot_at[rank] = None
        table.refresh(rank)
    return table

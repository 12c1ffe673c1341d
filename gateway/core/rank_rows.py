"""Rows of the rank table that come and go while the gateway runs.

Every change is made in the table's own lists, since others hold them. What a rank has in flight is not touched.
"""

from math import inf

from gateway.config.schema import Config
from gateway.core.ranks import RankTable

_SETTINGS = ("size", "has_budgets", "is_sole_gateway", "times_prefill", "max_in_flight_setting", "max_kv_usage")
_LAID_OUT = (
    *("group_names", "budgets", "group_of", "group_rank", "engine_index"),
    *("is_resident", "counts_tokens"),
)
"""Columns that follow from the configuration alone."""


def adopt(table: RankTable, config: Config) -> None:
    """Give the table the configuration's rows and settings. The rows that both have keep their numbers and their state.

    Rows that are left out must have nothing in flight. The sums by group are the ledger's to count anew.
    """
    fresh = RankTable(config)
    for name in _SETTINGS:
        setattr(table, name, getattr(fresh, name))
    for name, column in vars(fresh).items():
        if isinstance(column, list):
            own = getattr(table, name)
            kept = 0 if name in _LAID_OUT else len(own)
            own[:] = own[: min(kept, len(column))] + column[kept:]
    for rank in range(table.size):
        table.limit_in_flight(rank)
        table.set_head(rank, table.head_since[rank], table.head_us[rank])
        table.refresh(rank)
    # The rows that went took their share of these with them.
    table.open_count = sum(table.is_open)
    table.over_kv_count = sum(table.is_over_kv)
    table.summarise()


def vacate(table: RankTable, rank: int) -> None:
    """Nobody is at this number any more; who comes next starts its own count of incarnations."""
    table.incarnation[rank] = 0
    table.info[rank] = None
    table.max_model_len[rank] = 0
    table.kv_capacity_tokens[rank] = table.free_kv_tokens[rank] = inf
    table.forget_snapshot(rank)
    table.refresh(rank)
    table.summarise()

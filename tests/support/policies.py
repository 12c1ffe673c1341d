"""Rank tables in any state, without a router: for tests and benchmarks of the policy."""

from random import Random

from gateway.config.schema import Admission, Config, Filters, Group, Model
from gateway.config.schema import Policy as PolicySettings
from gateway.core.policy import Policy
from gateway.core.ranks import RankState, RankTable
from gateway.types import RankInfo

INFO = RankInfo(max_model_len=32768, kv_capacity_tokens=200_000, max_num_seqs=256)


def make_table(
    ranks: int, *, filters: Filters | None = None, info: RankInfo = INFO, max_in_flight_per_rank: int | None = None
) -> RankTable:
    """A table whose ranks have all joined and are idle."""
    group = Group(name="g", protocol="vllm", handshake="tcp://127.0.0.1:5000", ranks=ranks)
    table = RankTable(
        Config(
            version=1,
            model=Model(name="m", max_context_tokens=32768, vocab_size=1000),
            groups=(group,),
            filters=filters or Filters(),
            admission=Admission(max_in_flight_per_rank=max_in_flight_per_rank),
        )
    )
    for rank in range(ranks):
        join(table, rank, info)
    return table


def join(table: RankTable, rank: int, info: RankInfo = INFO) -> None:
    """Bring a rank up, as the router does."""
    table.state[rank] = RankState.READY
    table.join(rank, table.incarnation[rank] + 1, info)
    table.refresh(rank)


def charge(table: RankTable, rank: int, prompt_tokens: int = 100) -> None:
    """Account for one dispatched request."""
    table.in_flight[rank] += 1
    table.in_flight_prefill[rank] += 1
    table.queued_tokens[rank] += prompt_tokens
    table.own_tokens[rank] += prompt_tokens
    table.sent_since_snapshot[rank] += 1
    table.refresh(rank)


def report(
    table: RankTable, rank: int, *, running: int = 0, waiting: int = 0, kv: float = 0.0, at: float = 0.0
) -> None:
    """Store a snapshot."""
    table.reported_running[rank] = table.running[rank] = running
    table.reported_waiting[rank] = table.waiting[rank] = waiting
    table.foreign[rank] = max(0, running + waiting - table.in_flight[rank])
    table.kv_usage[rank] = kv
    table.snapshot_at[rank] = at
    table.sent_since_snapshot[rank] = 0
    table.refresh(rank)


def randomise(table: RankTable, random: Random) -> None:
    """Give every rank some plausible load with a report, below every limit of the filters."""
    for rank in range(table.size):
        table.in_flight[rank] = random.randrange(1, 60)
        table.in_flight_prefill[rank] = random.randrange(table.in_flight[rank] + 1)
        table.in_flight_decode[rank] = table.in_flight[rank] - table.in_flight_prefill[rank]
        table.queued_tokens[rank] = random.randrange(50_000)
        table.ctx_tokens[rank] = random.randrange(80_000)
        table.own_tokens[rank] = random.randrange(80_000)
        table.head_since[rank] = random.choice([None, random.uniform(0, 100)])
        report(
            table,
            rank,
            running=random.randrange(60),
            waiting=random.choice([0, 0, random.randrange(40)]),
            kv=random.uniform(0.0, 0.8),
            at=random.uniform(0, 100),
        )
        table.sent_since_snapshot[rank] = random.randrange(6)


def make_policy(
    table: RankTable,
    settings: PolicySettings | None = None,
    *,
    filters: Filters | None = None,
    gateways: int = 1,
    coupled: bool = False,
    seed: int = 1,
) -> Policy:
    """A policy over the table with a seeded source of randomness."""
    return Policy(
        settings or PolicySettings(preset="lmetric"),
        filters or Filters(),
        table,
        gateways=gateways,
        coupled=coupled,
        rng=Random(seed).random,
    )

"""Decisions behind gates in one line each."""

from gateway.core.gate import GATE_REASONS
from tests.support.policies import charge, make_table

CLOSED = GATE_REASONS.index("unstarted_work")


def everywhere(_rank, _prompt_tokens):
    return True


def gate_of(table, *closed, state=CLOSED):
    return bytes(state if rank in closed else 0 for rank in range(table.size))


def decide(policy, gate, **options):
    values = {"prompt_tokens": 10, "max_tokens": 10, "kv_fits": everywhere, "hold_ratio": 0.0}
    return policy.decide_gated(5.0, gate=gate, **(values | options))


def loaded(*in_flight):
    table = make_table(len(in_flight))
    for rank, count in enumerate(in_flight):
        for _ in range(count):
            charge(table, rank)
    return table


def block(table, *ranks):
    for rank in ranks:
        table.is_blocked[rank] = True
        table.refresh(rank)

"""Which process has which ranks, and what each is configured with."""

from pathlib import Path

import pytest

from gateway.config.changes import refusals
from gateway.config.checks import check
from gateway.config.loader import parse_config
from gateway.processes import plan

DIRECTORY = Path("/run/x")


def config_of(protocol="tokenspeed", ranks=(4,), processes=2, min_ready=1, **more):
    groups = "".join(
        f"  - {{name: g{number}, protocol: {protocol}, handshake: 'tcp://127.0.0.1:{5570 + number}', ranks: {count},"
        f" min_ready: {min_ready}}}\n"
        for number, count in enumerate(ranks)
    )
    lines = "".join(f"{key}: {value}\n" for key, value in more.items())
    text = (
        f"version: 1\nprocesses: {processes}\nlisten: {{transport: fast}}\n"
        f"model: {{name: m, max_context_tokens: 4096, vocab_size: 100}}\ngroups:\n{groups}{lines}"
    )
    return parse_config(text, "f.yaml")


@pytest.mark.parametrize(("ranks", "processes"), [((4,), 2), ((3, 4), 3), ((5,), 4), ((1, 1, 6), 8)])
def test_every_tokenspeed_rank_has_exactly_one_process(ranks, processes):
    config = config_of(ranks=ranks, processes=processes)
    owned = [plan.owned_ranks(config, process) for process in range(processes)]
    assert sorted(rank for ranks in owned for rank in ranks) == list(range(sum(ranks)))
    sizes = [len(ranks) for ranks in owned]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    rank = 0
    for number, count in enumerate(ranks):
        for place in range(count):
            (process,) = plan.processes_of(config, number, place)
            assert rank in owned[process]
            rank += 1


def test_more_ranks_at_the_end_move_no_other():
    few, many = config_of(ranks=(3, 3)), config_of(ranks=(3, 9))
    for process in range(2):
        assert plan.owned_ranks(few, process) <= plan.owned_ranks(many, process)


def test_vllm_ranks_are_everybodys_in_the_order_of_the_client_indexes():
    config = config_of("vllm", processes=3)
    assert plan.owned_ranks(config, 1) is None
    assert plan.processes_of(config, 0, 2) == (0, 1, 2)


def test_one_process_alone_plays_the_coordinator():
    config = config_of("vllm", processes=3, gateways=2)
    shares = [plan.share_of(config, process, DIRECTORY) for process in range(3)]
    assert [share.groups[0].coordinator.enabled for share in shares] == [True, False, False]
    assert {share.gateways for share in shares} == {6}, "each counts as one of all that share the ranks"


def test_tokenspeed_ranks_have_one_gateway_each():
    config = config_of(gateways=1)
    assert {plan.share_of(config, process, DIRECTORY).gateways for process in range(2)} == {1}


@pytest.mark.parametrize("protocol", ["vllm", "tokenspeed"])
def test_a_share_is_a_valid_configuration_of_its_own(protocol):
    config = config_of(protocol, ranks=(3, 2), min_ready=2, state_dir="/var/lib/rankgate")
    for process in range(2):
        assert list(check(plan.share_of(config, process, DIRECTORY))) == []


def test_addresses_are_private_to_each_process():
    config = config_of(ranks=(2, 2), state_dir="/var/lib/rankgate")
    first, second = (plan.share_of(config, process, DIRECTORY) for process in range(2))
    assert [group.handshake for group in first.groups] == ["ipc:///run/x/h0-0", "ipc:///run/x/h1-0"]
    assert [group.handshake for group in second.groups] == ["ipc:///run/x/h0-1", "ipc:///run/x/h1-1"]
    assert first.state_dir == "/var/lib/rankgate/2-processes/0"
    assert second.state_dir == "/var/lib/rankgate/2-processes/1"
    assert (first.listen.admin, second.listen.admin) == (config.listen.admin, plan.PRIVATE_ADMIN)
    assert first.listen.metrics is second.listen.metrics is None
    assert first.listen.grpc == config.listen.grpc


@pytest.mark.parametrize(
    ("ranks", "min_ready", "shares"),
    [((4,), 1, [1, 1]), ((4,), 4, [2, 2]), ((5,), 5, [3, 2]), ((4,), 0, [0, 0]), ((1, 3), 1, [1, 1])],
)
def test_readiness_is_shared_out_as_the_ranks_are(ranks, min_ready, shares):
    config = config_of(ranks=ranks, min_ready=min_ready)
    found = [plan.share_of(config, process, DIRECTORY) for process in range(2)]
    assert [share.groups[-1].min_ready for share in found] == shares
    for process, share in enumerate(found):
        for number, group in enumerate(share.groups):
            own = sum(process in plan.processes_of(config, number, place) for place in range(group.ranks))
            assert group.min_ready <= own, "else it would never be ready"


def test_another_number_of_processes_needs_a_restart():
    old, new = config_of(processes=2), config_of(processes=3)
    assert refusals(new, old, old) == ["processes: needs a restart"]

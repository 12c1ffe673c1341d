"""Rules across keys, each reported where it can be mended."""

import tempfile
from pathlib import Path

import pytest
from msgspec import structs

from gateway.config.checks import check
from gateway.config.errors import format_loc
from gateway.config.loader import ConfigError, parse_config, parse_fragment
from gateway.config.schema import Listen, Policy, Sockets
from gateway.edges.engine_link.endpoints import Endpoints
from gateway.edges.engine_link.errors import LinkError
from gateway.processes import plan
from tests.support.config_cases import BASE, unmark

SECOND = """\
  - name: b
    protocol: vllm
    handshake: tcp://127.0.0.1:5571
    ranks: 2
"""


def refused(marked):
    text, line, column = unmark(marked)
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    message = str(caught.value)
    assert message.startswith(f"f.yaml:{line}:{column}: "), message
    return message.removeprefix(f"f.yaml:{line}:{column}: ")


SECTIONS = [
    ("listen: {grpc: §0.0.0.0:50051}\n", "0.0.0.0:50051 opens every network interface; name one address, or set listen.allow_wildcard: true (at $.listen.grpc)"),
    ("listen: {admin: §'*:50052'}\n", "*:50052 opens every network interface; name one address, or set listen.allow_wildcard: true (at $.listen.admin)"),
    ("listen: {metrics: §'[::]:9090'}\n", "[::]:9090 opens every network interface; name one address, or set listen.allow_wildcard: true (at $.listen.metrics)"),
    ("listen: {allow_wildcard: true, grpc: §'*:50051'}\n", "only handshakes know *; write 0.0.0.0 or [::] (at $.listen.grpc)"),
    ("listen: {grpc: §':::50051'}\n", "put the IPv6 address in brackets, [::] (at $.listen.grpc)"),
    ("listen: {grpc: §127.0.0.1:65536}\n", "port 65536 is out of range; the largest is 65535 (at $.listen.grpc)"),
    ("listen: {grpc: §ipv4:0.0.0.0:1}\n", "put the IPv6 address in brackets, [ipv4:0.0.0.0] (at $.listen.grpc)"),
    ("listen: {grpc: 127.0.0.1:7000, admin: §localhost:7000}\n", "localhost:7000 is already taken by $.listen.grpc (at $.listen.admin)"),
    ("listen: {allow_wildcard: true, grpc: 0.0.0.0:7000, metrics: §127.0.0.1:7000}\n", "127.0.0.1:7000 is already taken by $.listen.grpc (at $.listen.metrics)"),
    ("listen: {stream_interval_tokens: §8}\n", "with 8, set max_flush_delay_ms as well: else a slow sequence's tokens could wait for ever (at $.listen.stream_interval_tokens)"),
    ("listen: {§max_flush_delay_ms: 20}\n", "'max_flush_delay_ms' has no effect with stream_interval_tokens 1; leave it out (at $.listen.max_flush_delay_ms)"),
    ("listen: {transport: grpcio}\nprocesses: §2\n", "2 processes share listen.grpc, which listen.transport: fast can (at $.processes)"),
    ("failure: {eject: {base_s: §500}}\n", "base_s is 500, above max_s, 300 (at $.failure.eject.base_s)"),
    ("§policy: {}\n", "set 'preset' or 'cost' (at $.policy)"),
    ("§policy: {picker: random}\n", "set 'preset' or 'cost' (at $.policy)"),
    ("§policy: {cost: '', preset: null}\n", "set 'preset' or 'cost' (at $.policy)"),
    ("policy: {preset: smg, §cost: in_flight}\n", "set either 'preset' or 'cost', not both (at $.policy.cost)"),
    ("policy: {cost: in_flight, picker: §random}\n", "picker random uses no cost: remove policy.cost or set policy.picker to argmin (at $.policy.picker)"),
    ("policy: {preset: round_robin, picker: §argmin}\n", "picker argmin needs policy.cost or a policy.preset that has one (at $.policy.picker)"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "message"), SECTIONS)
def test_sections(section, message):
    assert refused(BASE + section) == message


BODY = [
    ("tcp://127.0.0.1:5570", "§tcp://0.0.0.0:5570", "0.0.0.0:5570 opens every network interface; name one address, or set listen.allow_wildcard: true (at $.groups[0].handshake)"),
    ("tcp://127.0.0.1:5570", "§tcp://*:5570", "*:5570 opens every network interface; name one address, or set listen.allow_wildcard: true (at $.groups[0].handshake)"),
    ("tcp://127.0.0.1:5570", "§tcp://127.0.0.1", "expected HOST:PORT (at $.groups[0].handshake)"),
    ("tcp://127.0.0.1:5570", "§tcp://127.0.0.1:*", "expected HOST:PORT (at $.groups[0].handshake)"),
    ("tcp://127.0.0.1:5570", "§tcp://127.0.0.1:70000", "port 70000 is out of range; the largest is 65535 (at $.groups[0].handshake)"),
    ("tcp://127.0.0.1:5570", "§tcp://127.0.0.1:9090", "127.0.0.1:9090 is already taken by $.listen.metrics (at $.groups[0].handshake)"),
    ("tcp://127.0.0.1:5570", "§ipc:///" + "x" * 107, "the socket path is longer than 107 bytes; use a shorter directory (at $.groups[0].handshake)"),
    ("vocab_size: 100", "vocab_size: 100, eos_token_ids: [99, §100]", "token id 100 is not below vocab_size, 100 (at $.model.eos_token_ids[1])"),
    ("vocab_size: 100", "vocab_size: 100, eos_token_ids: [7, §7]", "token id 7 is listed twice (at $.model.eos_token_ids[1])"),
    ("ranks: 2", "ranks: 2\n    min_ready: §3", "min_ready is 3, but the group has 2 ranks (at $.groups[0].min_ready)"),
    ("ranks: 2", "ranks: 2\n    start_index: §65535", "the last engine index would be 65536; the largest is 65535 (at $.groups[0].start_index)"),
    ("ranks: 2", "ranks: 2\n    sockets: {transport: tcp, §dir: /tmp}", "'dir' has no effect with transport tcp; leave it out (at $.groups[0].sockets.dir)"),
    ("ranks: 2", "ranks: 2\n    sockets: {§host: 10.0.0.1}", "'host' has no effect with transport ipc; leave it out (at $.groups[0].sockets.host)"),
    ("ranks: 2", "ranks: 2\n    sockets: {transport: tcp, host: §0.0.0.0}", "0.0.0.0 is announced to the ranks, which can't dial it; name an address of this host (at $.groups[0].sockets.host)"),
    ("ranks: 2", "ranks: 2\n    sockets: {transport: tcp, host: §'[::]'}", "[::] is announced to the ranks, which can't dial it; name an address of this host (at $.groups[0].sockets.host)"),
    ("ranks: 2", "ranks: 2\n    coupled: true\n    coordinator: {enabled: §false}", "coupled vLLM ranks sleep and wake together; without a coordinator nobody wakes them (at $.groups[0].coordinator.enabled)"),
    ("ranks: 2", "ranks: 2\n    coordinator: {§meeting_host: 10.0.0.1}", "ranks that are not coupled don't meet; leave it out (at $.groups[0].coordinator.meeting_host)"),
    ("ranks: 2", "ranks: 2\n    coupled: true\n    coordinator: {meeting_host: §node-0}", "'node-0' is not an IP address; the ranks are told it as it stands (at $.groups[0].coordinator.meeting_host)"),
    ("ranks: 2", "ranks: 2\n    coupled: true\n    coordinator: {meeting_host: §'::'}", ":: can't be dialled; name an address of the first rank's host (at $.groups[0].coordinator.meeting_host)"),
    ("protocol: vllm", "protocol: tokenspeed\n    §coordinator: {enabled: false}", "tokenspeed ranks have no coordinator; leave it out (at $.groups[0].coordinator)"),
    ("ranks: 2", "ranks: 2\n    sockets: {transport: tcp, host: §eth0}", "'eth0' is not an IP address; the ranks are told it as it stands (at $.groups[0].sockets.host)"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BODY)
def test_body(old, new, message):
    assert BASE.count(old) == 1
    assert refused(BASE.replace(old, new)) == message


@pytest.mark.parametrize(
    ("protocol", "more", "message"),
    [
        ("vllm", "", None),
        ("tokenspeed", "", "a TokenSpeed rank speaks to one process, so 2 ranks take at most 2 processes"),
        (
            "vllm",
            "\n    coupled: true",
            "the ranks of a coupled group step together, and one process has to see all of it: use 1",
        ),
    ],
)
def test_processes(protocol, more, message):
    body = BASE.replace("protocol: vllm", f"protocol: {protocol}").replace("ranks: 2", f"ranks: 2{more}")
    text = body + "listen: {transport: fast}\nprocesses: §3\n"
    if message is None:
        assert parse_config(text.replace("§", ""), "f.yaml").processes == 3
    else:
        assert refused(text) == f"{message} (at $.processes)"


LONG = "/" + "x" * 90
TOO_LONG = (
    "paths of the ranks' sockets would have {} bytes, and the system takes 107; use a shorter directory (at $.{})"
)


@pytest.mark.parametrize(
    ("text", "length", "place"),
    [
        (BASE + f"state_dir: §{LONG}\n", 91 + len("/sockets/rg-0-1-0123456789ab"), "state_dir"),
        (
            BASE.replace("ranks: 2", "ranks: 11") + f"state_dir: §é{LONG}\n",
            94 + len("/sockets/rg-0-10-0123456789ab") - 1,
            "state_dir",
        ),
        (
            BASE + f"processes: 2\nstate_dir: §{LONG}\n",
            91 + len("/2-processes/1/sockets/rg-0-1-0123456789ab"),
            "state_dir",
        ),
        (
            BASE + f"    sockets: {{dir: §{LONG}}}\nstate_dir: /run/a\n",
            91 + len("/rg-0-1-0123456789ab"),
            "groups[0].sockets.dir",
        ),
    ],
)
def test_socket_paths_that_the_system_cannot_bind(text, length, place):
    assert refused(text) == TOO_LONG.format(length, place)


@pytest.mark.parametrize(
    "section",
    [
        f"    sockets: {{transport: tcp}}\nstate_dir: {LONG}\n",
        f"    sockets: {{dir: /run/a}}\nstate_dir: {LONG}\n",
        "state_dir: /run/a\n",
    ],
)
def test_a_directory_without_sockets_may_be_long(section):
    parse_config(BASE + section, "f.yaml")


def test_a_part_does_not_say_whether_there_are_sockets():
    parse_fragment(f"state_dir: {LONG}\n", "f.yaml")


@pytest.mark.parametrize(("processes", "below"), [(1, ""), (3, "/3-processes/2")])
def test_the_longest_socket_path_is_the_engine_link_s(processes, below):
    fits = 107 - len(f"{below}/sockets/rg-0-1-0123456789ab")
    with tempfile.TemporaryDirectory() as root:
        for length, is_bound in ((fits, True), (fits + 1, False)):
            state_dir = f"{root}/".ljust(length, "x")
            config = structs.replace(parse_config(BASE, "f"), processes=processes, state_dir=state_dir)
            own = state_dir if processes == 1 else plan.state_dir(config, Path(root), processes - 1)
            assert own == state_dir + below
            assert (not list(check(config))) == is_bound
            assert _can_prepare(config, Path(own)) == is_bound


def _can_prepare(config, state_dir):
    state_dir.mkdir(parents=True, mode=0o700)
    try:
        Endpoints(config, state_dir).prepare(config, [0])
    except LinkError:
        return False
    return True


def test_one_ipc_path_for_two_groups():
    text = BASE.replace("tcp://127.0.0.1:5570", "ipc:///run/a") + SECOND.replace(
        "tcp://127.0.0.1:5571", "§ipc:///run/x/../a"
    )
    assert refused(text) == "/run/x/../a is already taken by $.groups[0].handshake (at $.groups[1].handshake)"


GROUPS = [
    ("name: b", "name: §a", "groups[0] is already called 'a' (at $.groups[1].name)"),
    ("vllm", "§tokenspeed", "group 'b' speaks tokenspeed, group 'a' vllm: the groups of one gateway share a protocol, because requests are checked and answered by one engine family's rules (at $.groups[1].protocol)"),
    ("ranks: 2", "ranks: §1023", "1025 ranks up to here; a gateway takes at most 1024 (at $.groups[1].ranks)"),
    ("tcp://127.0.0.1:5571", "§tcp://127.0.0.1:5570", "127.0.0.1:5570 is already taken by $.groups[0].handshake (at $.groups[1].handshake)"),
    ("tcp://127.0.0.1:5571", "§tcp://localhost:5570", "localhost:5570 is already taken by $.groups[0].handshake (at $.groups[1].handshake)"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), GROUPS)
def test_groups(old, new, message):
    assert SECOND.count(old) == 1
    assert refused(BASE + SECOND.replace(old, new)) == message


ACCEPTED = [
    BASE + SECOND,
    BASE.replace("ranks: 2", "ranks: 1022") + SECOND,
    BASE + "listen: {allow_wildcard: true, grpc: 0.0.0.0:50051, admin: '[::]:50052', metrics: '0.0.0.0:9090'}\n",
    BASE + "listen: {grpc: 127.0.0.1:0, admin: 127.0.0.1:0, metrics: 127.0.0.1:0}\n",
    BASE.replace("127.0.0.1:5570", "*:5570") + "listen: {allow_wildcard: true}\n",
    BASE.replace("tcp://127.0.0.1:5570", "ipc:///run/rankgate/handshake"),
    BASE.replace("ranks: 2", "ranks: 2\n    start_index: 65534\n    min_ready: 2"),
    BASE.replace("ranks: 2", "ranks: 2\n    sockets: {transport: tcp, host: '[fd00::1]'}"),
    BASE.replace("ranks: 2", "ranks: 2\n    sockets: {transport: tcp, host: fd00::1}"),
    BASE.replace("127.0.0.1:5570", "127.0.0.1:0"),
    BASE + "listen: {stream_interval_tokens: 8, max_flush_delay_ms: 20}\n",
    BASE + "policy: {cost: in_flight * 2, picker: p2c, seed: -5}\n",
    BASE + "policy: {preset: smg, tie_break: first, tie_tolerance: {absolute: 1}}\n",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted(text):
    parse_config(text, "f.yaml")


def test_every_problem_is_found_not_only_the_first():
    good = parse_config(BASE, "f")
    tcp = Sockets(transport="tcp", dir="/x", host="eth0")
    group = structs.replace(good.groups[0], handshake="tcp://nowhere", min_ready=9, start_index=65535, sockets=tcp)
    bad = structs.replace(
        good,
        listen=Listen(grpc="nowhere", admin="0.0.0.0:1", metrics="0.0.0.0:1"),
        groups=(group, structs.replace(group, handshake="ipc://x"), structs.replace(group, handshake="ipc://x")),
        policy=Policy(),
    )
    assert [format_loc(problem.loc) for problem in check(bad)] == [
        "$.listen.grpc",
        "$.listen.admin",
        "$.listen.metrics",
        "$.listen.metrics",
        "$.groups[0].handshake",
        "$.groups[2].handshake",
        "$.groups[1].name",
        "$.groups[2].name",
        *(f"$.groups[{number}].{key}" for number in range(3) for key in ("min_ready", "start_index", "sockets.dir", "sockets.host")),
        "$.policy",
    ]  # fmt: skip


COSTS = [
    ("policy: {cost: in_flight + §wating}\n", "unknown variable"),
    ("policy: {cost: 'in_flight + §wating'}\n", "unknown variable"),
    ('policy: {cost: "in_flight\\t + §wating"}\n', "unknown variable"),
    ("policy:\n  cost: |\n    in_flight\n      + §wating\n", "unknown variable"),
    ("policy:\n  cost: >-\n    in_flight\n    + §wating\n", "unknown variable"),
    ("policy:\n  cost: in_flight\n    + §wating\n", "unknown variable"),
    ("policy:\n  cost: &c in_flight + §wating # sum\n", "unknown variable"),
    ("policy: {cost: in_flight + in_flight§.real}\n", "unexpected character '.'"),
    ("policy: {cost: 'in_flight §; 1'}\n", "unexpected character ';'"),
    ("policy: {cost: 'in_flight + §)'}\n", "syntax error"),
]


@pytest.mark.parametrize(("section", "start"), COSTS)
def test_cost_errors_point_into_the_formula(section, start):
    message = refused(BASE + section)
    assert message.startswith(start)
    assert message.endswith("(at $.policy.cost)")
    if "wating" in section:
        assert "did you mean 'waiting'?" in message


@pytest.mark.parametrize(
    "keys",
    [
        "coordinator: {enabled: false}",
        "coupled: true",
        "coupled: true\n    coordinator: {meeting_host: 10.0.0.1}",
        "coupled: true\n    coordinator: {meeting_host: '[fd00::1]'}",
    ],
)
def test_coordinators_that_are_fine(keys):
    parse_config(BASE.replace("ranks: 2", f"ranks: 2\n    {keys}"), "f.yaml")

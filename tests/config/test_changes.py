"""Which keys a running gateway can change, and what is said of the others."""

import msgspec
import pytest
from msgspec import inspect

from gateway.config.changes import LIVE, changed_keys, is_live, refusals
from gateway.config.convert import unwrap
from gateway.config.schema import Config
from gateway.core.reconfigure import with_leaving_ranks


def config(*sizes, **sections):
    """Groups g0, g1 … of these sizes; sizes may be (name, size)."""
    names = [(f"g{number}", size) if isinstance(size, int) else size for number, size in enumerate(sizes or (2,))]
    values = {
        "version": 1,
        "model": {"name": "m", "max_context_tokens": 4096, "vocab_size": 32000},
        "groups": [
            {"name": name, "protocol": "vllm", "handshake": f"tcp://127.0.0.1:{5000 + ord(name[-1])}", "ranks": size}
            for name, size in names
        ],
    }
    return msgspec.convert(values | sections, Config)


def leaves(kind=None, prefix=""):
    """Every key of the schema as `docs/configuration.md` writes it; mappings that may be absent are keys as well."""
    for field in (kind or inspect.type_info(Config)).fields:
        bare, _, is_optional = unwrap(field.type)
        path = f"{prefix}{field.name}"
        if isinstance(bare, inspect.VarTupleType) and isinstance(unwrap(bare.item_type)[0], inspect.StructType):
            yield from leaves(unwrap(bare.item_type)[0], f"{path}[].")
        elif isinstance(bare, inspect.StructType):
            if is_optional:
                yield path
            yield from leaves(bare, f"{path}.")
        else:
            yield path


def said(old, new, before=None):
    """`before` is what was in force before `old`, if its ranks are still leaving."""
    return refusals(new, old, with_leaving_ranks(old, before or old))


ALL = sorted(leaves())


def test_every_live_key_is_one():
    assert {key for key in LIVE if not any(leaf == key or leaf.startswith(f"{key}.") for leaf in ALL)} == set()


def test_what_needs_a_restart():
    """A new setting is here until someone has made it live; whoever moves one out of here has to test that it is."""
    restart = [leaf for leaf in ALL if not is_live(leaf)]
    assert [leaf for leaf in restart if not leaf.startswith("listen.")] == [
        *("groups[].coordinator.enabled", "groups[].coordinator.meeting_host"),
        *("groups[].handshake", "groups[].load_semantics", "groups[].name", "groups[].protocol"),
        *("groups[].sockets.dir", "groups[].sockets.host", "groups[].sockets.transport", "groups[].start_index"),
        *("limits.handshake_timeout_s", "limits.idle_connection_timeout_s"),
        *("limits.max_connections", "limits.max_metadata_bytes", "limits.max_request_bytes"),
        *("limits.max_streams_per_connection",),
        *("model.eos_token_ids", "model.max_context_tokens", "model.name", "model.tokenizer_path", "model.vocab_size"),
        *("observability.decision_ring", "observability.log_format"),
        *("ordering", "preserve.domain", "preserve.max_held_bytes", "preserve.max_places", "processes"),
        *("response_cache", "response_cache.coalesce", "response_cache.max_bytes", "response_cache.max_entry_bytes"),
        *("response_cache.ttl_s", "scheduling.mode", "scheduling.queue.hold_until_queued", "state_dir", "version"),
    ]
    live = {"listen.stream_interval_tokens", "listen.max_flush_delay_ms"}
    assert {leaf for leaf in ALL if leaf.startswith("listen.")} - set(restart) == live


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"listen": {"grpc": "127.0.0.1:1"}}, "listen.grpc: needs a restart"),
        ({"listen": {"keepalive": {"time_s": 5.0}}}, "listen.keepalive.time_s: needs a restart"),
        ({"listen": {"tls": {"cert_file": "a", "key_file": "b"}}}, "listen.tls: needs a restart"),
        ({"state_dir": "/tmp/x"}, "state_dir: needs a restart"),
        ({"scheduling": {"mode": "queue"}}, "scheduling.mode: needs a restart"),
        ({"ordering": "preserve"}, "ordering: needs a restart"),
        ({"response_cache": {}}, "response_cache: needs a restart"),
        (
            {"model": {"name": "x", "max_context_tokens": 4096, "vocab_size": 32000}},
            "model.name: needs a restart",
        ),
    ],
)
def test_one_key_that_needs_a_restart_refuses_the_whole_file(change, problem):
    live = {"policy": {"preset": "p2c"}, "gateways": 3}
    assert said(config(2), config(2, **live)) == []
    assert said(config(2), config(5, **live, **change)) == [problem]


def test_all_reasons_are_named_at_once():
    wanted = config(("x0", 2), state_dir="a", ordering="preserve")
    assert said(config(2), wanted) == [
        "state_dir: needs a restart",
        "ordering: needs a restart",
        "groups[0]: group g0 has this place, and without a restart groups come and go after all others; put x0 at the end",
    ]


def test_keys_of_a_group():
    old = config(2)
    (group,) = old.groups
    budget = msgspec.structs.replace(group.budget, max_requests=3)
    live = msgspec.structs.replace(group, min_ready=2, budget=budget)
    assert said(old, msgspec.structs.replace(old, groups=(live,))) == []
    coupled = msgspec.structs.replace(group, coupled=True)
    (problem,) = said(old, msgspec.structs.replace(old, groups=(coupled,)))
    assert problem.startswith("groups[0].coupled: needs a restart")
    grown = msgspec.structs.replace(coupled, ranks=coupled.ranks + 1)
    both = (msgspec.structs.replace(old, groups=(each,)) for each in (coupled, grown))
    (problem,) = said(*both)
    assert problem.startswith("groups[0].ranks: needs a restart")
    before, after = (msgspec.structs.replace(each, protocol="tokenspeed") for each in (group, coupled))
    assert said(*(msgspec.structs.replace(old, groups=(each,)) for each in (before, after))) == []
    moved = msgspec.structs.replace(group, handshake="tcp://127.0.0.1:1", start_index=4)
    assert said(old, msgspec.structs.replace(old, groups=(moved,))) == [
        "groups[0].handshake: needs a restart",
        "groups[0].start_index: needs a restart",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [((2,), (5,)), ((5,), (2,)), ((2,), (2, 3)), ((2, 3), (2,)), ((2, 3), (1,)), ((2, 3), (2, 4)), ((2,), (4, 3, 1))],
)
def test_the_end_of_the_list_may_change(old, new):
    assert said(config(*old), config(*new)) == []


@pytest.mark.parametrize(
    ("old", "new", "path", "text"),
    [
        ((2, 3), (3, 3), "groups[0].ranks", "ranks of g1 would get other numbers"),
        ((2, 3), (1, 3), "groups[0].ranks", "ranks of g1 would get other numbers"),
        ((2, 3), (3,), "groups[0].ranks", "change g0 and g1 one after the other"),
        ((2,), (1, 3), "groups[0].ranks", "change g0 and g1 one after the other"),
        ((2, 3), ((("x1"), 3),), "groups[0]", "g0 has this place"),
        ((2, 3), (2, ("x2", 3)), "groups[1]", "put x2 at the end"),
    ],
)
def test_a_change_that_would_renumber_ranks_is_refused(old, new, path, text):
    (problem,) = said(config(*old), config(*new))
    assert problem.startswith(f"{path}: ")
    assert text in problem


@pytest.mark.parametrize(
    ("running", "before", "new", "problem"),
    [
        ((3,), (4,), (3, 2), "groups[0].ranks: removed ranks of g0 still end their work"),
        ((2,), (2, 3), (2, ("x9", 1)), "groups[1]: removed ranks of g1 still end their work"),
        ((2,), (2, 3), (3,), "groups[0].ranks: numbers are free for others only when"),
        ((3,), (4,), (4,), None),
        ((3,), (4,), (6,), None),
        ((3,), (4,), (2,), None),
        ((2,), (2, 3), (2, 3), None),
        ((2,), (2, 3), (2, 2), None),
    ],
)
def test_numbers_of_ranks_that_are_leaving_are_still_theirs(running, before, new, problem):
    found = said(config(*running), config(*new), config(*before))
    assert [line.startswith(problem) for line in found] == [True] if problem else found == []


def test_what_changed_is_named():
    old = config(2, admission={"max_in_flight": 5}, predictor={"prefill_ms": "1"})
    new = config(2, 1, admission={"max_in_flight": 6, "tenants": {"named": {"a": {}}}}, policy={"preset": "p2c"})
    assert changed_keys(old, new) == [
        *("policy.preset", "predictor", "admission.max_in_flight", "admission.tenants.named", "groups[1]"),
    ]
    assert changed_keys(new, new) == []
    assert changed_keys(config(2), config(3)) == ["groups[0].ranks"]

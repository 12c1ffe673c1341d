"""Every setting that the core reads does something: one row each, with what the default does beside it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import Tick
from gateway.core.request import Request
from gateway.types import Sampling
from tests.support.core import Bench, load, wire_id


class Row(NamedTuple):
    """`observe` a bench with `sections` and one without: the two results must be these."""

    name: str
    sections: dict[str, Any]
    observe: Callable[..., Any]
    expected: Any
    by_default: Any
    protocol: str = "vllm"


def group(**more: Any) -> dict[str, Any]:
    return {"groups": [{"name": "g", "handshake": "ipc:///g", "ranks": 1, **more}]}


def outcome(bench: Bench, **request: Any) -> str:
    try:
        bench.request(**request)
    except GatewayError as error:
        return error.message
    return "accepted"


def running_and_waiting(bench: Bench) -> tuple[int, int]:
    bench.batch(0, [(wire_id(bench.request()), [9])], load(10, 6))
    return bench.router.ranks.running[0], bench.router.ranks.waiting[0]


def report_3_s_after_an_abort(bench: Bench) -> int:
    """What is believed of a report without rows."""
    bench.cancel(bench.request(), Reason.CANCELLED)
    bench.now += 3
    bench.batch(0, [], load(4, 0))
    return bench.router.ranks.running[0]


def late_row_3_s_after_its_abort(bench: Bench) -> int:
    """How many aborts follow: the first is the cancellation's own."""
    request: Request = bench.request()
    late = wire_id(request)
    bench.cancel(request, Reason.CANCELLED)
    bench.batch(0, [(late, [9])])
    bench.now += 3
    bench.batch(0, [(late, [9])])
    return len(bench.aborted)


def foreign_load_after_5_s(bench: Bench) -> int:
    bench.batch(0, [], load(4, 0))
    bench.now += 5
    bench.send(Tick())
    return bench.router.ranks.foreign[0]


def records_of_5_decisions(bench: Bench) -> list[int]:
    for _ in range(5):
        bench.finish(bench.request())
    return [decision.id for decision in bench.router.decisions.latest(100)]


def cost_of_being_coupled(bench: Bench) -> float | None:
    return bench.router.rank_views(bench.now)[0].cost


def with_(**sampling: Any) -> Callable[[Bench], str]:
    return lambda bench: outcome(bench, sampling=Sampling(max_tokens=4, **sampling))


COST = {"policy": {"cost": "coupled * 7 + in_flight"}}
ROWS = (
    Row(
        "groups[].load_semantics",
        group(protocol="vllm", load_semantics="resident"),
        running_and_waiting,
        (4, 6),
        (10, 6),
    ),
    Row(
        "groups[].load_semantics of a resident family",
        group(protocol="tokenspeed", load_semantics="disjoint"),
        running_and_waiting,
        (10, 6),
        (4, 6),
        protocol="tokenspeed",
    ),
    Row("load.abort_settle_s", {"load": {"abort_settle_s": 4.0}}, report_3_s_after_an_abort, 0, 4),
    Row("load.abort_settle_s of late rows", {"load": {"abort_settle_s": 4.0}}, late_row_3_s_after_its_abort, 1, 2),
    Row("load.foreign_ttl_s", {"load": {"foreign_ttl_s": 6.0}}, foreign_load_after_5_s, 4, 0),
    Row("observability.decision_ring", {"observability": {"decision_ring": 2}}, records_of_5_decisions, [5, 4], [5, 4, 3, 2, 1]),
    Row("observability.decision_ring off", {"observability": {"decision_ring": 0}}, records_of_5_decisions, [], [5, 4, 3, 2, 1]),
    Row("limits.max_n", {"limits": {"max_n": 2}}, lambda bench: outcome(bench, n=3), "n: must be in 1..2, got 3", "accepted"),
    Row("limits.max_n raised", {"limits": {"max_n": 65}}, lambda bench: outcome(bench, n=65), "accepted", "n: must be in 1..64, got 65"),
    Row("limits.max_logprobs", {"limits": {"max_logprobs": 3}}, with_(logprobs=4), "logprobs: must be in 0..3, got 4", "accepted"),
    Row("limits.max_logprobs raised", {"limits": {"max_logprobs": 21}}, with_(logprobs=21), "accepted", "logprobs: must be in 0..20, got 21"),
    Row("limits.max_stop_token_ids", {"limits": {"max_stop_token_ids": 1}}, with_(stop_token_ids=(5, 6)), "stop_token_ids: more than 1 ids", "accepted"),
    Row("limits.max_stop_token_ids raised", {"limits": {"max_stop_token_ids": 257}}, with_(stop_token_ids=(5,) * 257), "accepted", "stop_token_ids: more than 256 ids"),
    Row("limits.max_request_id_bytes", {"limits": {"max_request_id_bytes": 3}}, lambda bench: outcome(bench, request_id="éé"), "request_id: longer than 3 bytes", "accepted"),
    Row("limits.max_request_id_bytes raised", {"limits": {"max_request_id_bytes": 257}}, lambda bench: outcome(bench, request_id="x" * 257), "accepted", "request_id: longer than 256 bytes"),
    Row("groups[].coupled", COST | group(protocol="vllm", coupled=True), cost_of_being_coupled, 7.0, None),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_setting_is_obeyed(row):
    assert row.observe(Bench(1, row.protocol, **row.sections)) == row.expected


@pytest.mark.parametrize("row", [row for row in ROWS if row.by_default is not None], ids=lambda row: row.name)
def test_without_it_the_default_is(row):
    assert row.expected != row.by_default
    assert row.observe(Bench(1, row.protocol)) == row.by_default


def test_coupled_only_sets_the_formula_variable_and_one_group_is_enough():
    plain = group(protocol="vllm")["groups"][0]
    several = [plain, plain | {"name": "h", "coupled": True}]
    for groups, expected in (([plain], 0.0), (several, 7.0)):
        bench = Bench(groups=groups, **COST)
        assert [view.cost for view in bench.router.rank_views(bench.now)] == [expected] * len(groups)
    with_it, without = Bench(**group(protocol="vllm", coupled=True)), Bench(**group(protocol="vllm"))
    for bench in (with_it, without):
        bench.finish(bench.request())
    assert [bench.router.decisions.latest(1)[0].costs for bench in (with_it, without)] == [[3.0], [3.0]]

"""The metrics: what they say, that their names and labels obey the rules, and that a scrape is safe."""

import re
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway import __version__
from gateway.core.counters import Counters
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import BatchReceived, DrainStarted, RankLost
from gateway.core.ranks import RankState
from gateway.edges import metrics_catalogue as catalogue
from gateway.edges import metrics_values as values
from gateway.edges.engine_link.counters import LinkCounters
from gateway.edges.logs import LineLogger
from gateway.edges.metrics import TTFT_BOUNDS
from gateway.edges.metrics_families import Histogram, link_counters
from gateway.native import compiled
from gateway.types import EngineBatch
from gateway.wire.common import Fault, Noise
from tests.support.core import load, make_info, wire_id
from tests.support.metrics_world import SinkOf, World, busy_world

ROOT = Path(__file__).parents[2]
NATIVE = "no" if compiled is None else "yes"
RANK_LINK = "gateway/edges/engine_link/rank_link.py"


def test_every_family_of_the_catalogue_is_exported_and_no_other():
    families = {family.name for family in busy_world().metrics.collect()}
    specs = {spec.full_name.removesuffix("_total") for spec in catalogue.CATALOGUE}
    assert families == specs


def test_types_helps_and_labels_are_the_catalogue_s():
    specs = {spec.full_name.removesuffix("_total"): spec for spec in catalogue.CATALOGUE}
    for family in busy_world().metrics.collect():
        spec = specs[family.name]
        assert (family.type, family.documentation) == (spec.kind, spec.help)
        assert family.samples, f"{family.name} has nothing to say in a busy world"
        for sample in family.samples:
            extra = {"le"} if sample.name.endswith("_bucket") else set()
            assert set(sample.labels) == set(spec.labels) | extra


def test_every_counter_of_the_core_has_a_metric():
    # `ended` is what `requests_total` says, which has the call and its status code besides; the sizes are a histogram.
    assert set(catalogue.CORE_COUNTERS) == set(Counters.__slots__) - {"ended", "batch_sizes"}


LINK_VALUES = vars(LinkCounters())


def test_every_counter_of_the_link_is_explained():
    assert list(values.LINK_EVENT_VALUES) == [name for name, value in LINK_VALUES.items() if value == 0]
    assert list(values.LINK_FAULT_VALUES) == [name for name, value in LINK_VALUES.items() if value == {}]
    assert {*values.LINK_EVENT_VALUES, *values.LINK_FAULT_VALUES} == set(LINK_VALUES)


def named_by_the_link():
    """The reasons that the link's code has in its text, by the counter they are for."""
    text = "".join(path.read_text() for path in (ROOT / "gateway/edges/engine_link").glob("*.py"))
    named = {
        "handshakes": set(re.findall(r'_reject\("(\w+)"', text)),
        "state_faults": set(re.findall(r'_fault\("(\w+)"', text)),
        "send_failed": set(re.findall(r'_fail\([\w.]+, "(\w+)"', text)),
        "lost": set(re.findall(r'^[A-Z]+ = "(\w+)"$', (ROOT / RANK_LINK).read_text(), re.MULTILINE)),
        "noise": {*Noise},
        "faults": {*Fault},
        "load_faults": {*Fault},
    }
    for name, call in re.findall(r"counters\.(\w+)\.add\((.*)\)\n", text):
        named[name] |= set(re.findall(r'"(\w+)"', call))
    return named


@pytest.mark.parametrize("name", values.LINK_FAULT_VALUES)
def test_every_reason_that_the_link_names_is_declared(name):
    """Otherwise it would be counted as "other" and missing in the docs."""
    assert set(LINK_VALUES[name].reasons) == named_by_the_link()[name]


def test_the_page_lists_every_value_of_the_link_s_labels():
    page = (ROOT / "docs/metrics.md").read_text()
    for name, value in LINK_VALUES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{reason}`" in row for reason in getattr(value, "reasons", ()))


# --- values ----------------------------------------------------------------------------------------


def test_a_request_counts_once_with_its_code_and_times():
    world = World(2)
    request = world.request(prompt=[1] * 7, sink=SinkOf("test.Service/Generate"))
    world.now += 0.25
    world.batch(request.last_rank, [(wire_id(request), [1])])
    world.now += 1.0
    world.finish_all(request)
    got = world.samples()
    rpc = ("rpc", "test.Service/Generate")
    assert got["rankgate_requests_total", ("code", "OK"), rpc] == 1
    assert got["rankgate_request_duration_seconds_sum", ("outcome", "ok"), rpc] == 1.25
    assert got["rankgate_request_duration_seconds_count", ("outcome", "ok"), rpc] == 1
    assert got["rankgate_time_to_first_token_seconds_sum",] == 0.25
    assert got["rankgate_time_to_first_token_seconds_bucket", ("le", "0.25")] == 1
    assert got["rankgate_time_to_first_token_seconds_bucket", ("le", "0.1")] == 0
    assert got["rankgate_time_to_first_token_seconds_bucket", ("le", "+Inf")] == 1
    rank = ("rank", str(request.last_rank))
    assert got["rankgate_rank_time_to_first_token_seconds_count", rank] == 1
    assert got["rankgate_rank_time_to_first_token_seconds_sum", rank] == 0.25
    assert got["rankgate_prompt_tokens_total",] == 7
    assert got["rankgate_generated_tokens_total", rank] == 2


@pytest.mark.parametrize(
    ("reason", "code", "outcome"),
    [
        (Reason.CANCELLED, "CANCELLED", "cancelled"),
        (Reason.ABORTED, "ABORTED", "cancelled"),
        (Reason.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "error"),
    ],
)
def test_ends_without_success(reason, code, outcome):
    world = World(2)
    request = world.request()
    world.cancel(request, reason)
    world.metrics.observe_ended(request, world.now)
    got = world.samples()
    assert got["rankgate_requests_total", ("code", code), ("rpc", "unknown")] == 1
    assert got["rankgate_request_duration_seconds_count", ("outcome", outcome), ("rpc", "unknown")] == 1
    assert got["rankgate_time_to_first_token_seconds_count",] == 0


def test_reasons_with_one_code_are_one_series():
    world = World(2)
    for reason in (Reason.RANK_LOST, Reason.SEND_FAILED, Reason.RANK_LOST):
        request = world.request()
        world.cancel(request, Reason.CANCELLED)
        request.error = GatewayError(reason, "x")
        world.metrics.observe_ended(request, world.now)
    got = world.samples()
    assert got["rankgate_requests_total", ("code", "UNAVAILABLE"), ("rpc", "unknown")] == 3
    assert got["rankgate_request_duration_seconds_count", ("outcome", "error"), ("rpc", "unknown")] == 3


def test_rejections_are_counted_by_reason():
    world = World(2)
    world.send(world.arrived(prompt=()))
    world.send(world.arrived(pinned_rank=9))
    got = world.samples()
    assert got["rankgate_rejections_total", ("reason", "INVALID_REQUEST")] == 1
    assert got["rankgate_rejections_total", ("reason", "INVALID_RANK")] == 1


def test_the_inter_token_time_is_weighted_by_the_sequences_that_waited():
    world = World(1)
    first, second, third = world.request(), world.request(), world.request()

    def step(after_s, *rows):
        world.now += after_s
        ids, finishes = [wire_id(request) for request, _ in rows], [finish for _, finish in rows]
        batch = EngineBatch(ids=ids, token_ids=[[1]] * len(rows), finish=finishes)
        event = BatchReceived(0, 1, batch)
        world.metrics.observe_batch(event, world.now)
        world.send(event)

    step(5.0, (first, ""), (second, ""))  # first tokens: nobody decoded before
    step(0.02, (first, ""), (second, ""), (third, ""))  # two waited, the third is new
    step(0.03, (first, "stop"), (second, "stop"), (third, "stop"))  # three waited
    late = world.request()
    step(60.0, (late, ""))  # the rank was idle: no wait
    world.cancel(late, Reason.CANCELLED)
    after = world.request()
    step(60.0, (after, ""))  # what was cancelled does not wait
    got = world.samples()
    assert got["rankgate_inter_token_latency_seconds_count",] == 5
    assert got["rankgate_inter_token_latency_seconds_sum",] == pytest.approx(2 * 0.02 + 3 * 0.03)
    assert got["rankgate_inter_token_latency_seconds_bucket", ("le", "0.025")] == 2


def test_joined_messages_share_the_time_since_the_last_batch():
    world = World(1)
    first, second = world.request(), world.request()
    ids = [wire_id(first), wire_id(second)]
    world.batch(0, [(each, [1]) for each in ids])
    world.metrics.observe_batch(BatchReceived(0, 1, EngineBatch(ids=ids, token_ids=[], finish=[])), world.now)
    before = world.samples()
    joined = EngineBatch(ids=ids * 3, token_ids=[[1]] * 6, finish=[""] * 6, messages=3)
    world.metrics.observe_batch(BatchReceived(0, 1, joined), world.now + 0.06)
    after = world.samples()
    count, total = (("rankgate_inter_token_latency_seconds_" + name,) for name in ("count", "sum"))
    assert after[count] - before[count] == 6
    assert after[total] - before[total] == pytest.approx(6 * 0.02)


def test_load_reports_without_rows_do_not_count_as_a_step():
    world = World(1)
    request = world.request()
    world.batch(0, [(wire_id(request), [1])])
    empty = EngineBatch(ids=[], token_ids=[], finish=[], load=load(1, 0))
    world.metrics.observe_batch(BatchReceived(0, 1, empty), world.now)
    assert world.samples()["rankgate_inter_token_latency_seconds_count",] == 0


def test_ranks_have_their_load_state_and_cost():
    world = World(2)
    request = world.request(prompt=[1] * 10, pinned_rank=1)
    world.batch(1, [(wire_id(request), [1])], load(5, 2, 0.25))
    world.now += 1.5
    world.request(prompt=[1] * 10)
    got = world.samples()
    one = ("rank", "1")
    assert got["rankgate_rank_requests_in_flight", one] == 1
    assert got["rankgate_rank_requests_running", one] == 5
    assert got["rankgate_rank_requests_waiting", one] == 2
    assert got["rankgate_rank_kv_cache_usage_ratio", one] == 0.25
    assert got["rankgate_rank_snapshot_age_seconds", one] == 1.5
    assert got["rankgate_rank_kv_capacity_tokens", one] == 400_000
    assert got["rankgate_decisions_total", one] == 1
    assert got["rankgate_snapshots_total", one] == 1
    assert got["rankgate_rank_cost", ("rank", "0")] < got["rankgate_rank_cost", one]
    for state in RankState:
        assert got["rankgate_rank_state", one, ("state", state.value)] == (state is RankState.READY)
    assert got["rankgate_live_requests",] == 2
    assert got["rankgate_draining",] == 0
    assert got["rankgate_build_info", ("native", NATIVE), ("version", __version__)] == 1


def test_what_was_never_reported_has_no_series():
    got = World(2).samples()
    for name in ("running", "waiting"):
        assert ("rankgate_rank_requests_" + name, ("rank", "0")) not in got
        assert ("rankgate_rank_reported_requests_" + name, ("rank", "0")) not in got
    assert ("rankgate_rank_kv_cache_usage_ratio", ("rank", "0")) not in got
    assert ("rankgate_rank_snapshot_age_seconds", ("rank", "0")) not in got
    assert ("rankgate_rank_cost", ("rank", "0")) not in got
    assert got["rankgate_rank_requests_in_flight", ("rank", "0")] == 0


def test_a_lost_rank_s_load_and_an_old_incarnation_leave_no_series():
    world = World(2)
    world.batch(0, load=load(5, 2, 0.5))
    key = ("rankgate_rank_kv_cache_usage_ratio", ("rank", "0"))
    assert key in world.samples()
    world.send(RankLost(0, 1, "test"))
    got = world.samples()
    assert key not in got
    assert got["rankgate_rank_state", ("rank", "0"), ("state", "LOST")] == 1
    world.join(0, info=make_info(engine_version="2"))
    infos = [dict(labels) for name, *labels in world.samples() if name == "rankgate_rank_info"]
    assert [info["incarnation"] for info in infos if info["rank"] == "0"] == ["2"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_there_are_series_for_the_configured_ranks_only(ranks):
    labels = {dict(labels)["rank"] for _, *labels in World(ranks).samples() if "rank" in dict(labels)}
    assert labels == {str(rank) for rank in range(ranks)}


def test_the_link_s_counters_are_exported_by_name():
    world = World(1)
    got = world.samples()
    assert got["rankgate_link_events_total", ("event", "frames")] == 3
    assert got["rankgate_link_faults_total", ("event", "handshakes"), ("reason", "garbage")] == 1
    world.link.frames += 1
    assert world.samples()["rankgate_link_events_total", ("event", "frames")] == 4


def test_log_lines_that_could_not_be_written_are_counted(monkeypatch):
    monkeypatch.setattr(LineLogger, "lost", 7)
    assert World(1).samples()["rankgate_log_lines_lost_total",] == 7


def test_what_the_policy_had_to_give_up_is_exported():
    world = World(
        1,
        filters={"kv_fit": "soft"},
        info=make_info(kv_capacity_tokens=100),
        policy={"cost": "1 / (in_flight - in_flight)"},
    )
    world.request([1] * 60)
    world.request([1] * 60)
    got = world.samples()
    assert got["rankgate_relaxed_filters_total", ("filter", "kv_fit")] == 1
    assert got["rankgate_relaxed_filters_total", ("filter", "kv_usage")] == 0
    assert got["rankgate_decisions_without_cost_total",] == 2


def test_draining_shows():
    world = World(1)
    world.send(DrainStarted())
    assert world.samples()["rankgate_draining",] == 1


def test_no_decision_ring_no_cost():
    world = World(1, observability={"decision_ring": 0})
    world.request()
    assert ("rankgate_rank_cost", ("rank", "0")) not in world.samples()


def test_histogram_bounds_are_inclusive_and_ordered():
    assert list(TTFT_BOUNDS) == sorted(set(TTFT_BOUNDS))
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 14.0


# --- serving ---------------------------------------------------------------------------------------


def fetch(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_it_is_served_on_its_own_port_and_stops():
    world = busy_world()
    port = world.metrics.start("127.0.0.1", 0)
    try:
        text = fetch(port)
        assert f'rankgate_build_info{{native="{NATIVE}",version="{__version__}"}} 1.0' in text
        assert "process_cpu_seconds_total" in text
    finally:
        world.metrics.stop()
    world.metrics.stop()
    with pytest.raises(OSError):
        fetch(port)


def test_an_ipv6_address_may_be_in_brackets():
    world = World(1)
    try:
        assert world.metrics.start("[::1]", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    finally:
        world.metrics.stop()


def test_a_taken_port_is_an_error_that_names_it():
    one, two = World(1), World(1)
    port = one.metrics.start("127.0.0.1", 0)
    try:
        with pytest.raises(
            OSError, match=rf"listen.metrics: cannot listen on 127.0.0.1:{port}: Address already in use"
        ):
            two.metrics.start("127.0.0.1", port)
    finally:
        one.metrics.stop()
    two.metrics.stop()


class Garbage:
    """A cycle whose collection runs Python code, and so lets other threads in."""

    def __init__(self):
        self.me = self

    def __del__(self):
        for _ in range(20):
            pass


@contextmanager
def running(work):
    """`work` over and over in another thread, which takes over at every chance."""
    stop, failures = threading.Event(), []

    def loop():
        try:
            while not stop.is_set():
                work()
        except Exception as error:  # noqa: BLE001 - the test reports whatever it is
            failures.append(repr(error))

    thread = threading.Thread(target=loop)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield failures
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_scrapes_in_a_thread_survive_a_core_at_work():
    world = World(4)
    with running(lambda: list(world.metrics.collect())) as failures:
        for number in range(200):
            request = world.request(sink=SinkOf(f"rpc{number}"))
            world.router.counters.ended[f"reason{number}"] = 0
            world.scheduled.counters.batch_sizes[number] = 1
            world.finish_all(request, load=load(1, 1, 0.5))
    assert not failures


def test_counters_may_get_new_keys_while_they_are_copied():
    world = World(1)
    counts = world.link.handshakes

    def grow():
        for number in range(3000):
            counts[f"h{number}"] = 1
        counts.clear()

    with running(grow) as failures:
        for _ in range(400):
            garbage = [Garbage() for _ in range(30)]
            del garbage
            for _ in link_counters(world.link):
                pass
    assert not failures


def test_a_scrape_pauses_after_every_family(monkeypatch):
    world, pauses = World(1), []
    monkeypatch.setattr("gateway.edges.metrics.time.sleep", pauses.append)
    families = list(world.metrics.collect())
    assert len(pauses) == len(families)
    assert 0 < max(pauses) < 0.001

"""What a running gateway tells its operators: one terminal line per accepted request, and a page that Prometheus takes."""

import asyncio
import itertools
import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.edges import metrics_catalogue as catalogue
from gateway.v1 import gateway_pb2
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.support.calls import Generation, generate, make_prompt, make_request
from tests.support.deployment import MAX_CONTEXT_TOKENS
from tests.support.processes import WAIT_S, wait_until

pytestmark = pytest.mark.e2e

ENDLESS = MAX_CONTEXT_TOKENS - 100
RANKS = ["0", "1", "2"]


async def every_outcome(client):
    """Requests that end in different ways, by name; and what each is expected to be logged as (None: not accepted)."""
    prompt = make_prompt(60, 3)
    expected = {}

    def request(name, outcome, max_tokens=5, **fields):
        expected[name] = outcome
        return make_request(prompt, max_tokens, request_id=name, **fields)

    served = [request(f"ok-{rank}", "ok", data_parallel_rank=rank) for rank in range(3)]
    served.append(request("ok-many", "ok", sampling={"n": 3}))
    for outcome in await asyncio.gather(*(generate(client, each) for each in served)):
        assert outcome.status is None
    await generate(client, request("too-late", "DEADLINE_EXCEEDED", ENDLESS), timeout=0.3)
    for refused in (
        request("bad-rank", None, data_parallel_rank=3),
        request("bad-value", None, sampling={"temperature": -1.0}),
        request("bad-prompt", None, ENDLESS + 1000),
    ):
        assert (await generate(client, refused)).status is not None
    left, aborted = [
        Generation(client, request(name, outcome, ENDLESS))
        for name, outcome in (("left", "CANCELLED"), ("aborted", "ABORTED"))
    ]
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(left.first_token(), aborted.first_token())
    twin = request("left", "CANCELLED")
    assert (await generate(client, twin)).reason == "DUPLICATE_REQUEST_ID"
    left.call.cancel()
    await client.Abort(gateway_pb2.AbortRequest(request_id="aborted"))
    for generation in (left, aborted):
        await generation.done()
    return prompt, expected


def numbers_in_lists(value, *, is_in_list=False):
    """Every number below a list of a log line, however deep."""
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers_in_lists(each, is_in_list=is_in_list)
    elif isinstance(value, list):
        for each in value:
            yield from numbers_in_lists(each, is_in_list=True)
    elif is_in_list and isinstance(value, int | float):
        yield value


async def test_each_accepted_request_has_one_terminal_line(site, connect):
    prompt, expected = await every_outcome(GatewayServiceStub(connect(site)))
    await asyncio.to_thread(wait_until, lambda: site.metric("rankgate_live_requests") == 0, "everything to end")
    accepted = site.metric("rankgate_requests_accepted_total")
    ended = await asyncio.to_thread(site.gateway.ends, int(accepted))
    outcomes = {event["request_id"]: event["outcome"] for event in ended}
    for name, outcome in expected.items():
        assert outcomes.get(name) == outcome
        assert sum(event["request_id"] == name for event in ended) == (outcome is not None)
    # Over everything that this gateway has ever accepted, whichever test it was for.
    assert accepted == site.metric("rankgate_requests_total")
    (many,) = [event for event in ended if event["request_id"] == "ok-many"]
    assert (many["n"], many["completion_tokens"], many["prompt_tokens"]) == (3, 15, 60)
    assert many["ttft_ms"] <= many["e2e_ms"]
    for line in site.gateway.events():
        assert {"timestamp", "level", "event"} <= line.keys()
        assert line["level"] in ("debug", "info", "warning")
        # The only numbers that come in lists are those of ranks.
        assert all(number in range(3) for number in numbers_in_lists(line)), line
    # Neither the prompt nor what was made of it, in whatever form, not even at level debug.
    telling = [pair for pair in itertools.pairwise(prompt) if min(pair) > 999]
    assert telling
    pairs = "|".join(rf"\b{first}\D{{1,3}}{second}\b" for first, second in telling)
    assert re.search(pairs, site.gateway.log) is None


async def test_the_page_has_every_series_of_every_rank(site, connect):
    client = GatewayServiceStub(connect(site))
    for rank in range(3):
        assert (await generate(client, make_request(data_parallel_rank=rank))).status is None
    # The newest decision is what `rank_cost` shows, and only an unpinned one looks at all ranks.
    assert (await generate(client, make_request())).status is None
    families = {family.name: family for family in text_string_to_metric_families(site.scrape())}
    specs = [spec for spec in catalogue.CATALOGUE if "rank" in spec.labels and spec not in catalogue.SWITCHED]
    assert len(specs) > 15
    for spec in specs:
        samples = families[spec.full_name.removesuffix("_total")].samples
        assert sorted({sample.labels["rank"] for sample in samples}) == RANKS, spec.name
    ready = [s for s in families["rankgate_rank_state"].samples if s.labels["state"] == "READY"]
    assert [sample.value for sample in ready] == [1, 1, 1]
    info = families["rankgate_rank_info"].samples
    assert {sample.labels["group"] for sample in info} == {"main"}
    assert all(sample.labels["engine_version"] for sample in info)
    for must_be_zero in ("double_releases", "double_ends", "lost_tokens", "duplicated_tokens", "failed_rows"):
        assert [sample.value for sample in families[f"rankgate_{must_be_zero}"].samples] == [0]


def faults_of(page):
    """What promtool would object to, and what breaks a scrape."""
    seen = set()
    for family in text_string_to_metric_families(page):
        name = family.name
        is_own = name.startswith("rankgate_")
        if not is_own and not name.startswith("process_"):
            yield f"{name}: a foreign prefix"
        if not family.documentation:
            yield f"{name}: no help"
        if family.type == "unknown":
            yield f"{name}: no type"
        if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None:
            yield f"{name}: not snake_case"
        if is_own and re.search(r"_(ms|us|ns|milliseconds|minutes|percent|kb|mb|count|sum|bucket)$", name):
            yield f"{name}: not a base unit, or a reserved suffix"
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            if key in seen:
                yield f"{key}: twice"
            seen.add(key)
            if family.type == "counter" and not sample.name.endswith("_total"):
                yield f"{sample.name}: a counter that does not end in _total"
            if family.type == "counter" and not sample.value >= 0:
                yield f"{key}: {sample.value}"
            if set(sample.labels) & {"job", "instance"} or any("\n" in value for value in sample.labels.values()):
                yield f"{key}: labels"


def test_the_page_lints(site):
    page = site.scrape()
    assert list(faults_of(page)) == []
    if shutil.which("promtool"):
        done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "page",
    [
        "# TYPE rankgate_x gauge\nrankgate_x 1\n",
        "# HELP rankgate_x X.\n# TYPE rankgate_x gauge\nrankgate_x 1\nrankgate_x 2\n",
        "# HELP rankgate_wait_ms X.\n# TYPE rankgate_wait_ms gauge\nrankgate_wait_ms 1\n",
        "# HELP other X.\n# TYPE other gauge\nother 1\n",
        "# HELP rankgate_x X.\nrankgate_x 1\n",
    ],
)
def test_the_lint_finds_what_it_looks_for(page):
    assert len(list(faults_of(page))) == 1

"""Two losses of one of four ranks at full load, looked at closely: its process is killed, or stands still."""

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from gateway.v1 import admin_pb2, gateway_pb2, gateway_pb2_grpc
from tests.chaos import checks
from tests.chaos.book import OK, Book, Watched
from tests.chaos.clients import Clients
from tests.chaos.connection import Connection
from tests.chaos.report import percentiles
from tests.chaos.site import Rank, Site, connect
from tests.chaos.traffic import Job, Traffic
from tests.support.processes import WAIT_S

RANKS, VICTIM = 4, 1
AT_A_TIME = 48
LEAST_TOKENS, MOST_TOKENS = 30, 90
STEP_MS = 15.0
CALM_S = 3.0
"""Before the loss: the control."""
AWAY_S = 1.5
"""Between the loss and the return."""
SILENCE_S = 1.0


class _Greedy(Traffic):
    """Greedy requests: what any rank can go on with. Of different lengths, so that they don't all begin and end at once."""

    def __init__(self) -> None:
        super().__init__(0, "greedy", ranks=RANKS, most_logprobs=0)
        self._numbers = itertools.count(1)

    def next(self) -> Job:
        number = next(self._numbers)
        tokens = LEAST_TOKENS + number * 37 % (MOST_TOKENS - LEAST_TOKENS)
        sampling = gateway_pb2.Sampling(max_tokens=tokens, temperature=0.0)
        prompt = [number % 30_000, 1 + number % 7, 2, 3]
        request = gateway_pb2.GenerateRequest(request_id=f"greedy-{number}", prompt_token_ids=prompt, sampling=sampling)
        return Job(request=request)


class Stage:
    """A site with its load running."""

    def __init__(self, site: Site, book: Book) -> None:
        self.site = site
        self.book = book
        self._channel = connect(site.ports.grpc)
        self.problems: list[str] = []
        self.figures: dict[str, Any] = {}
        self.log: list[dict[str, Any]] = []
        """The gateway's, once the load is over."""

    @property
    def victim(self) -> Rank:
        return self.site.members[VICTIM]

    async def until_state(self, state: "gateway_pb2.RankState.ValueType") -> gateway_pb2.Rank:
        """Wait until the victim is in this state."""
        async with asyncio.timeout(WAIT_S):
            stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)
            async for answer in stub.WatchRanks(gateway_pb2.WatchRanksRequest()):
                if answer.ranks[VICTIM].state == state:
                    return answer.ranks[VICTIM]
        raise AssertionError("the gateway ended its watch")

    async def close(self) -> None:
        await self._channel.close()

    async def decisions(self) -> list[dict[str, Any]]:
        """The newest decisions of the gateway."""
        async with connect(self.site.ports.admin) as channel:
            stub = self.site.admin_stub(channel)
            answer = await stub.ListDecisions(admin_pb2.ListDecisionsRequest(limit=1000), timeout=WAIT_S)
        return [dict(decision) for decision in answer.decisions]

    async def greetings(self) -> float:
        """HELLOs of ranks so far."""
        metrics = await asyncio.to_thread(self.site.metrics)
        return metrics.get('rankgate_link_faults_total{event="handshakes",reason="hello"}', 0.0)

    def changes(self, new: str) -> list[dict[str, Any]]:
        """The victim's changes to this state, as logged."""
        lines = (line for line in self.log if line["event"] == "rank_state")
        return [line for line in lines if line["rank"] == VICTIM and line["new"] == new]

    def expect(self, holds: object, what: str) -> None:
        if not holds:
            self.problems.append(what)


@asynccontextmanager
async def full_load(protocol: str) -> AsyncIterator[Stage]:
    """Four ranks, each with a dozen streams, after a calm while. On leaving the load ends and all is checked."""
    failure = {"silence": {"after_s": SILENCE_S, "quiet_s": 0.5}}
    async with Site(protocol, RANKS, step_ms=STEP_MS, failure=failure) as site:
        before = await checks.baseline(site)
        book = Book(is_detailed=True)
        traffic = _Greedy()
        clients = Clients(book, site.ports.grpc, lambda _: traffic, connections=0, rate=1e6)
        connections = [Connection(site.ports.grpc) for _ in range(4)]
        stage = Stage(site, book)
        is_over = asyncio.Event()

        async def work(number: int) -> None:
            while not is_over.is_set():
                await clients.call(connections[number % 4], traffic.next())

        async with asyncio.TaskGroup() as group:
            for number in range(AT_A_TIME):
                group.create_task(work(number))
            try:
                await asyncio.sleep(CALM_S)
                yield stage
            finally:
                is_over.set()
        await asyncio.gather(stage.close(), *(connection.close() for connection in connections))
        stage.problems += book.violations + await checks.at_rest(site, before)
        stage.problems += await asyncio.to_thread(checks.compare_with_log, site, book)
        stage.log = list(checks.log_lines(site))
        stage.expect(set(book.outcomes) == {OK}, f"outcomes {dict(book.outcomes)}: all should be OK")
        stage.figures |= {"requests": len(book.requests), "retried": book.retried}


async def kill_one(protocol: str) -> Stage:
    """SIGKILL: the others go on as if nothing had happened, its requests go on elsewhere, and it comes back."""
    async with full_load(protocol) as stage:
        greetings = await stage.greetings()
        killed_at = time.monotonic()
        stage.victim.process.kill()
        await stage.until_state(gateway_pb2.RANK_STATE_LOST)
        await asyncio.sleep(AWAY_S)
        back_at = time.monotonic()
        decisions = await stage.decisions()
        stage.site.start_member(stage.victim)
        back = await stage.until_state(gateway_pb2.RANK_STATE_READY)
        stage.expect(back.incarnation == 2, f"it came back as incarnation {back.incarnation}")
        stage.expect(await stage.greetings() == greetings + 1, "it came back with more than one handshake")
        await asyncio.sleep(1.0)
    (lost,) = stage.changes("LOST")
    stage.expect(lost["cause"] == "disconnected", f"lost by {lost['cause']}")
    _check_decisions(stage, decisions, _monotonic(lost["timestamp"]))
    _measure(stage, killed_at, back_at)
    stage.expect(stage.book.retried, "nothing was in flight on it")
    return stage


async def freeze_one(protocol: str) -> Stage:
    """SIGSTOP: found by the silence rule, its requests go on elsewhere, and what it says later reaches nobody."""
    async with full_load(protocol) as stage:
        greetings = await stage.greetings()
        frozen_at = time.monotonic()
        stage.victim.process.send(signal.SIGSTOP)
        try:
            await stage.until_state(gateway_pb2.RANK_STATE_LOST)
            lost_at = time.monotonic()
            await asyncio.sleep(AWAY_S)
        finally:
            back_at = time.monotonic()
            stage.victim.process.send(signal.SIGCONT)
        decisions = await stage.decisions()
        await stage.until_state(gateway_pb2.RANK_STATE_READY)
        stage.expect(await stage.greetings() == greetings, "it shook hands, though its process never ended")
        await asyncio.sleep(1.0)
        metrics = await asyncio.to_thread(stage.site.metrics)
    (lost,) = stage.changes("LOST")
    stage.expect("silen" in lost["cause"], f"lost by {lost['cause']}")
    _check_decisions(stage, decisions, _monotonic(lost["timestamp"]))
    _measure(stage, frozen_at, back_at)
    stage.figures["detected_s"] = round(lost_at - frozen_at, 3)
    stage.figures["late_rows"] = metrics["rankgate_late_rows_total"]
    stage.expect(metrics["rankgate_resumes_total"], "nothing was resumed")
    return stage


SCENARIOS = {"kill_one": kill_one, "freeze_one": freeze_one}


def _check_decisions(stage: Stage, decisions: list[dict[str, Any]], lost_at: float) -> None:
    """Nothing was sent to it after its loss, and only what had been sent to it was sent anew."""
    late = [decision["id"] for decision in decisions if decision["rank"] == VICTIM and decision["at_s"] > lost_at]
    stage.expect(not late, f"decisions for the lost rank: {late}")
    stage.expect(any(decision["at_s"] > lost_at for decision in decisions), "no decision was made meanwhile")
    ranks = {int(decision["id"]): decision["rank"] for decision in decisions}
    for line in stage.log:
        if line["event"] == "request_ended" and line["attempts"] > 1:
            first = ranks.get(line["decision_id"])
            stage.expect(first in (VICTIM, None), f"{line['request_id']} was on rank {first}, and was sent anew")


def _measure(stage: Stage, since: float, until: float) -> None:
    """Gaps between tokens of requests that were never on the lost rank, beside those before the loss."""
    stage.figures["gaps_before_ms"] = calm = percentiles(_gaps(stage.book.kept, since - CALM_S + 1.0, since))
    untouched = [watched for watched in stage.book.kept if watched.attempts == 1]
    stage.figures["gaps_during_ms"] = during = percentiles(_gaps(untouched, since, until))
    if calm is not None and during is not None:
        stage.figures["gap_p99_ratio"] = round(during["p99"] / calm["p99"], 2)


def _gaps(requests: list[Watched], since: float, until: float) -> list[float]:
    return [
        (later - earlier) * 1e3
        for watched in requests
        for earlier, later in itertools.pairwise(watched.arrivals)
        if since <= earlier and later <= until
    ]


def _monotonic(timestamp: str) -> float:
    """A time of the log as a reading of this host's monotonic clock, which all its processes share."""
    ago_s = time.time() - datetime.fromisoformat(timestamp).timestamp()
    return time.monotonic() - ago_s

"""The gateway as installed, and one process per rank behind a network that can be broken."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any, Self

import grpc

from gateway.v1 import admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tests.chaos.proxy import Path as NetworkPath
from tests.support.deployment import Deployment
from tests.support.processes import ROOT, WAIT_S, Process, RankProcess, wait_until

HOOKS = ROOT / "tests" / "chaos" / "hooks"
"""On the gateway's PYTHONPATH: `sitecustomize.py` there moves its wall clock and counts its tasks."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KEPT_DECISIONS = 1024

Channel = grpc.aio.Channel
_STATES, _PREFIX = gateway_pb2.RankState, "RANK_STATE_"


NO_READ_AHEAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""For a client whose library reads little more than the client does."""


def connect(address: str, *more: tuple[str, int]) -> Channel:
    """A connection of its own. Without retries: what the gateway said must not be hidden by the client library."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    return grpc.aio.insecure_channel(address, options=[*options, *more])


class Rank:
    """One rank's process through its incarnations, and its path to the gateway."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.path = NetworkPath()
        self.process: RankProcess = None  # type: ignore[assignment]
        self.starts = 0
        self.is_frozen = False
        self.ended: list[RankProcess] = []
        """Processes that are gone because a fault wanted it."""


class Site(Deployment):
    """`async with`: everything up and READY on entry, ended on exit."""

    def __init__(self, protocol: str, ranks: int, *, step_ms: float, transport: str = "grpcio", **config: Any) -> None:
        super().__init__(
            protocol,
            ranks,
            step_ms=step_ms,
            # Strict: a request that would kill a real engine ends the rank, and the checks see it.
            stub={"strict_vllm": True},
            group={"sockets": {"transport": "tcp"}, "min_ready": 1},
            observability={"log_level": "info", "decision_ring": KEPT_DECISIONS},
            **config,
        )
        ports = self.ports
        listen = {"grpc": ports.grpc, "admin": ports.admin, "metrics": ports.metrics, "transport": transport}
        self._sections["listen"] = listen
        self.members = [Rank(number) for number in range(ranks)]
        self.clock_file = self.directory / "clock"
        self.tasks_file = self.directory / "tasks"

    async def __aenter__(self) -> Self:
        self.__enter__()
        try:
            self.clock_file.write_text("0")
            self.start_gateway()
            await asyncio.gather(*(rank.path.start() for rank in self.members))
            for rank in self.members:
                self.start_member(rank)
            await self.all_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *details: object) -> None:
        await asyncio.gather(*(rank.path.close() for rank in self.members))
        await asyncio.to_thread(self.__exit__, None, None, None)

    def start_gateway(self) -> Process:
        hooks = {
            "PYTHONPATH": f"{HOOKS}{os.pathsep}{ROOT}",
            "CHAOS_CLOCK": str(self.clock_file),
            "CHAOS_TASKS": str(self.tasks_file),
        }
        self.gateway = Process(
            self.directory, self._numbered("gateway"), "rankgate", "serve", "-c", self.config_path, **hooks
        )
        self._cleanup.callback(self.gateway.close)
        return self.gateway

    def start_member(self, rank: Rank) -> None:
        """A new process for the rank."""
        path = self.directory / f"rank-{rank.number}.yaml"
        path.write_text(json.dumps(self._stub | {"socks_proxy": rank.path.address}))
        arguments = ["--protocol", self.protocol, "--handshake", f"tcp://{self.ports.handshake}", "--config", path]
        rank.process = RankProcess(
            self.directory, self._numbered(f"rank{rank.number}"), *arguments, "--start-index", rank.number
        )
        rank.starts += 1
        self._cleanup.callback(rank.process.close)

    async def list_ranks(self) -> list[gateway_pb2.Rank]:
        async with connect(self.ports.grpc) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            answer = await stub.ListRanks(gateway_pb2.ListRanksRequest(), timeout=WAIT_S, wait_for_ready=True)
        return list(answer.ranks)

    async def all_ready(self, timeout_s: float = WAIT_S) -> None:
        """Wait until every rank is READY. Raises AssertionError with what is known when they aren't in time."""
        states: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                while states != ["READY"] * self.ranks:
                    assert self.gateway.is_running, f"the gateway has ended: {self.gateway.log[-3000:]}"
                    await asyncio.sleep(0.05)
                    states = [_STATES.Name(rank.state).removeprefix(_PREFIX) for rank in await self.list_ranks()]
        except TimeoutError:
            logs = [process.log[-1500:] for process in (self.gateway, *(rank.process for rank in self.members))]
            raise AssertionError("\n".join((f"not every rank is READY: {states}; the logs end with", *logs))) from None

    def admin_stub(self, channel: Channel) -> "admin_pb2_grpc.AdminServiceAsyncStub":
        return admin_pb2_grpc.AdminServiceStub(channel)

    def metrics(self) -> dict[str, float]:
        """All series by their name with labels, and by name alone the sum of a metric's series."""
        found: dict[str, float] = {}
        for line in self.scrape().splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                found[series] = float(value)
                name = series.partition("{")[0]
                if name != series:
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def rss_bytes(self) -> int:
        """Resident memory of the gateway."""
        return int(Path(f"/proc/{self.gateway.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def descriptors(self) -> int:
        """Open files and sockets of the gateway."""
        return len(list(Path(f"/proc/{self.gateway.pid}/fd").iterdir()))

    def tasks(self) -> list[str]:
        """What the gateway's event loop runs, as names of coroutines. Asks the hook."""
        self.tasks_file.unlink(missing_ok=True)
        self.gateway.send(signal.SIGUSR2)
        wait_until(self.tasks_file.exists, "the gateway's list of tasks")
        tasks: list[str] = json.loads(self.tasks_file.read_text())
        return tasks

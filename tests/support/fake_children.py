"""Processes that a supervisor can start, ask and lose, without processes."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.edges.reload import Outcome
from gateway.processes.peer import Handler, PeerError
from gateway.v1 import admin_pb2


class FakeChild:
    """Stands for `gateway.processes.child.Child`. `rank_count` is how many ranks its configuration has.

    `asked` is what it was asked since its last start. `problems` names what it does not answer, with the error. What is
    in `gates` it answers only when that is set.
    """

    rank_count = 4

    def __init__(self, number: int, handlers: Mapping[str, Handler]) -> None:
        self.number = number
        self.handlers = handlers
        self.is_up = False
        self.restarts = 0
        self.starts = 0
        self.pid: int | None = None
        self.peer: Any = None
        self.page = ""
        self.asked: list[tuple[str, Any]] = []
        self.problems: dict[str, str] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def drained(self) -> list[int]:
        """The ranks that it was told to drain since its last start."""
        return [
            admin_pb2.DrainRankRequest.FromString(body["request"]).rank
            for what, body in self.asked
            if what == "apply" and body["method"] == "DrainRank"
        ]

    async def start(self, _: Mapping[str, Any]) -> None:
        self._end = asyncio.get_running_loop().create_future()
        self.starts += 1
        self.pid = 1000 * (self.number + 1) + self.starts
        self.peer = object()
        self.asked = []
        self.is_up = True

    async def ask(self, what: str, body: Any = None, _: float | None = None, *, timeout_s: float | None = None) -> Any:
        if not self.is_up:
            raise PeerError(f"{what}: process {self.number} is not up")
        self.asked.append((what, body))
        if what in self.gates:
            async with asyncio.timeout(timeout_s):
                await self.gates[what].wait()
        if what in self.problems:
            raise PeerError(self.problems[what])
        return getattr(self, f"_{what}")(body)

    async def wait(self) -> int:
        code = await asyncio.shield(self._end)
        self.is_up = False
        return code

    def kill(self) -> None:
        self._ends(-9)

    def _ends(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)

    def _ping(self, _: None) -> None:
        pass

    def _metrics(self, _: None) -> str:
        return self.page

    def _check(self, _: str) -> list[str]:
        return []

    def _reload(self, body: Any) -> Any:
        result = "invalid" if body["problem"] else "applied"
        return msgspec.to_builtins(Outcome(result=result, cause=body["cause"], at_unix_s=time.time()))

    def _apply(self, body: Any) -> bytes:
        rank = admin_pb2.DrainRankRequest.FromString(body["request"]).rank
        if rank >= self.rank_count:
            raise PeerError(f"apply: INVALID_RANK: rank: name one of 0..{self.rank_count - 1}")
        return b""

    def _stop(self, _: bool) -> None:
        self._ends(0)

"""A driver over the real core with a link and sinks that only remember what reached them."""

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.core.effects import AuditFound, RankStateChanged
from gateway.core.events import BatchReceived, RankJoined, SendFailed
from gateway.core.request import Request, Sequence
from gateway.core.router import Router
from gateway.edges.driver import Driver
from gateway.types import EngineBatch, EngineRequest
from tests.support.core import NONCE, Bench, make_config, make_info


class Sink:
    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.tokens: list[int] = []
        self.ended: list[Request] = []

    def flush(self, sequence: Sequence) -> None:
        if self.fails:
            raise RuntimeError("broken sink")
        self.tokens += sequence.take()[0]

    def end(self, request: Request) -> None:
        self.ended.append(request)
        if self.fails:
            raise RuntimeError("broken sink")


class Shared:
    """What all sinks of a test saw, in order: `(name, tokens)` of outputs, `(name, outcome)` of ends."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def sink(self, name: str, then: Callable[[str], None] = lambda _: None) -> "NamedSink":
        """`then` is called after each "flush" and "end" that the sink saw."""
        return NamedSink(self.seen, name, then)


class NamedSink:
    def __init__(self, seen: list[tuple[str, object]], name: str, then: Callable[[str], None]) -> None:
        self._seen, self._name, self._then = seen, name, then

    def flush(self, sequence: Sequence) -> None:
        self._seen.append((self._name, list(sequence.take()[0])))
        self._then("flush")

    def end(self, request: Request) -> None:
        self._seen.append((self._name, "ok" if request.error is None else request.error.reason.value))
        self._then("end")


class Link:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.sent: list[str] = []
        self.aborted: list[str] = []
        self.renewed: list[tuple[int, int]] = []
        self.fails_at: int | None = None

    def send(self, rank: int, incarnation: int, request: EngineRequest) -> None:
        self.sent.append(request.wire_id)
        if self.fails_at == len(self.sent):
            self.driver.emit(SendFailed(rank, incarnation, request.wire_id, "unreachable"))

    def abort(self, rank: int, incarnation: int, wire_ids: list[str]) -> None:
        self.aborted += wire_ids

    def renew(self, rank: int, incarnation: int) -> None:
        self.renewed.append((rank, incarnation))


class Site:
    """`config` are sections of the configuration."""

    def __init__(self, ranks: int = 2, **config: Any) -> None:
        self.defects: list[tuple[str, str]] = []
        self.changes: list[RankStateChanged] = []
        self.findings: list[AuditFound] = []
        self.reported: list[Request] = []
        router = Router(make_config(ranks, **config), nonce=NONCE, rng=lambda: 0.0)
        self.driver = Driver(
            router,
            on_ended=self.reported.append,
            on_defect=lambda where, error: self.defects.append((where, str(error))),
            on_rank_change=self.changes.append,
            on_audit=self.findings.append,
        )
        self.driver.link = self.link = Link(self.driver)
        for rank in range(ranks):
            self.driver.emit(RankJoined(rank=rank, incarnation=1, info=make_info()))

    def submit(self, sink: Any, **more: Any) -> Request:
        return self.driver.submit(Bench(1, join=False).arrived(request_id=f"r{id(sink)}", sink=sink, **more))

    def batch(self, rank: int, *rows: Any) -> None:
        """Rows are `(wire id, tokens, finish)`."""
        ids, tokens, finish = zip(*rows, strict=True)
        self.driver.emit(BatchReceived(rank, 1, EngineBatch(ids=ids, token_ids=[*map(tuple, tokens)], finish=finish)))


async def turn() -> None:
    """Let everything run that is due."""
    for _ in range(3):
        await asyncio.sleep(0)

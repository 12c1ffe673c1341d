"""Builders for core tests: a router with READY ranks, requests and batches in one line each."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.config.schema import Config
from gateway.core.effects import (
    AbortOnRank,
    Dispatch,
    Effect,
    ProbeRank,
    RenewIncarnation,
    RequestAccepted,
    RequestEnded,
    RequestRefused,
)
from gateway.core.errors import GatewayError
from gateway.core.events import (
    BatchReceived,
    Event,
    RankJoined,
    RankLost,
    RankRenewed,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from gateway.core.request import Request
from gateway.core.request import Sequence as Generated
from gateway.core.router import Router
from gateway.types import EngineBatch, EngineLoad, RankInfo, Sampling

NONCE = "0123456789abcdef"


def make_config(ranks: int = 4, protocol: str = "vllm", **overrides: Any) -> Config:
    base: dict[str, Any] = {
        "version": 1,
        "model": {"name": "m", "max_context_tokens": 4096, "vocab_size": 32000, "eos_token_ids": [2]},
        "groups": [{"name": "g", "protocol": protocol, "handshake": "tcp://127.0.0.1:30500", "ranks": ranks}],
        # Losses end requests here; tests of recovery ask for it.
        "failure": {"reroute": False, "resume": False},
    }
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            base[key] = base[key] | value
        else:
            base[key] = value
    return msgspec.convert(base, Config, strict=False)


def make_info(**overrides: Any) -> RankInfo:
    values: dict[str, Any] = {"max_model_len": 4096, "kv_capacity_tokens": 400_000, "max_num_seqs": 256}
    return RankInfo(**(values | overrides))


def load(running: int, waiting: int, kv_usage: float = 0.0, **more: Any) -> EngineLoad:
    return EngineLoad(running=running, waiting=waiting, kv_usage=kv_usage, **more)


class Bench:
    """A router, a clock that only moves when told, and a memory of what came out."""

    def __init__(self, ranks: int = 4, protocol: str = "vllm", *, join: bool = True, info: Any = None, **config: Any):
        self.config = make_config(ranks, protocol, **config)
        self.router = Router(self.config, nonce=NONCE, rng=random.Random(7).random)
        self.now = 100.0
        self.dispatched: list[Dispatch] = []
        self.aborted: list[AbortOnRank] = []
        self.ended: list[Request] = []
        self.probed: list[ProbeRank] = []
        self.renewals: list[RenewIncarnation] = []
        self._ids = 0
        if join:
            for rank in range(self.router.ranks.size):
                self.join(rank, info=info)

    def send(self, event: Event) -> list[Effect]:
        effects = self.router.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Dispatch):
                self.dispatched.append(effect)
            elif isinstance(effect, AbortOnRank):
                self.aborted.append(effect)
            elif isinstance(effect, RequestEnded):
                self.ended.append(effect.request)
            elif isinstance(effect, ProbeRank):
                self.probed.append(effect)
            elif isinstance(effect, RenewIncarnation):
                self.renewals.append(effect)
        self.router.check()
        return effects

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        """Let time pass, then tell the router."""
        self.now += seconds
        return self.send(Tick())

    def pass_time(self, seconds: float, step_s: float = 0.25) -> list[Effect]:
        """Let time pass as the driver does: in small steps."""
        effects: list[Effect] = []
        end = self.now + seconds
        while self.now < end:
            effects += self.tick(min(step_s, end - self.now))
        return effects

    def renew(self) -> None:
        """Do as the link does when an incarnation was given up whose sockets it keeps."""
        renewals, self.renewals = self.renewals, []
        for effect in renewals:
            self.send(RankRenewed(effect.rank, effect.incarnation + 1))

    def join(self, rank: int, incarnation: int | None = None, info: RankInfo | None = None) -> None:
        number = self.router.ranks.incarnation[rank] + 1 if incarnation is None else incarnation
        self.send(RankJoined(rank=rank, incarnation=number, info=info or make_info()))

    def arrived(self, prompt: Sequence[int] = (5, 6, 7), *, max_tokens: int = 16, **more: Any) -> RequestArrived:
        self._ids += 1
        sampling = more.pop("sampling", None) or Sampling(max_tokens=max_tokens)
        values = {"client_key": "c", "request_id": f"r{self._ids}", "prompt_token_ids": list(prompt)} | more
        return RequestArrived(sampling=sampling, **values)

    def request(self, *args: Any, **more: Any) -> Request:
        """Submit; fail the test when it is refused."""
        found = self.offer(*args, **more)
        if isinstance(found, GatewayError):
            raise found
        return found

    def offer(self, *args: Any, **more: Any) -> Request | GatewayError:
        """Submit; what became of it."""
        first, *_ = self.send(self.arrived(*args, **more))
        if isinstance(first, RequestAccepted):
            return first.request
        assert isinstance(first, RequestRefused), "neither accepted nor refused"
        return first.error

    def batch(self, rank: int, rows: Sequence[tuple[Any, ...]] = (), load: EngineLoad | None = None, **more: Any):
        """Rows are `(wire id, tokens[, finish[, completion tokens]])`."""
        counted = any(len(row) > 3 for row in rows)
        batch = EngineBatch(
            ids=[row[0] for row in rows],
            token_ids=[tuple(row[1]) for row in rows],  # as the wires decode them
            finish=[row[2] if len(row) > 2 else "" for row in rows],
            completion_tokens=[row[3] for row in rows] if counted else None,
            load=load,
            **more,
        )
        return self.send(BatchReceived(rank, self.router.ranks.incarnation[rank], batch))

    def finish(self, request: Request, tokens: Sequence[int] = (9,), load: EngineLoad | None = None) -> None:
        """Every sequence of the request produces `tokens` and ends, one batch per sequence."""
        for sequence in request.sequences:
            attempt = sequence.attempt
            assert attempt is not None
            if not attempt.released:
                self.batch(attempt.rank, [(attempt.wire_id, tokens, "stop")], load)

    def cancel(self, request: Request, reason: Any) -> None:
        self.send(RequestCancelled(request.handle, reason))

    def lose(self, rank: int, cause: str = "disconnected") -> None:
        self.send(RankLost(rank, self.router.ranks.incarnation[rank], cause))

    def flush(self) -> list[tuple[Request, tuple[int, ...] | None]]:
        """What leaves now, in order: the requests' tokens, and None for their ends."""
        left: list[tuple[Request, tuple[int, ...] | None]] = []
        for item in self.router.take_dirty():
            if isinstance(item, Generated):
                left.append((item.request, tuple(item.take()[0])))
            else:
                left.append((item, None))
        return left

    @property
    def sent(self) -> list[int]:
        """The ranks that were sent something, in order."""
        return [effect.rank for effect in self.dispatched]

    def assert_quiet(self) -> None:
        """The global postcondition, as far as the core can see it."""
        router = self.router
        router.check()
        assert router.live_count == 0
        assert router.in_flight == 0
        table = router.ranks
        for column in (table.in_flight, table.in_flight_prefill, table.in_flight_decode, table.queued_tokens):
            assert column == [0] * table.size
        assert table.ctx_tokens == table.own_tokens == [0] * table.size
        assert table.pending_us == table.prompt_tokens_in_flight == table.kv_reserved_tokens == [0] * table.size
        assert router.counters.accepted == sum(router.counters.ended.values())
        assert router.queue_depth == 0
        if router.batches is not None:
            assert [router.batches.count(rank) for rank in range(table.size)] == [0] * table.size
        ordering = router.ordering
        if ordering is not None:
            assert (ordering.places, ordering.held_bytes, ordering.domains) == (0, 0, 0)
        admission, answers = router._admission, router._answers
        assert (admission.sequences, admission.prompt_tokens, admission.kv_tokens) == (0, 0, 0)
        tenants = admission.tenants
        for account in (*tenants.named, *tenants._tracked.values(), tenants._overflow):
            assert (account.in_flight, account.prompt_tokens, account.kv_tokens, account.queued) == (0, 0, 0, 0)
        assert not answers._leaders
        assert not answers._followers


def wire_id(request: Request, index: int = 0) -> str:
    attempt = request.sequences[index].attempt
    assert attempt is not None
    return attempt.wire_id

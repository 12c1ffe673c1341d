"""Both ends of `tests.property.test_whole_streams`: ranks that generate what can be foretold, and calls that know what they asked.

What lies between them is the gateway's own. Nothing here waits or reads a clock, so that a run is the same each time.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, NamedTuple

from gateway.core.events import RankJoined, RankLost
from gateway.edges.driver import Driver
from gateway.edges.engine_link.counters import LinkCounters
from gateway.edges.engine_link.intake import Intake
from gateway.edges.grpc_engine.vllm import VllmService
from gateway.types import EngineBatch, EngineRequest, FinishReason, TokenLogprob
from tests.support.calls import engine_request
from tests.support.core import load, make_info
from tests.support.direct import FakeCall, FakeStream

PROMPTS = ((5,), (5,), (5, 5), (6,))
"""Few, so that requests are alike."""
FIRST_GENERATED = 38
"""Ranks generate this token and higher ones, so that a rank sees where a prompt ends that another one went on with."""
ROW_TOKENS = (0, 1, 1, 1, 2, 3, 60)
EARLY_FINISHES: tuple[FinishReason, ...] = ("stop", "stop", "abort", "error")


def token(prompt: Sequence[int], index: int, position: int) -> int:
    """The one right token at this position of the prompt's sequence `index`, on whichever rank: no two neighbours agree."""
    return FIRST_GENERATED + (sum(prompt) * 7 + index * 1000 + position * 13) % 30_000


def tokens(prompt: Sequence[int], index: int, start: int, count: int) -> list[int]:
    return [token(prompt, index, position) for position in range(start, start + count)]


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its time passes when `now` is set. The main task may wait for the next turn and for nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def time(self) -> float:
        return self.now


class _Row(NamedTuple):
    wire_id: str
    token_ids: Sequence[int]
    finish: FinishReason
    logprobs: Sequence[TokenLogprob] | None


class _Attempt:
    """An attempt as its rank has it."""

    def __init__(self, request: EngineRequest) -> None:
        self.wire_id = request.wire_id
        self.has_logprobs = request.sampling.logprobs is not None
        self.left = request.sampling.max_tokens
        self._prompt = list(takewhile(lambda token_id: token_id < FIRST_GENERATED, request.prompt_token_ids))
        self._index = int(request.wire_id.split("-")[2])
        earlier = list(request.prompt_token_ids[len(self._prompt) :])
        self.position = len(earlier)
        assert earlier == tokens(self._prompt, self._index, 0, len(earlier)), "sent on with other tokens than it had"

    def row(self, rng: random.Random) -> _Row:
        """What a step adds: its next tokens, perhaps none, and perhaps its end."""
        count = min(rng.choice(ROW_TOKENS), self.left)
        token_ids: Sequence[int] = tokens(self._prompt, self._index, self.position, count)
        self.position += count
        self.left -= count
        finish: FinishReason = "" if self.left else "length"
        if not finish and rng.random() < 0.02:
            finish = rng.choice(EARLY_FINISHES)
        logprobs = [TokenLogprob(-1.0, ((1, -1.0),))] * count if self.has_logprobs else None
        if rng.random() < 0.7:
            token_ids = tuple(token_ids)  # decoders make both
        return _Row(self.wire_id, token_ids, finish, logprobs)


class Ranks:
    """The driver's link and the engines behind it. Their messages pass the real intake, which joins plain ones.

    `seen` counts what the run is about: joined messages, and attempts that go on with what another rank generated.
    """

    def __init__(self, driver: Driver, rng: random.Random, count: int, seen: Counter[str]) -> None:
        self._driver = driver
        self._rng = rng
        self._seen = seen
        self._work: list[dict[str, _Attempt]] = [{} for _ in range(count)]
        self._incarnations = [0] * count
        self._intakes = [self._new_intake(rank) for rank in range(count)]
        for rank in range(count):
            self._join(rank)

    # ---- the parts of `gateway.edges.driver.Link` that these runs need ---------------------------------

    def send(self, rank: int, incarnation: int, request: EngineRequest) -> None:
        assert incarnation == self._incarnations[rank]
        attempt = self._work[rank][request.wire_id] = _Attempt(request)
        self._seen["resumed"] += attempt.position > 0

    def abort(self, rank: int, _incarnation: int, wire_ids: list[str]) -> None:
        for wire_id in wire_ids:
            self._work[rank].pop(wire_id, None)

    # ---- what the engines do -------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not any(self._work)

    def step(self, rank: int) -> None:
        """The rank sends what it has of one or several steps, which are read at once."""
        messages = [self._message(rank) for _ in range(self._rng.choice((1, 1, 3)))]
        intake, incarnation = self._intakes[rank], self._incarnations[rank]
        for message in messages:
            if message is not None:
                frame: Any = SimpleNamespace(bytes=message)
                intake.take([frame], incarnation)
        intake.flush()

    def lose(self, rank: int) -> None:
        """The rank dies, and another incarnation of it is there at once."""
        self._work[rank].clear()
        self._driver.emit(RankLost(rank, self._incarnations[rank], "gone"))
        self._join(rank)

    def _join(self, rank: int) -> None:
        self._incarnations[rank] += 1
        self._driver.emit(RankJoined(rank=rank, incarnation=self._incarnations[rank], info=make_info()))

    def _message(self, rank: int) -> EngineBatch | None:
        rng, work = self._rng, self._work[rank]
        rows = [attempt.row(rng) for attempt in work.values() if rng.random() < 0.7]
        for row in rows:
            if row.finish:
                del work[row.wire_id]
        if not rows:
            return None
        has_logprobs = any(row.logprobs is not None for row in rows)
        return EngineBatch(
            ids=[row.wire_id for row in rows],
            token_ids=[row.token_ids for row in rows],
            finish=[row.finish for row in rows],
            logprobs=[row.logprobs for row in rows] if has_logprobs else None,
            load=load(len(work), 0, 0.1) if rng.random() < 0.7 else None,
            engine_index=rank,
        )

    def _new_intake(self, rank: int) -> Intake:
        """An intake whose frames hold the messages themselves."""

        def emit(event: Any) -> None:
            self._seen["joined"] += isinstance(event.batch, EngineBatch) and event.batch.messages > 1
            self._driver.emit(event)

        env: Any = SimpleNamespace(counters=LinkCounters(), events=SimpleNamespace(emit=emit))
        protocol: Any = SimpleNamespace(decode_output=lambda frames: frames[0])
        return Intake(env, protocol, rank, rank, joined=lambda: self._incarnations[rank])


class _HeadedStream(FakeStream):
    """As the real one it refuses the first message, which needs the headers before it."""

    def push(self, message: bytes) -> bool:
        return bool(self.call.messages) and super().push(message)


class AskedCall(FakeCall):
    """A call of vLLM's Generate that knows its request, and so what may come of it."""

    def __init__(self, number: int, rng: random.Random) -> None:
        super().__init__()
        self.request_id = f"r{number}"
        self.n = rng.choice((1, 1, 1, 1, 2, 3))
        self.max_tokens = rng.choice((1, 5, 5, 40, 400))
        self._prompt = rng.choice(PROMPTS)
        self._temperature = rng.choice((0.0, 0.0, 1.0))
        self._logprobs = rng.choice((None, None, None, 1))
        self._is_stream = rng.random() < 0.8
        self._chunks: dict[int, list[int]] = {index: [] for index in range(self.n)}
        self._completes: dict[int, Any] = {}

    def request(self) -> bytes:
        sampling: dict[str, Any] = {"temperature": self._temperature, "n": self.n}
        if self._logprobs is not None:
            sampling["logprobs"] = self._logprobs
        fields: dict[str, Any] = {"request_id": self.request_id, "stream": self._is_stream, "sampling": sampling}
        request = engine_request("vllm", self._prompt, self.max_tokens, **fields)
        data: bytes = request.SerializeToString()
        return data

    @property
    def stream(self) -> _HeadedStream:
        return _HeadedStream(self)

    @property
    def is_open(self) -> bool:
        return self.code is None

    @property
    def end(self) -> str:
        """How the call ended."""
        match self.code:
            case None:
                return "open"
            case 0:
                return "OK"
            case -1:
                return "left"
            case _:
                return self.reason

    @property
    def finishes(self) -> set[str]:
        """How the sequences ended that have a complete. Known after `check`."""
        return {complete.finish_reason for complete in self._completes.values()}

    def check(self) -> None:
        """All that came is right, and all that had to come is there."""
        for message in self.messages:
            response = VllmService.messages.GenerateResponse.FromString(message)
            if response.HasField("chunk"):
                self._check_chunk(response.chunk)
            else:
                self._check_complete(response.complete)
        if self.code == 0:
            assert len(self._completes) == self.n, "it ended well without a complete of every sequence"

    def _check_chunk(self, chunk: Any) -> None:
        assert self._is_stream
        assert chunk.index not in self._completes, "a chunk follows its sequence's complete"
        before = self._chunks[chunk.index]
        assert list(chunk.token_ids) == tokens(self._prompt, chunk.index, len(before), len(chunk.token_ids))
        before.extend(chunk.token_ids)
        assert chunk.completion_tokens == len(before)
        self._check_logprobs(chunk.output_logprobs, chunk.token_ids)

    def _check_complete(self, complete: Any) -> None:
        assert complete.index not in self._completes, "a second complete"
        self._completes[complete.index] = complete
        count = len(complete.output_ids)
        assert list(complete.output_ids) == tokens(self._prompt, complete.index, 0, count)
        assert complete.completion_tokens == count
        if self._is_stream:
            assert count == len(self._chunks[complete.index]), "it does not repeat the chunks"
        if complete.finish_reason == "length":
            assert count == self.max_tokens
        self._check_logprobs(complete.output_logprobs, complete.output_ids)

    def _check_logprobs(self, logprobs: Any, token_ids: Sequence[int]) -> None:
        expected = len(token_ids) if self._logprobs is not None else 0
        assert len(logprobs.token_logprobs) == expected
        assert list(logprobs.token_ids) == (list(token_ids) if expected else [])

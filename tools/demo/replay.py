"""Replays a slice of a public trace through the gateway's API and checks every token that comes back."""

import asyncio
import csv
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gateway.client import Client, GenerationError

Expected = Callable[[list[int], int], list[int]]
TIMEOUT_S = 60.0
TRACE = Path(__file__).parent.parent / "data" / "azure_conv_slice.csv"


class Job(msgspec.Struct, frozen=True):
    """One request: when it arrives (seconds, already compressed), which prompt it has and how long it is (tokens)."""

    arrival_s: float
    prompt_number: int
    prompt_tokens: int
    output_tokens: int


class Result(msgspec.Struct):
    """What one request experienced. Times in seconds; `gaps_s` between its messages."""

    rank: int | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    gaps_s: list[float] = msgspec.field(default_factory=list)
    tokens: int = 0
    error: str | None = None


class Replay:
    """The jobs' results as they come in.

    `expected(prompt, count)` gives the tokens that must come back; without it, equal prompts must get equal
    tokens, whichever rank served them.
    """

    def __init__(self, address: str, jobs: list[Job], vocab_size: int, expected: Expected | None) -> None:
        self.jobs = jobs
        self.results: list[Result] = []
        self.started = 0
        self._address = address
        self._vocab_size = vocab_size
        self._expected = expected
        self._answers: dict[int, list[int]] = {}

    async def run(self) -> None:
        """Send every job at its time, open loop, and wait for all of them."""
        async with Client(self._address) as client, asyncio.TaskGroup() as tasks:
            begin = time.monotonic()
            for job in self.jobs:
                await asyncio.sleep(begin + job.arrival_s - time.monotonic())
                tasks.create_task(self._one(client, job))

    async def _one(self, client: Client, job: Job) -> None:
        prompt = _prompt(job.prompt_number, job.prompt_tokens, self._vocab_size)
        result = Result()
        received: list[int] = []
        self.started += 1
        sent_at = last_at = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                start = client.start(prompt, max_tokens=job.output_tokens, ignore_eos=True, temperature=0.0)
                async with await start as generation:
                    async for message in generation:
                        now = time.monotonic()
                        if not received:
                            result.ttft_s = now - sent_at
                        else:
                            result.gaps_s.append(now - last_at)
                        last_at = now
                        received.extend(message.token_ids)
                        if message.HasField("finish"):
                            result.rank = message.finish.rank
            result.e2e_s = last_at - sent_at
            if received != self._right_answer(job, prompt, received):
                result.error = f"{len(received)} tokens came back, not the {job.output_tokens} that were generated"
        except GenerationError as error:
            result.error = str(error)
        except TimeoutError:
            result.error = f"no end after {TIMEOUT_S:g} s"
        result.tokens = len(received)
        self.results.append(result)

    def _right_answer(self, job: Job, prompt: list[int], received: list[int]) -> list[int]:
        if self._expected is not None:
            return self._expected(prompt, job.output_tokens)
        return self._answers.setdefault(job.prompt_number, received)


def repeated_prompts(duration_s: float, requests: int = 48, prompts: int = 6) -> list[Job]:
    """A few short prompts again and again, for engines that compute every token on this machine's CPU."""
    return [
        Job(duration_s * number / requests, number % prompts, 16 + 12 * (number % prompts), 24)
        for number in range(requests)
    ]


def load_trace(duration_s: float, limit: int | None = None) -> list[Job]:
    """The slice (its first `limit` requests), compressed so that its arrivals take `duration_s` seconds."""
    with TRACE.open() as file:
        rows = list(csv.DictReader(file))[:limit]
    # A slice that is one moment long can't be stretched.
    factor = duration_s / (float(rows[-1]["arrival_s"]) or duration_s)
    return [
        Job(float(row["arrival_s"]) * factor, number, int(row["prompt_tokens"]), int(row["output_tokens"]))
        for number, row in enumerate(rows)
    ]


def percentiles(values: list[float]) -> Iterator[float]:
    """p50, p95 and p99 by nearest rank; nothing for no values."""
    ordered = sorted(values)
    for share in (0.5, 0.95, 0.99):
        if ordered:
            yield ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _prompt(number: int, length: int, vocab_size: int) -> list[int]:
    source = random.Random(number)  # noqa: S311 - a reproducible prompt, not a secret
    return [source.randrange(vocab_size) for _ in range(length)]

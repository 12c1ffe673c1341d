"""The short way of a row does as the long one, which takes all rows whose tokens are no tuple."""

import random

import pytest

from gateway.core.events import BatchReceived
from gateway.types import EngineBatch, Sampling, TokenLogprob
from tests.support.core import Bench

REQUESTS, BATCHES = 3, 6


def row_of(rng, attempt, given, *, is_counted):
    """`(tokens, finish, claimed count, cached tokens, logprobs)`, mostly as an engine sends them."""
    count = rng.choices((1, 2, 0), (8, 1, 1))[0]
    token_ids = [rng.randrange(3, 100) for _ in range(count)]
    finish = rng.choices(("", "stop", "length", "abort"), (30, 2, 2, 1))[0]
    claimed = given + count + rng.choices((0, 1, -1), (30, 1, 1))[0] if is_counted else None
    cached = rng.choice((None, 2)) if not given else rng.choices((None, 5), (9, 1))[0]
    logprobs = [TokenLogprob(-0.5)] * count if rng.random() < 0.1 else None
    return attempt, token_ids, finish, claimed, cached, logprobs


class Play:
    """One random history, the same for both ways."""

    def __init__(self, way, seed, protocol):
        self.way, self.rng = way, random.Random(seed)
        caches = self.rng.random() < 0.3
        settings = {"response_cache": {}} if caches else {}
        self.is_counted = protocol == "tokenspeed"
        self.bench = Bench(1, protocol, failure={"resume": True, "reroute": True}, **settings)
        greedy = Sampling(max_tokens=4, temperature=0.0, logprobs=0 if self.rng.random() < 0.3 else None)
        self.requests = [self.bench.request(sampling=greedy) for _ in range(REQUESTS)]
        self.sent = {each.wire_id: 0 for each in (request.sequences[0].attempt for request in self.requests)}
        self.taken = [[] for _ in self.requests]

    def run(self):
        told = [self.step() for _ in range(BATCHES)]
        counters = self.bench.router.counters
        names = ("tokens", "rows", "late_rows", "orphan_rows", "lost_tokens", "duplicated_tokens", "reaborts", "ended")
        return told, self.taken, {name: getattr(counters, name) for name in names}

    def step(self):
        rng = self.rng
        rows = [
            row_of(rng, wire_id, self.sent[wire_id], is_counted=self.is_counted)
            for wire_id in rng.choices(list(self.sent), k=rng.randrange(1, 5))
        ]
        has_cached, has_logprobs = rng.random() < 0.5, rng.random() < 0.3
        batch = EngineBatch(
            ids=[row[0] for row in rows],
            token_ids=[self.way(row[1]) for row in rows],
            finish=[row[2] for row in rows],
            completion_tokens=[row[3] for row in rows] if self.is_counted else None,
            cached_tokens=[row[4] for row in rows] if has_cached else None,
            logprobs=[row[5] for row in rows] if has_logprobs else None,
        )
        self.bench.send(BatchReceived(0, 1, batch))
        for wire_id, token_ids, *_ in rows:
            self.sent[wire_id] += len(token_ids)
        takes = rng.random() < 0.6
        return [self.look(number, request, takes=takes) for number, request in enumerate(self.requests)]

    def look(self, number, request, *, takes):
        (sequence,) = request.sequences
        attempt, record = sequence.attempt, sequence.record
        if takes:
            self.bench.router.take_dirty()
            token_ids, logprobs = sequence.take()
            self.taken[number].append((list(token_ids), logprobs))
        return (
            *(request.phase, request.error and request.error.reason, sequence.finish, sequence.cached_tokens),
            *(sequence.completion_tokens, sequence.backlog_tokens, sequence.is_dirty),
            *(attempt.tokens_out, attempt.is_done, attempt.released),
            record and (list(record.token_ids), record.is_answer, record.logprobs, record._answer_bytes),
        )


@pytest.mark.parametrize("protocol", ["vllm", "tokenspeed"])
def test_both_ways_come_to_the_same(protocol):
    for seed in range(400):
        assert Play(tuple, seed, protocol).run() == Play(list, seed, protocol).run(), seed

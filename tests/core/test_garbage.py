"""Ended and refused requests are freed at once: with the collector off, nothing is left that only it could free."""

import gc
import random

import pytest

from gateway.core.effects import Dispatch, RequestAccepted
from gateway.core.errors import Reason
from gateway.core.events import BatchReceived, RankJoined, RequestArrived, RequestCancelled, Tick
from gateway.core.request import Sequence
from gateway.core.router import Router
from gateway.types import EngineBatch, Sampling
from tests.support.core import NONCE, make_config, make_info

QUEUE = {"scheduling": {"mode": "queue"}}
BATCH = {"scheduling": {"mode": "batch"}}
PRESERVE = {"ordering": "preserve", "limits": {"default_deadline_s": 60.0}}
CACHE = {"response_cache": {"coalesce": True}}
FULL = {"admission": {"max_in_flight_per_rank": 1}}
CROWDED = {"admission": {"max_in_flight": 4}}


class Edge:
    """Runs a router as the edges do: output is taken, and who has ended is unlinked."""

    def __init__(self, **config):
        self.router = Router(make_config(2, **config), nonce=NONCE, rng=random.Random(1).random)
        self.now = 1.0
        self.running = []
        self.accepted = 0
        self.last = None
        for rank in range(2):
            self.send(RankJoined(rank=rank, incarnation=1, info=make_info(max_num_seqs=2)))

    def send(self, event):
        self.now += 0.001
        for effect in self.router.handle(event, self.now):
            if isinstance(effect, Dispatch):
                self.running.append((effect.rank, effect.request.wire_id))
            elif isinstance(effect, RequestAccepted):
                self.accepted += 1
                self.last = effect.request.handle
        for item in self.router.take_dirty():
            if isinstance(item, Sequence):
                item.take()
            else:
                item.unlink()

    def offer(self, number, n):
        # Every third one asks for what the one before it asked for.
        prompt = [1, number - number % 3]
        self.send(
            RequestArrived(
                client_key="c",
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                sampling=Sampling(max_tokens=4, temperature=0.0),
                n=n,
                pinned_rank=number % 2 if number % 5 == 0 else None,
                deadline_at=self.now + (0.01 if number % 7 == 0 else 60.0),
                tenant=f"t{number % 4}",
            )
        )

    def finish_one(self, finish="length"):
        rank, wire_id = self.running.pop(0)
        self.send(BatchReceived(rank, 1, EngineBatch(ids=[wire_id], token_ids=[[7, 8]], finish=[finish])))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "config",
    [
        {},
        QUEUE,
        BATCH,
        PRESERVE,
        PRESERVE | QUEUE,
        CACHE,
        CACHE | BATCH,
        FULL,
        CROWDED,
        CROWDED | QUEUE,
        {"predictor": {"prefill_ms": "total_new_tokens", "calibrate": True}, **QUEUE},
    ],
)
def test_requests_leave_no_cycles_behind(config, n):
    edge = Edge(**config)
    gc.collect()
    gc.disable()
    try:
        for number in range(120):
            edge.offer(number, n)
            if number % 11 == 0:
                edge.send(RequestCancelled(edge.last, Reason.CANCELLED))
            if number % 3 and edge.running:
                edge.finish_one("error" if number % 13 == 0 else "length")
            if number % 10 == 0:
                edge.send(Tick())
        assert edge.accepted
        assert gc.collect() == 0
    finally:
        gc.enable()

"""One rank, a queue in service order and the batches that went: what tests of batching share."""

from collections import Counter

from gateway.config.scheduling import Batch
from gateway.core.batcher import BatchFormer
from gateway.core.batches_in_flight import BatchesInFlight
from gateway.core.entry import Entry
from gateway.core.events import RequestArrived
from gateway.core.request import Attempt, Request
from gateway.types import Sampling


class FixedPredictor:
    """`per_token_us` for each new token, `fixed_us` for a batch; `fault` is raised instead if there is one."""

    def __init__(self, per_token_us=1000, fixed_us=0):
        self.per_token_us = per_token_us
        self.fixed_us = fixed_us
        self.fault = None
        self.calls = 0

    def batch_us(self, members):
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        if not members:
            return 0
        return self.fixed_us + self.per_token_us * sum(prompt - cached for prompt, cached in members)


def make_request(number, prompt_tokens=10, now=0.0, n=1, priority=0):
    arrived = RequestArrived(
        client_key="c",
        request_id=f"r{number}",
        prompt_token_ids=[1] * prompt_tokens,
        sampling=Sampling(max_tokens=16),
        n=n,
        priority=priority,
    )
    return Request(number, arrived, now)


def make_entry(number, prompt_tokens=10, at=0.0, priority=0):
    request = make_request(number, prompt_tokens, at, priority=priority)
    return Entry(request.sequences[0], None, number, at, prefill_ms=0.0, service_tokens=0.0)


def make_attempt(number, rank=0, prompt_tokens=10):
    request = make_request(number, prompt_tokens)
    return Attempt(request.sequences[0], f"w{number}", 1, rank, incarnation=1, sent_at=0.0)


def anything_fits(entry, tokens):
    return True


class Rig:
    """A rank that is as busy as `others` says, beside what the rig sent to it.

    Service order is priority, larger first, then arrival. `sizes` counts the batches by size.
    """

    def __init__(self, *, others=0, fits=anything_fits, predictor=None, **settings):
        self.settings = Batch(**settings)
        self.predictor = predictor or FixedPredictor()
        self.former = BatchFormer(self.settings, self.predictor)
        self.in_flight = BatchesInFlight(1)
        self.fits = fits
        self.others = others
        self.queue = []
        self.sizes = Counter()
        self.left_at = {}
        self.most_in_flight = 0
        self._number = 0

    def arrive(self, count=1, at=0.0, prompt_tokens=10, priority=0):
        """Queue `count` sequences; the number of the last one."""
        for _ in range(count):
            self._number += 1
            self.queue.append(make_entry(self._number, prompt_tokens, at, priority))
        self.queue.sort(key=lambda entry: (-entry.priority, entry.number))
        return self._number

    @property
    def is_idle(self):
        return not self.others and not self.in_flight.count(0)

    def peek(self, now):
        return self.former.form(iter(self.queue), now, is_idle=self.is_idle, fits=self.fits)

    def step(self, now):
        """Send what may go at this moment; the batches that went."""
        formed = []
        while self.in_flight.count(0) < self.settings.max_in_flight_batches:
            batch = self.peek(now)
            if batch is None:
                break
            formed.append(batch)
            for entry in batch.entries:
                self.queue.remove(entry)
                self.left_at[entry.number] = now
            self.sizes[len(batch.entries)] += 1
            attempts = [make_attempt(entry.number, 0, entry.prompt_tokens) for entry in batch.entries]
            self.in_flight.open(0, attempts)
            self.in_flight.check()
            self.most_in_flight = max(self.most_in_flight, self.in_flight.count(0))
        return formed

    def finish_oldest(self):
        """Every member of the oldest batch leaves."""
        for attempt in list(self.in_flight.of_rank(0)[0].members):
            self.in_flight.leave(attempt)
            self.in_flight.check()


def numbers(formed):
    return [entry.number for entry in formed.entries]

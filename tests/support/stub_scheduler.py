"""Drives the stub's pure scheduler with its synthetic model, one step at a time, checking invariants."""

import itertools
from collections import defaultdict

from engine_stub.backend.synthetic import SyntheticBackend
from engine_stub.scheduler import Request, Scheduler, SchedulerConfig
from engine_stub.tokens import expected_tokens

VOCAB_SIZE = 1000


def request(request_id, prompt_len=4, max_tokens=8, **fields):
    prompt = [(7 * position + prompt_len) % VOCAB_SIZE for position in range(prompt_len)]
    return Request(id=request_id, prompt_ids=prompt, max_tokens=max_tokens, **fields)


def expected(req, count=None):
    return expected_tokens(req.prompt_ids, req.seed, req.max_tokens if count is None else count, VOCAB_SIZE)


class Driver:
    """A scheduler and what came out of it: tokens, finishes and row steps per id, and every plan."""

    def __init__(self, **settings):
        self.scheduler = Scheduler(SchedulerConfig(**settings))
        self.backend = SyntheticBackend(vocab_size=VOCAB_SIZE)
        self.tokens = defaultdict(list)
        self.finishes = defaultdict(list)
        self.row_steps = defaultdict(list)
        self.plans = []

    def submit(self, *requests):
        return [self.scheduler.submit(req) for req in requests]

    def step(self, between=lambda: None):
        """One step, `between` called while the model runs; the plan or None."""
        scheduler = self.scheduler
        plan = scheduler.plan()
        scheduler.check()
        if plan is None:
            return None
        output = self.backend.forward(plan)
        between()
        scheduler.check()
        rows = scheduler.commit(plan, output)
        scheduler.check()
        self.plans.append(plan)
        for sequence, tokens, finish in zip(rows.sequences, rows.tokens, rows.finishes, strict=True):
            self.tokens[sequence.id] += tokens
            self.row_steps[sequence.id].append(len(self.plans))
            if finish:
                self.finishes[sequence.id].append(finish)
        return plan

    def run(self, limit=10_000):
        """Step until there is nothing to do; fails when that doesn't come."""
        for _ in range(limit):
            if self.step() is None:
                return self
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.live_ids}")

    def gaps(self, request_id):
        """Steps between consecutive rows."""
        steps = self.row_steps[request_id]
        return [after - before for before, after in itertools.pairwise(steps)]

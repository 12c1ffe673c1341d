"""One scripted load through the real scheduler: late arrivals, aborts, a retry of a step, prefix hits, sampling."""

from collections import defaultdict

from engine_stub.backend import registry
from engine_stub.scheduler import Request, Scheduler, SchedulerConfig
from engine_stub.scheduler.sequence import Sampling
from tests.support.models import config, prompt

NEW_TOKENS = 8
SHARED = prompt(40, 17)
ABORTED = {"3": 2, "6": 5}
"""Request -> number of tokens after which its client goes away."""


def requests():
    """Ragged prompts of 3 to 38 tokens; some share a prefix, some are sampled, some want logprobs."""
    sampled = Sampling(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, presence_penalty=0.2)
    made = [
        Request(
            id=str(number),
            prompt_ids=prompt(number, 3 + 5 * number),
            max_tokens=NEW_TOKENS,
            sampling=sampled if number % 3 == 1 else Sampling(temperature=0.0),
            seed=number,
            logprobs=2 if number == 4 else None,
        )
        for number in range(8)
    ]
    made += [
        Request(
            id=f"shared{number}",
            prompt_ids=[*SHARED, number],
            max_tokens=NEW_TOKENS,
            sampling=Sampling(temperature=0.0),
        )
        for number in range(3)
    ]
    return made


class Run:
    """What came out: tokens, logprobs and finishes by id, and what happened on the way."""

    def __init__(self, backend="numpy", kv_tokens=80, **scheduler):
        settings = SchedulerConfig(kv_tokens=kv_tokens, **scheduler)
        self.backend = registry.create(backend, config(settings))
        self.scheduler = Scheduler(settings)
        self.tokens = defaultdict(list)
        self.logprobs = {}
        self.finishes = {}
        self.cached = {}
        self.prompts_of_steps = []

    def go(self):
        """The first half at once, the rest when 4 steps are done; every fifth step is computed twice."""
        todo = requests()
        for request in todo[::2]:
            self.scheduler.submit(request)
        while self.step() or self.scheduler.steps < 4:
            if self.scheduler.steps == 4:
                for request in todo[1::2]:
                    self.scheduler.submit(request)
        self.scheduler.check()
        return self

    def step(self):
        scheduler = self.scheduler
        plan = scheduler.plan()
        if plan is None:
            return False
        if scheduler.steps % 5 == 2:
            self.backend.forward(plan)
        rows = scheduler.commit(plan, self.backend.forward(plan))
        self.prompts_of_steps.append(len(plan.prefills))
        for sequence, tokens, finish in zip(rows.sequences, rows.tokens, rows.finishes, strict=True):
            self.tokens[sequence.id] += tokens
            self.cached[sequence.id] = sequence.cached_tokens
            if sequence.logprobs is not None:
                self.logprobs[sequence.id] = sequence.logprobs
            if finish:
                self.finishes[sequence.id] = finish
        for request_id, count in ABORTED.items():
            if len(self.tokens[request_id]) >= count:
                scheduler.abort(request_id)
        return True

    def outcome(self):
        """What must not depend on the schedule; of aborted texts the part that every schedule delivers."""
        tokens = {key: tokens[: ABORTED.get(key)] for key, tokens in sorted(self.tokens.items())}
        return tokens, self.logprobs

"""What the clients ask for: requests that follow from a seed and a name alone."""

import random

import msgspec

from gateway.v1 import gateway_pb2
from tests.support.deployment import MAX_CONTEXT_TOKENS, VOCAB_SIZE

EXACT_DEADLINES_S = (0.03, 0.08, 0.2)


class Job(msgspec.Struct, kw_only=True):
    """One request and what its client does with it."""

    request: gateway_pb2.GenerateRequest
    deadline_s: float | None = None
    """The call's own; None: the gateway's default."""
    give_up_after: int | None = None
    """Messages after which the client cancels; 0: at once."""
    aborts: bool = False
    """It gives up with the Abort call, or the instruction of its stream, and not by cancelling."""
    is_valid: bool = True
    reads_slowly_s: float = 0.0
    """Pause after the first message."""


class Traffic:
    """An endless row of jobs. `name` must be unique in a run: the requests' ids begin with it."""

    def __init__(self, seed: int, name: str, *, ranks: int, most_logprobs: int) -> None:
        self._most_logprobs = most_logprobs
        self._source = random.Random(f"traffic-{seed}-{name}")
        self._name = name
        self._ranks = ranks
        self._count = 0

    def next(self) -> Job:
        """Draw a job. Most are short and greedy; one in six or so has something special about it."""
        source = self._source
        self._count += 1
        max_tokens = source.randint(40, 150) if source.random() < 0.04 else source.randint(1, 16)
        sampling = gateway_pb2.Sampling(max_tokens=max_tokens, temperature=0.0)
        prompt_length = source.randint(200, 900) if source.random() < 0.02 else source.randint(1, 40)
        request = gateway_pb2.GenerateRequest(
            request_id=f"{self._name}-{self._count}",
            prompt_token_ids=source.choices(range(VOCAB_SIZE), k=prompt_length),
            sampling=sampling,
            priority=source.randint(-2, 2),
        )
        job = Job(request=request)
        self._vary(job, source)
        return job

    def _vary(self, job: Job, source: random.Random) -> None:
        request, sampling, luck = job.request, job.request.sampling, source.random()
        if luck < 0.04:
            sampling.temperature = 0.8
            if source.random() < 0.5:
                sampling.seed = source.randrange(1, 1000)
        elif luck < 0.06:
            sampling.n = source.randint(2, 4)
        elif luck < 0.08:
            request.data_parallel_rank = source.randrange(self._ranks)
        elif luck < 0.09:
            request.allow_resume = False
        elif luck < 0.10:
            sampling.logprobs = source.randint(0, self._most_logprobs)
        elif luck < 0.12:
            job.deadline_s = source.choice(EXACT_DEADLINES_S)
        elif luck < 0.14:
            job.deadline_s = 10.0
        elif luck < 0.17:
            job.give_up_after = source.randint(0, 3)
            job.aborts = source.random() < 0.5
        elif luck < 0.18:
            job.is_valid = False
            _spoil(request, source)


def _spoil(request: gateway_pb2.GenerateRequest, source: random.Random) -> None:
    """Make it one that has to be refused."""
    match source.randrange(4):
        case 0:
            request.prompt_token_ids.append(VOCAB_SIZE)
        case 1:
            request.sampling.top_p = 2.0
        case 2:
            request.data_parallel_rank = 999
        case _:
            request.sampling.max_tokens = MAX_CONTEXT_TOKENS


def slow_job(name: str) -> Job:
    """More output than the gateway keeps for a reader that pauses."""
    sampling = gateway_pb2.Sampling(max_tokens=600, temperature=0.0, n=8)
    return Job(request=gateway_pb2.GenerateRequest(request_id=name, prompt_token_ids=[7, 8, 9], sampling=sampling))

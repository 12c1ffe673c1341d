"""Random schedules over a whole router: arrivals, ranks of different speed, ends of every kind, and a log of what left."""

import random
from typing import Any

from gateway.core.effects import AbortOnRank, Dispatch, Effect, RequestAccepted
from gateway.core.errors import Reason
from gateway.core.events import Event
from gateway.core.request import Request
from gateway.types import Sampling
from tests.support.core import Bench

STEP_S = 0.01
RANKS = 3
DOMAINS = ("gateway", "tenant", "session", "stream")
_GREEDY = Sampling(max_tokens=8, temperature=0.0)
_MAX_STEPS = 5000


def draw_settings(rng: random.Random, ordering: str) -> dict[str, Any]:
    """Settings of a deployment: any mode, any domain, with or without stored and shared answers."""
    mode = rng.choice(["direct", "queue", "batch"])
    scheduling: dict[str, Any] = {"mode": mode}
    if mode != "direct":
        scheduling["queue"] = {
            "order": "fcfs",
            "fair": rng.random() < 0.5,
            "max_in_flight_per_rank": rng.choice([1, 2, 4]),
            "gate_tokens": rng.choice([1, 2048]),
            "timeout_s": rng.choice([None, 0.3]),
        }
    if mode == "batch":
        scheduling["batch"] = {
            "max_requests": 3,
            "window_ms": rng.choice([0, 20]),
            "release_at": rng.choice(["first_token", "finish"]),
        }
    settings: dict[str, Any] = {"scheduling": scheduling, "limits": {"default_deadline_s": 5}, "ordering": ordering}
    if ordering == "preserve":
        settings["preserve"] = {"domain": rng.choice(DOMAINS)}
    if rng.random() < 0.7:
        settings["response_cache"] = {"coalesce": rng.random() < 0.5, "ttl_s": 0.5}
    return settings


class Play(Bench):
    """One router that plays schedules, each until everything has ended.

    The log has (domain, request number, tokens), with None in place of tokens for an end. Ranks number the tokens of an
    attempt 0, 1, 2 ...
    """

    def __init__(self, seed: int, ordering: str = "preserve") -> None:
        self.rng = random.Random(seed)
        self.engine: list[dict[str, int]] = [{} for _ in range(RANKS)]
        self._start()
        super().__init__(RANKS, **draw_settings(self.rng, ordering))
        self.speeds = [self.rng.choice([1, 1, 2, 5]) for _ in range(RANKS)]

    def _start(self) -> None:
        self.log: list[tuple[str, int, tuple[int, ...] | None]] = []
        self.accepted: dict[int, Request] = {}
        self.given_up: dict[int, int] = {}
        self.lengths: dict[str, int] = {}

    def send(self, event: Event) -> list[Effect]:
        """Without a check after each event, which costs more than the event itself."""
        effects = self.router.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Dispatch):
                self.engine[effect.rank][effect.request.wire_id] = 0
            elif isinstance(effect, AbortOnRank):
                for wire_id in effect.wire_ids:
                    self.engine[effect.rank].pop(wire_id, None)
            elif isinstance(effect, RequestAccepted):
                self.accepted[effect.request.handle] = effect.request
        return effects

    def run(self, requests: int) -> list[str]:
        """Play one schedule; what of the order it broke."""
        self._start()
        left, steps = requests, 0
        while left or self.router.live_count:
            steps += 1
            assert steps < _MAX_STEPS, "requests that never end"
            for _ in range(min(left, self.rng.choice([0, 0, 1, 4]))):
                left -= 1
                self._arrive()
            for rank in range(RANKS):
                if steps % self.speeds[rank] == 0:
                    self._step(rank)
            self._disturb()
            self.tick(STEP_S)
            if self.rng.random() < 0.7:
                self._deliver()
        self._deliver()
        self.assert_quiet()
        return self.violations()

    # ---- what happens --------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self.rng
        prompt = rng.randrange(4)
        self.send(
            self.arrived(
                [prompt] * 5,
                sampling=_GREEDY if prompt < 2 else Sampling(max_tokens=8),
                n=rng.choice([1, 1, 1, 2]),
                tenant=rng.choice(["", "a"]),
                session_id=rng.choice(["", "s"]),
                client_key=rng.choice(["c", "d"]),
                deadline_at=self.now + rng.choice([0.1, 5.0, 5.0, 5.0]),
            )
        )

    def _step(self, rank: int) -> None:
        rng, mine = self.rng, self.engine[rank]
        rows = []
        for wire_id, done in list(mine.items()):
            length = self.lengths.setdefault(wire_id, rng.choice([0, 1, 2, 3, 6]))
            count = min(length - done, rng.choice([0, 1, 2]))
            mine[wire_id] = done + count
            finish = ""
            if mine[wire_id] == length:
                finish = rng.choice(["stop", "stop", "stop", "abort"])
                del mine[wire_id]
            rows.append((wire_id, range(done, done + count), finish))
        rng.shuffle(rows)
        if rows:
            self.batch(rank, rows)

    def _disturb(self) -> None:
        rng = self.rng
        if rng.random() < 0.1 and self.accepted:
            self._deliver()
            request = self.accepted[rng.choice(list(self.accepted))]
            if not request.is_ended:
                self.given_up[request.handle] = len(self.log)
                self.cancel(request, Reason.CANCELLED)
        if rng.random() < 0.02:
            rank = rng.randrange(RANKS)
            self.engine[rank].clear()
            self.lose(rank)
            self.join(rank)

    def _deliver(self) -> None:
        self.log += [(self._domain_of(request), request.handle, tokens) for request, tokens in self.flush()]

    def _domain_of(self, request: Request) -> str:
        arrived = request.arrived
        match self.config.preserve.domain:
            case "tenant":
                return arrived.tenant
            case "session":
                # Without a session there is no order: each is alone.
                return arrived.session_id or f"alone {request.handle}"
            case "stream":
                return arrived.client_key
            case _:
                return ""

    # ---- what must hold --------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """What the log shows of requests out of order, interleaved, cut off, doubled or without an end."""
        found = []
        last: dict[str, int] = {}
        ended: set[int] = set()
        counts: dict[int, int] = {}
        for at, (domain, number, tokens) in enumerate(self.log):
            is_given_up = at >= self.given_up.get(number, at + 1)
            if is_given_up and tokens is not None:
                found.append(f"{number} goes on after its caller left")
            if number in ended:
                found.append(f"{number} goes on after its end")
            if not is_given_up:
                if number < last.get(domain, 0):
                    found.append(f"{number} follows {last[domain]}")
                last[domain] = number
            if tokens is None:
                ended.add(number)
            counts[number] = counts.get(number, 0) + len(tokens or ())
        for number, request in self.accepted.items():
            generated = sum(sequence.completion_tokens for sequence in request.sequences)
            if number not in ended:
                found.append(f"{number} never ends")
            if number not in self.given_up and counts.get(number, 0) != generated:
                found.append(f"{number} lost {generated - counts.get(number, 0)} tokens")
        return found

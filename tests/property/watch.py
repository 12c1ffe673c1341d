"""What must hold after every step, whatever the settings: found from outside as far as that is possible."""

from gateway.core.effects import (
    AbortOnRank,
    Dispatch,
    RankStateChanged,
    RequestAccepted,
    RequestEnded,
    RequestRefused,
)
from gateway.core.errors import Reason
from gateway.core.events import (
    Event,
    RankDrained,
    RankJoined,
    RankRenewed,
    RankUndrained,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from gateway.core.lifecycle import Evidence, Phase
from gateway.core.ranks import RankState
from gateway.core.registry import MAX_TOMBSTONES
from gateway.core.request import Attempt, Request
from tests.property.capacity import Capacity
from tests.property.deployments import MIN_QUEUE_TIMEOUT_S
from tests.support.core import NONCE, Bench

_DROPPED = (Reason.CANCELLED, Reason.ABORTED, Reason.INTERNAL)
_MEANS_ABORT = (Evidence.CALLER, Evidence.DEADLINE, Evidence.GATEWAY)
_NOT_OF_THE_LINK = (RequestArrived, RequestCancelled, Tick)
_OF_TIME = (Reason.DEADLINE_EXCEEDED, Reason.MAX_AGE_EXCEEDED)
_OF_NEWCOMERS = (Reason.QUEUE_TIMEOUT, Reason.NO_ELIGIBLE_RANK, Reason.PROMPT_TOO_LONG, Reason.KV_TOO_SMALL)
_MAY_BE_SENT = (RankState.READY, RankState.SUSPECT, RankState.EJECTED)


class Watch:
    """A bench with a model of its ranks (`engine`: wire ids and tokens sent so far) and of its clients.

    The ranks number the tokens of each attempt 0, 1, 2 ..., so that a client can see what was lost, doubled or mixed up.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.router = bench.router
        self.capacity = Capacity(bench)
        size = self.router.ranks.size
        self.engine: list[dict[str, int]] = [{} for _ in range(size)]
        self.ghosts: list[dict[str, int]] = [{} for _ in range(size)]
        self.base: dict[str, int] = {}
        """Tokens that the sequence of an attempt had before it."""
        self.limit: dict[str, int] = {}
        """Tokens that an attempt was asked for."""
        self.states = list(self.router.ranks.state)
        self.accepted: dict[int, Request] = {}
        self.drained: set[int] = set()
        """Ranks that an operator has drained, and that neither was undrained nor is another process by now."""
        self.offered = 0
        self.is_lazy = False
        self.is_broken = False
        """A step failed: what follows would only hide why."""
        self.no_rank_since: float | None = None
        self._refused = 0
        self._given_up: set[int] = set()
        self._ended: set[int] = set()
        self._attempts: dict[str, Attempt] = {}
        self._dispatched: set[str] = set()
        self._aborted: set[str] = set()
        self._finals: set[str] = set()
        self._unsent: set[str] = set()
        self._out: set[int] = set()
        self._got: dict[tuple[int, int], int] = {}
        self._lines: dict[str, list[int]] = {}
        self._watch_charges()

    def _watch_charges(self) -> None:
        attempts = self.router._attempts
        charge = attempts.charge

        def watched(sequence, decision, now):
            self.capacity.check_choice(sequence, decision)
            attempt = charge(sequence, decision, now)
            self._attempts[attempt.wire_id] = attempt
            return attempt

        attempts.charge = watched

    # ---- steps -------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Let the router have an event, do what it wants done, and check."""
        self.offered += isinstance(event, RequestArrived)
        if not isinstance(event, _NOT_OF_THE_LINK):
            self._renew()
        if isinstance(event, RequestCancelled):
            self._note_given_up(event)
        elif isinstance(event, RankDrained):
            self.drained.add(event.rank)
        elif isinstance(event, RankUndrained) or (isinstance(event, RankJoined) and not event.reattached):
            self.drained.discard(event.rank)
        self.is_broken, was_broken = True, self.is_broken
        live = self.router.live_count
        self._follow(self.bench.send(event))
        if isinstance(event, RequestCancelled) and event.handle in self._given_up:
            assert self.accepted[event.handle].is_ended, "nobody waits for its turn"
        if isinstance(event, Tick):
            assert len(self.router._registry._deadlines) <= 2 * live + 64, "deadlines of the dead are remembered"
            self._check_nothing_waits_too_long()
        self.is_broken = was_broken

    def drain(self, rank: int, *, migrate: bool) -> None:
        """An operator drains a rank: what it has may move, and comes to no harm."""
        attempts = self.router._attempts.ledger.of_rank(rank)
        # One that waits for this very rank with another sequence ends as a whole.
        attempts = [attempt for attempt in attempts if not _waits_for(attempt.sequence.request, rank)]
        self.send(RankDrained(rank, migrate=migrate))
        for attempt in attempts:
            error, sequence = attempt.sequence.request.error, attempt.sequence
            assert error is None or error.reason in _OF_TIME, "a stream ended for a drain"
            assert error is not None or sequence.attempt is not None
            assert error is not None or not sequence.attempt.released, "it neither moved nor stayed"
            assert migrate or error is not None or sequence.attempt is attempt

    def batch(self, rank: int, rows: list, load=None, **more) -> None:
        """A batch of the rank; `rows` as the bench takes them."""
        self._renew()
        self._finals.update(row[0] for row in rows if row[2])
        self.is_broken, was_broken = True, self.is_broken
        self._follow(self.bench.batch(rank, rows, load, **more))
        self.is_broken = was_broken

    def _renew(self) -> None:
        """The link's word on incarnations that were given up comes before whatever else it says."""
        renewals, self.bench.renewals = self.bench.renewals, []
        for effect in renewals:
            self._follow(self.bench.send(RankRenewed(effect.rank, effect.incarnation + 1)))

    def _note_given_up(self, event: RequestCancelled) -> None:
        request = self.accepted[event.handle]
        if not request.is_ended and (request.is_settled or event.reason in _DROPPED):
            self._given_up.add(event.handle)

    def unsent(self, wire_id: str) -> None:
        """The link could not send it."""
        self._unsent.add(wire_id)

    def _follow(self, effects: list) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                self._on_dispatch(effect)
            elif isinstance(effect, RankStateChanged):
                assert self.states[effect.rank] == effect.old
                self.states[effect.rank] = RankState(effect.new)
                if effect.new == RankState.READY:
                    self.no_rank_since = None
            elif isinstance(effect, AbortOnRank):
                self._aborted.update(effect.wire_ids)
                for wire_id in effect.wire_ids:
                    tokens = self.engine[effect.rank].pop(wire_id, None)
                    if tokens is not None:
                        self.ghosts[effect.rank][wire_id] = tokens
            elif isinstance(effect, RequestAccepted):
                request = effect.request
                self.accepted[request.handle] = request
                domain = self._domain(request.arrived)
                if domain is not None:
                    self._lines.setdefault(domain, []).append(request.handle)
            elif isinstance(effect, RequestRefused):
                self._refused += 1
                assert effects[0] is effect, "the one who asked looks at the first effect"
            elif isinstance(effect, RequestEnded):
                self._on_ended(effect.request)
        self._check()

    def _on_dispatch(self, effect: Dispatch) -> None:
        wire_id, ranks = effect.request.wire_id, self.router.ranks
        assert wire_id.startswith(NONCE)
        handle = int(wire_id.split("-")[1], 16)
        assert handle not in self._ended, "sent after its end"
        assert self.states[effect.rank] is RankState.READY, "to a rank that takes nothing new"
        assert ranks.incarnation[effect.rank] == effect.incarnation
        assert wire_id not in self._dispatched
        self._dispatched.add(wire_id)
        self.engine[effect.rank][wire_id] = 0
        arrived, sent = self._attempts[wire_id].sequence.request.arrived, effect.request
        self.base[wire_id] = len(sent.prompt_token_ids) - len(arrived.prompt_token_ids)
        self.limit[wire_id] = sent.sampling.max_tokens
        assert sent.sampling.max_tokens == arrived.sampling.max_tokens - self.base[wire_id] > 0, (
            "nothing left to ask for"
        )

    def _on_ended(self, request: Request) -> None:
        assert request.handle in self.accepted
        assert request.handle not in self._ended, "ended twice"
        self._ended.add(request.handle)
        if request.error is not None:
            self._check_reason(request)
        elif request.is_cached:
            answer = _answer(request)
            given = (other for other in self.accepted.values() if other.is_settled and not other.is_cached)
            assert any(_answer(other) == answer for other in given), "an answer that no rank gave"

    def _check_reason(self, request: Request) -> None:
        """Nothing ends before its time for a reason that time or the ranks have to give."""
        arrived, now = request.arrived, self.bench.now
        if arrived.n == 1 and request.sequences[0].attempts:
            assert request.error.reason not in _OF_NEWCOMERS, "it had a rank, and lost that"
            assert request.error.facts.get("delivered_tokens", 0) <= request.sequences[0].completion_tokens
        match request.error.reason:
            case Reason.DEADLINE_EXCEEDED:
                assert arrived.deadline_at is not None
                assert arrived.deadline_at <= now
            case Reason.MAX_AGE_EXCEEDED:
                assert request.accepted_at + self.bench.config.limits.max_request_age_s <= now
            case Reason.NO_ELIGIBLE_RANK:
                # With a place, it may have been settled earlier.
                assert request.place is not None or not self._has_way(arrived)
                scheduling = self.bench.config.scheduling
                is_queued = scheduling.mode != "direct"
                assert not is_queued or now - request.accepted_at >= scheduling.queue.no_rank_wait_s
            case Reason.QUEUE_TIMEOUT:
                assert now - request.accepted_at >= MIN_QUEUE_TIMEOUT_S

    def _has_way(self, arrived: RequestArrived) -> bool:
        """Whether a READY rank could ever take it."""
        asks = len(arrived.prompt_token_ids), arrived.sampling.max_tokens
        ready = (rank for rank, state in enumerate(self.states) if state is RankState.READY)
        return any(arrived.pinned_rank in (None, rank) and self.capacity.could_ever(rank, *asks) for rank in ready)

    # ---- what clients get ----------------------------------------------------------------------

    def flush(self) -> None:
        """The driver's turn: pass on what is to leave, and look at it as the clients do."""
        for request, tokens in self.bench.flush():
            handle = request.handle
            assert handle not in self._out, "something after the end"
            line = self._lines.get(self._domain(request.arrived) or "", [])
            is_dropped = handle in self._given_up
            if self._domain(request.arrived) is not None and not (tokens is None and is_dropped):
                assert line[0] == handle, "out of order"
            if tokens is None:
                self._out.add(handle)
                assert handle in self._ended
                assert is_dropped or all(not sequence.backlog_bytes for sequence in request.sequences)
                if handle in line:
                    line.remove(handle)
            elif tokens:
                self._take(request, tokens)
        self._check_nothing_is_kept()

    def _take(self, request: Request, tokens: tuple[int, ...]) -> None:
        for sequence in request.sequences:
            key = (request.handle, sequence.index)
            start = self._got.get(key, 0)
            if start + len(tokens) == sequence.completion_tokens and tokens[0] == start:
                assert tokens == tuple(range(start, start + len(tokens))), "tokens lost or mixed up"
                self._got[key] = start + len(tokens)
                return
        raise AssertionError("tokens that no sequence of the request has generated")

    def _check_nothing_is_kept(self) -> None:
        """Whoever's turn it is has got everything, and every end has left."""
        assert self._out == self._ended
        for request in self.router._registry:
            domain = self._domain(request.arrived)
            if domain is None or self._lines[domain][0] == request.handle:
                assert not any(sequence.backlog_bytes for sequence in request.sequences)
                assert not request.is_settled

    def _domain(self, arrived: RequestArrived) -> str | None:
        if self.router.ordering is None:
            return None
        domains = {
            "gateway": "",
            "tenant": arrived.tenant,
            "session": arrived.session_id or None,
            "stream": arrived.client_key,
        }
        return domains[self.bench.config.preserve.domain]

    # ---- what holds after every step -------------------------------------------------------------

    def _check(self) -> None:
        router, counters, config = self.router, self.router.counters, self.bench.config
        assert counters.accepted + sum(counters.refused.values()) == self.offered
        assert sum(counters.refused.values()) == self._refused
        assert len(self._ended) == sum(counters.ended.values()) == counters.accepted - router.live_count
        if RankState.READY in router.ranks.state:
            self.no_rank_since = None
        elif self.no_rank_since is None:
            self.no_rank_since = self.bench.now
        self._check_evidence()
        self._check_health(config)
        assert not any(self.states[rank] in _MAY_BE_SENT for rank in self.drained), "drained is drained"
        self._check_bounds(config)
        self.capacity.check_gates()
        self.capacity.check_work()
        due_at = router.next_due()
        assert due_at is None or due_at > self.bench.now, "a moment that has passed is no moment to wait for"
        if not self.is_lazy:
            self.flush()

    def _check_evidence(self) -> None:
        """Every release cites what it rests on, and that did happen."""
        ranks = self.router.ranks
        for wire_id, attempt in list(self._attempts.items()):
            if not attempt.released:
                continue
            del self._attempts[wire_id]
            assert attempt.evidence is not None
            kind, incarnation, batches = attempt.evidence
            assert incarnation == attempt.incarnation
            assert 0 <= batches <= self.router.counters.batches[attempt.rank]
            was_sent = wire_id in self._dispatched and wire_id not in self._unsent
            is_gone = ranks.incarnation[attempt.rank] != incarnation or ranks.state[attempt.rank] is RankState.LOST
            assert (kind is Evidence.UNSENT) is not was_sent
            # A rank that is lost may live all the same, and is told then.
            if kind is not Evidence.RANK_LOST:
                assert (kind in _MEANS_ABORT) is (was_sent and wire_id in self._aborted)
            assert kind is not Evidence.ENGINE or wire_id in self._finals
            assert kind is not Evidence.RANK_LOST or is_gone

    def _check_health(self, config) -> None:
        """Enough ranks stay, and nobody is suspected or ejected for nothing."""
        ranks, eject = self.router.ranks, config.failure.eject
        assert self.states == ranks.state
        for number in range(len(config.groups)):
            states = [state for state, group in zip(ranks.state, ranks.group_of, strict=True) if group == number]
            ejected = states.count(RankState.EJECTED)
            assert ejected <= (eject.max_ratio * len(states) if eject is not None else 0)
            assert not ejected or RankState.READY in states, "those that could serve are left out"
        assert RankState.SUSPECT not in ranks.state or config.failure.silence is not None

    def _check_bounds(self, config) -> None:
        router, admission = self.router, self.router._admission
        limits = config.admission
        assert admission.sequences <= limits.max_in_flight
        assert admission.prompt_tokens <= (limits.max_prompt_tokens or 10**9)
        assert admission.kv_tokens <= (limits.max_kv_tokens or 10**9)
        assert len(admission.tenants._tracked) <= limits.tenants.max_tracked
        assert admission.tenants._lasting["a"].in_flight <= 6
        registry, answers = router._registry, router._answers
        assert len(registry._tombstones) <= min(MAX_TOMBSTONES, len(self._ended))
        following = [request for line in answers._followers.values() for request in line]
        assert all(registry.get(request.handle) is request for request in following), "those that left are remembered"
        if config.scheduling.mode == "batch":
            assert max(router.counters.batch_sizes, default=0) <= config.scheduling.batch.max_requests

    def _check_nothing_waits_too_long(self) -> None:
        """After a tick: nothing is left whose deadline, age, time in the queue or wait for any rank is over."""
        now, limits = self.bench.now, self.bench.config.limits
        queue = self.bench.config.scheduling.queue
        levels = {level.priority: level for level in queue.levels}
        for request in self.router._registry:
            if request.is_settled:
                continue
            arrived = request.arrived
            assert arrived.deadline_at is None or arrived.deadline_at > now
            assert request.accepted_at + limits.max_request_age_s > now
            level = levels.get(arrived.priority)
            timeouts = [level.timeout_s if level else None, queue.timeout_s]
            action = (level.timeout_action if level else None) or queue.timeout_action
            wait_s = next((s for s in timeouts if s is not None), None) if action != "delay" else None
            if arrived.queue_timeout_s is not None:
                wait_s = min(wait_s or arrived.queue_timeout_s, arrived.queue_timeout_s)
            for sequence in request.sequences:
                entry = sequence.entry
                if entry is None:
                    continue
                if wait_s is not None:
                    # It begins anew for what its rank has lost.
                    assert now < entry.expires_at <= now + wait_s
                since = self.no_rank_since
                if since is not None:
                    assert now - max(since, entry.queued_at) < queue.no_rank_wait_s
            leader = self.router._answers.leader_of(request.cache_key)
            if request.phase is Phase.ACCEPTED and leader is not None and leader.phase is Phase.QUEUED:
                # It has its own time, although another one stands in the queue for it.
                if wait_s is not None:
                    assert request.accepted_at + wait_s > now
                if self.no_rank_since is not None:
                    assert now - max(self.no_rank_since, request.accepted_at) < queue.no_rank_wait_s


def _waits_for(request: Request, rank: int) -> bool:
    return request.arrived.pinned_rank == rank and any(sequence.entry for sequence in request.sequences)


def _answer(request: Request) -> tuple[object, ...]:
    """What was asked and what came of it; tokens are numbers, so their count is what they are."""
    arrived = request.arrived
    generated = [(sequence.completion_tokens, sequence.finish) for sequence in request.sequences]
    return (tuple(arrived.prompt_token_ids), arrived.n, arrived.tenant, *generated)

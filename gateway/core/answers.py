"""When output leaves: preserved order, stored answers, and requests that share one answer.

Every path of a request (stored answer, direct, queued, batched) takes its place here once, when it is accepted, and
leaves it here once, when its outcome is known. `dirty` is what the edge has to send, in the order in which it must
leave: sequences with output, and requests whose end follows what was sent of them.
"""

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.ordering import Ordering, worst_case_bytes
from gateway.core.request import Record, Request, Sequence
from gateway.core.response_cache import CachedAnswer, ResponseCache, build, key_of


class Answers:
    """Order, cache and outlet of one gateway."""

    def __init__(self, config: Config) -> None:
        self._domain = config.preserve.domain
        self._model_name = config.model.name
        cache = config.response_cache
        self._record_bytes = 0 if cache is None else cache.max_entry_bytes
        self._may_share = cache is not None and cache.coalesce
        self.ordering = Ordering(config.preserve) if config.ordering == "preserve" else None
        self.cache = ResponseCache(cache) if cache is not None else None
        # Neither order nor cache: answers leave as they come, and nothing here remembers any.
        self.is_plain = self.ordering is None and self.cache is None
        self.dirty: list[Sequence | Request] = []
        # Without an order, what the intake touches may leave as it comes.
        self.touched: list[Sequence | Request] = self.dirty if self.ordering is None else []
        # Part of every key: what was asked for before a flush is not stored for those who ask after it.
        self._epoch = bytes(8)
        self._leaders: dict[bytes, Request] = {}
        self._followers: dict[bytes, dict[Request, None]] = {}

    # ---- before acceptance: nothing is changed -------------------------------------------------

    def key_of(self, arrived: RequestArrived) -> bytes | None:
        """What the answer would be stored under; None if it may not be stored."""
        key = key_of(arrived, self._model_name) if self.cache is not None else None
        return None if key is None else key + self._epoch

    def stored(self, key: bytes | None, now: float) -> CachedAnswer | None:
        """The stored answer, if there is one."""
        return self.cache.get(key, now) if self.cache is not None and key is not None else None

    def used(self, key: bytes) -> None:
        """The stored answer is given to a request."""
        if self.cache is not None:
            self.cache.used(key)

    def leader_of(self, key: bytes | None) -> Request | None:
        """The live request whose answer this one can share."""
        return self._leaders.get(key) if key is not None and self._may_share else None

    def check_place(self, arrived: RequestArrived, answer: CachedAnswer | None, retry_after_s: float) -> None:
        """Raise `ORDER_FULL` when the request could not be given a place."""
        domain = self._domain_of(arrived)
        if self.ordering is None or domain is None:
            return
        worst = worst_case_bytes(arrived) if answer is None else answer.nbytes
        full = self.ordering.refusal(domain, worst)
        if full is not None:
            # A head is let in whatever its size, but nobody can count on being one.
            is_transient = full == "places" or worst <= self.ordering.max_held_bytes
            raise GatewayError(
                Reason.ORDER_FULL,
                f"too much output waits for its turn in the preserved order ({full}); retry later"
                if is_transient
                else f"up to {worst} bytes would have to wait for their turn in the preserved order, more than"
                f" {self.ordering.max_held_bytes}: ask for fewer tokens",
                retryable=is_transient,
                retry_after_s=retry_after_s if is_transient else None,
                bound=full,
                places=self.ordering.places,
                held_bytes=self.ordering.held_bytes,
            )

    # ---- acceptance ------------------------------------------------------------------------------

    def accepted(self, request: Request, key: bytes | None, answer: CachedAnswer | None) -> None:
        """Give the request its place; with `answer`, put all output into its outboxes."""
        domain = self._domain_of(request.arrived)
        if self.ordering is not None and domain is not None:
            worst = worst_case_bytes(request.arrived) if answer is None else answer.nbytes
            request.place = self.ordering.reserve(request, domain, worst)
        if answer is not None:
            self._fill(request, answer)
            return
        request.cache_key = key
        if key is None:
            return
        for sequence in request.sequences:
            sequence.record = Record(cache_bytes=self._record_bytes)
        if not self.follow(request):
            self.lead(request)

    def follow(self, request: Request) -> bool:
        """Let the request wait for the answer of a live one that asks for the same. False when there is none."""
        key = request.cache_key
        if key is None or self.leader_of(key) is None:
            return False
        self._followers.setdefault(key, {})[request] = None
        return True

    def lead(self, request: Request) -> None:
        """Let later requests that ask for the same wait for this one."""
        if request.cache_key is not None and self._may_share:
            self._leaders[request.cache_key] = request

    # ---- output ----------------------------------------------------------------------------------

    def let_out(self) -> None:
        """Pass on what the intake touched, as far as it is its turn."""
        ordering = self.ordering
        if ordering is None or not self.touched:
            return
        for sequence in self.touched:
            assert isinstance(sequence, Sequence)
            if sequence.request.place is None or ordering.may_flush(sequence):
                self.dirty.append(sequence)
        self.touched.clear()

    def complete(self, sequence: Sequence) -> None:
        """A sequence has ended without a row that says so: its end is to be sent."""
        if not sequence.is_dirty:
            sequence.is_dirty = True
            self.touched.append(sequence)
        self.let_out()

    def take_dirty(self) -> list[Sequence | Request]:
        """What is to be sent, in order."""
        dirty = self.dirty[:]
        self.dirty.clear()
        return dirty

    def flush_cache(self) -> None:
        """Forget every stored answer, and those of requests that are live."""
        if self.cache is not None:
            self._epoch = (self.cache.flushes + 1).to_bytes(8)
            self.cache.flush()

    # ---- the outcome is known --------------------------------------------------------------------

    def store(self, request: Request, now: float) -> None:
        """Keep a complete answer for later requests."""
        if (
            self.cache is None
            or request.cache_key is None
            or request.is_cached
            or not request.cache_key.endswith(self._epoch)
            or request.error is not None
        ):
            return
        answer = build(request)
        if answer is not None:
            self.cache.put(request.cache_key, answer, now)
        elif any(sequence.record is None or not sequence.record.is_answer for sequence in request.sequences):
            self.cache.too_large += 1

    def followers(self, request: Request) -> list[Request]:
        """Those that waited for this request's answer and are on their own now; it waits for nobody's any more."""
        key = request.cache_key
        if key is None:
            return []
        if self._leaders.get(key) is request:
            del self._leaders[key]
            return list(self._followers.pop(key, ()))
        waiting = self._followers.get(key)
        if waiting is not None and request in waiting:
            del waiting[request]
            if not waiting:
                del self._followers[key]
        return []

    def answer_as(self, request: Request, leader: Request) -> bool:
        """Give a follower what its leader got. False when the leader has no complete answer."""
        answer = build(leader) if leader.error is None else None
        if answer is None:
            return False
        self._fill(request, answer)
        return True

    def settled(self, request: Request, *, is_dropped: bool) -> list[Request]:
        """Let out what may leave now that this outcome is known; returns the requests that have ended with it.

        `is_dropped`: nobody waits for the answer any more, so it keeps no place and its output is thrown away.
        """
        place = request.place
        if place is None:
            self.dirty.append(request)
            return [request]
        assert self.ordering is not None
        if is_dropped:
            items = self.ordering.cancel(place)
            self.dirty.append(request)
            ended = [request]
        else:
            items = self.ordering.settle(place, sum(sequence.backlog_bytes for sequence in request.sequences))
            ended = []
        for item in items:
            self.dirty.append(item)
            if isinstance(item, Request):
                ended.append(item)
            else:
                item.held_bytes = item.backlog_bytes
        return ended

    def check(self) -> None:
        """Assert the invariants; for tests."""
        if self.ordering is not None:
            self.ordering.check()
        if self.cache is not None:
            self.cache.check()
        assert all(not leader.is_settled for leader in self._leaders.values())
        assert self._followers.keys() <= self._leaders.keys()
        assert all(self._followers.values())
        assert not any(follower.is_settled for waiting in self._followers.values() for follower in waiting)

    def _domain_of(self, arrived: RequestArrived) -> str | None:
        match self._domain:
            case "gateway":
                return ""
            case "tenant":
                return arrived.tenant
            case "session":
                return arrived.session_id or None
            case "stream":
                return arrived.client_key

    def _fill(self, request: Request, answer: CachedAnswer) -> None:
        request.is_cached = True
        for sequence, cached in zip(request.sequences, answer.sequences, strict=True):
            sequence.record = None
            sequence.append(cached.token_ids, cached.logprobs)
            sequence.cached_tokens = cached.cached_tokens
            sequence.finish = cached.finish
            sequence.is_dirty = True
            self.touched.append(sequence)
        self.let_out()

"""What holds for every queue, every bound and every moment."""

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.config.scheduling import Batch
from gateway.core.batcher import BatchFormer, BatchReason
from tests.support.batching import FixedPredictor, Rig, make_entry, numbers

NOW = 10.0
any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def maybe(strategy):
    return st.none() | strategy


settings_of_any_kind = st.builds(
    Batch,
    max_requests=st.integers(1, 7),
    max_tokens=maybe(st.integers(1, 80)),
    max_padded_tokens=maybe(st.integers(1, 100)),
    max_predicted_ms=maybe(st.integers(1, 80)),
    window_ms=st.sampled_from([0, 10, 50]),
    preferred_sizes=st.lists(st.integers(1, 9), max_size=3).map(tuple),
)
prompts_and_ages_ms = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 99)), max_size=12)


class Case:
    """A queue, a rank that takes `room` tokens and no entry of `refused`, and what `form` made of them."""

    def __init__(self, batch_settings, queued, refused, room, fixed_us, *, is_idle):
        self.settings = batch_settings
        self.predictor = FixedPredictor(1000, fixed_us)
        self.entries = [make_entry(i, prompt, NOW - age / 1000) for i, (prompt, age) in enumerate(queued)]
        self.refused = refused
        self.room = room
        self.is_idle = is_idle
        self.read = 0
        self.former = BatchFormer(batch_settings, self.predictor)
        self.formed = self.former.form(self._reading(), NOW, is_idle=is_idle, fits=self.fits)

    def _reading(self):
        for entry in self.entries:
            self.read += 1
            yield entry

    def fits(self, entry, tokens):
        return entry.number not in self.refused and tokens + entry.prompt_tokens <= self.room

    def is_allowed(self, size):
        """Whether the first `size` entries may be one batch."""
        group = self.entries[:size]
        prompts = [entry.prompt_tokens for entry in group]
        cap_ms = self.settings.max_predicted_ms
        return size == 1 or (
            size <= self.settings.max_requests
            and sum(prompts) <= (self.settings.max_tokens or 10**9)
            and max(prompts) * size <= (self.settings.max_padded_tokens or 10**9)
            and (cap_ms is None or self.predictor.batch_us([(p, 0) for p in prompts]) <= cap_ms * 1000)
            and all(self.fits(entry, sum(prompts[:i])) for i, entry in enumerate(group) if i)
        )

    @property
    def longest(self):
        """The size of the longest prefix of which every prefix is allowed."""
        size = 0
        while size < len(self.entries) and self.is_allowed(size + 1):
            size += 1
        return size

    def is_late(self, size):
        oldest_at = min(entry.enqueued_at for entry in self.entries[:size])
        return self.settings.window_ms > 0 and oldest_at + self.settings.window_ms / 1000 <= NOW


cases = st.builds(
    Case,
    settings_of_any_kind,
    prompts_and_ages_ms,
    st.sets(st.integers(1, 11), max_size=2),
    st.integers(1, 200),
    st.sampled_from([0, 5000, 20_000]),
    is_idle=st.booleans(),
)


@any_speed
@given(cases)
def test_a_batch_is_a_prefix_and_within_all_bounds(case):
    if case.formed is None:
        return
    size = len(case.formed.entries)
    assert size >= 1
    assert case.formed.entries == case.entries[:size], "nobody is skipped"
    assert size <= case.settings.max_requests
    assert case.is_allowed(size)
    cap_ms = case.settings.max_predicted_ms
    assert size == 1 or cap_ms is None or case.formed.predicted_us <= cap_ms * 1000
    assert case.formed.predicted_us == case.predictor.batch_us([(e.prompt_tokens, 0) for e in case.formed.entries])


@any_speed
@given(cases)
def test_a_batch_is_as_large_as_it_can_be_unless_its_size_is_preferred(case):
    if case.formed is None:
        return
    size = len(case.formed.entries)
    if case.formed.reason is BatchReason.PREFERRED_SIZE:
        assert size in case.settings.preferred_sizes
        larger = [other for other in case.settings.preferred_sizes if size < other <= case.longest]
        assert not larger, "the largest preferred size that was there"
    else:
        assert size == case.longest


@any_speed
@given(cases)
def test_an_idle_rank_is_never_left_without_work(case):
    assert not (case.is_idle and case.entries and case.formed is None)


@any_speed
@given(cases)
def test_only_a_growing_batch_in_time_keeps_a_busy_rank_waiting(case):
    assume(case.entries)
    if case.formed is None:
        size = case.longest
        assert not case.is_idle
        assert case.settings.window_ms > 0
        assert not case.is_late(size)
        assert size == len(case.entries) < case.settings.max_requests, "somebody may still join"
        assert not any(preferred <= size for preferred in case.settings.preferred_sizes)


@any_speed
@given(cases)
def test_reasons_are_true(case):
    assume(case.formed is not None)
    size, reason = len(case.formed.entries), case.formed.reason
    assert (reason == "batch_full") == (size == case.settings.max_requests)
    if reason == "idle_rank":
        assert case.is_idle
    elif reason == "window":
        assert not case.is_idle
        assert case.is_late(size) or not case.settings.window_ms
    elif reason == "preferred_size":
        assert not case.is_late(size)
    elif reason == "closed":
        rest = case.entries[size]
        assert not case.fits(rest, sum(entry.prompt_tokens for entry in case.formed.entries))
    elif reason == "predicted_cap":
        assert case.settings.max_predicted_ms is not None
    elif reason == "token_cap":
        assert case.settings.max_tokens is not None or case.settings.max_padded_tokens is not None


@any_speed
@given(cases)
def test_no_more_is_read_than_one_beyond_the_longest_batch(case):
    assert case.read <= case.longest + 1
    assert case.read <= case.settings.max_requests


@any_speed
@given(cases)
def test_next_due_is_the_moment_from_which_a_busy_rank_is_served(case):
    assume(case.entries)

    def is_served(now):
        return case.former.form(case.entries, now, is_idle=False, fits=lambda entry, tokens: True) is not None

    due = case.former.next_due(case.entries, NOW)
    assert is_served(due)
    assert due == NOW or (due > NOW and not is_served(NOW) and not is_served(due - 0.0005))


gaps_ms = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@any_speed
@given(gaps_ms, st.integers(1, 100))
def test_under_newcomers_that_sort_first_the_oldest_leaves_within_the_window(gaps, window_ms):
    rig = Rig(others=1, max_requests=1000, window_ms=window_ms, max_in_flight_batches=1000)
    old = rig.arrive(at=0.0)
    now_ms = 0
    for gap in gaps:
        due = rig.former.next_due(rig.queue, now_ms / 1000)
        if due is not None and due <= (now_ms + gap) / 1000:
            rig.step(due)
        now_ms += gap
        rig.arrive(at=now_ms / 1000, priority=1)
        rig.step(now_ms / 1000)
    if rig.queue:
        rig.step(rig.former.next_due(rig.queue, now_ms / 1000))
    assert not rig.queue
    assert rig.left_at[old] <= window_ms / 1000


@any_speed
@given(prompts_and_ages_ms, settings_of_any_kind, st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_every_call_after_the_window_sends_the_head(queued, batch_settings, newcomers):
    """No bound, no newcomer and no size keeps the service order from moving once its first has waited long enough."""
    assume(batch_settings.window_ms > 0)
    former = BatchFormer(batch_settings, FixedPredictor())
    queue = [make_entry(i, prompt, 0.0) for i, (prompt, _) in enumerate(queued)]
    late = batch_settings.window_ms / 1000
    for number, prompt_tokens in enumerate(newcomers, start=len(queue)):
        queue.append(make_entry(number, prompt_tokens, late))
        formed = former.form(iter(queue), 2 * late, is_idle=False, fits=lambda entry, tokens: True)
        assert formed is not None
        assert numbers(formed)[0] == queue[0].number
        del queue[: len(formed.entries)]

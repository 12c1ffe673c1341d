"""Waves against a model of the ranks: every order in which messages may arrive, and nobody is ever left waiting."""

import random
from collections import deque

import pytest

from gateway.config.schema import Group
from gateway.core.effects import Dispatch, StartWave
from gateway.core.events import WaveReported
from tests.support.core import Bench


class Lockstep(Bench):
    """A router with one group of ranks, lockstep ones unless told, and all its effects."""

    def __init__(self, ranks=2, protocol="vllm", *, coupled=True, join=True):
        self.effects = []
        group = Group(name="g", protocol=protocol, handshake="tcp://127.0.0.1:0", ranks=ranks, coupled=coupled)
        super().__init__(ranks, protocol, groups=(group,), join=join)

    def send(self, event):
        effects = super().send(event)
        self.effects += effects
        return effects


bench = Lockstep


def waves(effects):
    return [effect.wave for effect in effects if isinstance(effect, StartWave)]


def arrive(one, rank=0):
    """A request for a rank; (its wave, the waves that are started for it)."""
    before = len(one.effects)
    one.request(pinned_rank=rank)
    new = one.effects[before:]
    (dispatch,) = [effect for effect in new if isinstance(effect, Dispatch)]
    return dispatch.request.current_wave, waves(new)


def say(one, rank, **what):
    return waves(one.send(WaveReported(rank, one.router.ranks.incarnation[rank], **what)))


def test_the_first_request_starts_the_first_wave_on_every_rank():
    one = bench(3)
    assert arrive(one, 1) == (0, [0])
    assert [effect.ranks for effect in one.effects if isinstance(effect, StartWave)] == [[0, 1, 2]]


def test_a_running_group_is_not_started_again():
    one = bench()
    arrive(one)
    assert arrive(one, 1) == (0, [])
    assert say(one, 0, start=0) == [], "what we started ourselves is no news"


def test_the_wave_after_the_one_that_is_over_is_started_by_the_next_request():
    one = bench()
    arrive(one)
    assert say(one, 0, complete=0) == []
    assert arrive(one, 1) == (1, [1])
    say(one, 0, complete=1)
    say(one, 0, complete=1)
    assert arrive(one) == (2, [2])


def test_a_rank_that_woke_by_itself_is_followed_by_the_others():
    one = bench()
    arrive(one)
    assert say(one, 1, start=1) == [1]
    assert arrive(one) == (1, [])
    assert say(one, 0, complete=0) == [], "the end of the wave before was only slower on its way"
    assert arrive(one) == (1, [])


def test_two_ranks_that_wake_for_the_same_wave_are_answered_once():
    one = bench()
    arrive(one)
    assert say(one, 1, start=1) == [1]
    assert say(one, 0, start=1) == []


def test_a_lost_end_is_made_up_for_by_the_rank_itself():
    """The gateway takes the group for a running one; the rank sees an old wave."""
    one = bench()
    arrive(one)
    assert arrive(one, 1) == (0, [])
    assert say(one, 1, start=3) == [3]
    say(one, 0, complete=3)
    assert arrive(one) == (4, [4])


def test_old_news_is_no_news():
    one = bench()
    arrive(one)
    say(one, 0, complete=5)
    assert say(one, 1, start=2) == []
    assert say(one, 0, complete=1) == []
    assert arrive(one) == (6, [6])


def test_a_report_of_an_earlier_incarnation_is_nobodys():
    one = bench()
    arrive(one)
    one.send(WaveReported(0, 9, complete=50))
    assert arrive(one) == (0, [])


def test_a_rank_that_joins_a_running_group_is_told_so():
    one = Lockstep(join=False)
    one.join(0)
    arrive(one)
    before = len(one.effects)
    one.join(1)
    assert waves(one.effects[before:]) == [0]


def test_a_group_that_starts_anew_begins_with_the_first_wave():
    one = bench()
    arrive(one)
    say(one, 0, complete=7)
    arrive(one)
    one.lose(0)
    for rank in (0, 1):
        one.join(rank, incarnation=2)
    assert arrive(one) == (0, [0])


def test_independent_ranks_have_no_waves():
    one = Lockstep(coupled=False)
    assert arrive(one) == (0, [])
    assert say(one, 0, start=4) == []


def test_coupled_ranks_of_another_family_have_none():
    one = Lockstep(2, "tokenspeed")
    one.request(pinned_rank=0)
    assert waves(one.effects) == []


class ModelRank:
    """A vLLM rank, as far as waves go. `inbox` is looked at between two steps; each sender's messages keep their order."""

    def __init__(self):
        self.current, self.is_running, self.work = 0, False, 0
        self.adds, self.starts = deque(), deque()
        self.is_waiting = False

    def look(self, source):
        """Take what is there, the two connections in any order; returns what it reports."""
        said = []
        while self.adds or self.starts:
            queue = source.choice([each for each in (self.adds, self.starts) if each])
            wave = queue.popleft()
            if queue is self.starts:
                if wave >= self.current:
                    self.current, self.is_running = wave, True
                continue
            self.work += source.randrange(1, 4)
            if wave > self.current:
                self.current = wave
            elif wave < self.current and not self.is_running:
                self.is_running = True
                said.append(("start", self.current))
        return said


class Model:
    """A router and its ranks, with messages on their way in between. One random step at a time."""

    def __init__(self, seed, ranks=3, losses=0.0):
        self.source = random.Random(seed)
        self.losses = losses
        self.bench = bench(ranks)
        self.ranks = [ModelRank() for _ in range(ranks)]
        self.to_ranks = [(deque(), deque()) for _ in range(ranks)]
        self.reports = [deque() for _ in range(ranks)]
        self.sent = []
        self.pending = []

    def arrive(self):
        rank = self.source.randrange(len(self.ranks))
        before = len(self.bench.effects)
        self.pending.append(self.bench.request(pinned_rank=rank))
        self.deliver(self.bench.effects[before:])

    def deliver(self, effects):
        for effect in effects:
            if isinstance(effect, Dispatch):
                self.to_ranks[effect.rank][0].append(effect.request.current_wave)
            elif isinstance(effect, StartWave):
                self.sent.append(effect.wave)
                for rank in effect.ranks:
                    self.to_ranks[rank][1].append(effect.wave)

    def transport(self):
        """One message arrives somewhere; False when none is on its way."""
        ways = [
            (rank, queue, number)
            for number, rank in enumerate(self.ranks)
            for queue in (0, 1)
            if self.to_ranks[number][queue]
        ]
        back = [number for number, queue in enumerate(self.reports) if queue]
        if not ways and not back:
            return False
        if back and (not ways or self.source.random() < 0.5):
            number = self.source.choice(back)
            kind, wave = self.reports[number].popleft()
            if kind == "complete" and self.source.random() < self.losses:
                return True
            self.deliver(self.bench.send(WaveReported(number, 1, **{kind: wave})))
        else:
            rank, queue, number = self.source.choice(ways)
            (rank.adds, rank.starts)[queue].append(self.to_ranks[number][queue].popleft())
        return True

    def step(self):
        """One rank goes on as far as it can: to the barrier, and all of them through it when it is the last one."""
        number = self.source.randrange(len(self.ranks))
        rank = self.ranks[number]
        if rank.is_waiting:
            return
        was_running = rank.is_running
        self.reports[number].extend(rank.look(self.source))
        if not rank.is_running and not rank.work:
            return
        rank.is_waiting, rank.was_running = True, was_running
        if all(each.is_waiting for each in self.ranks):
            self.round()

    def round(self):
        for each in self.ranks:
            each.work = max(0, each.work - 1)
            each.is_waiting = False
        is_unfinished = any(each.work for each in self.ranks)
        for number, each in enumerate(self.ranks):
            each.is_running = is_unfinished
            if not is_unfinished:
                if number == 0:
                    self.reports[0].append(("complete", each.current))
                each.current += 1
            elif number == 0 and not each.was_running:
                self.reports[0].append(("start", each.current))

    def settle(self):
        """Nothing new comes: everything must come to rest, with all work done."""
        for _ in range(5000):
            if not self.transport() and not any(
                rank.work or rank.is_running or rank.is_waiting or rank.adds or rank.starts for rank in self.ranks
            ):
                for request in self.pending:
                    self.bench.finish(request)
                self.pending.clear()
                return
            for _ in range(len(self.ranks)):
                self.step()
        raise AssertionError(f"stuck: {[vars(rank) for rank in self.ranks]}")


@pytest.mark.parametrize("losses", [0.0, 0.3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_order_of_messages_leaves_a_rank_waiting(ranks, losses):
    for seed in range(150):
        model = Model(seed, ranks, losses)
        for _ in range(model.source.randrange(1, 60)):
            action = model.source.choice((model.arrive, model.transport, model.step, model.step, model.step))
            action()
            if model.source.random() < 0.05:
                model.settle()
        model.settle()
        assert model.sent == sorted(set(model.sent)), "strictly increasing"
        assert len({rank.current for rank in model.ranks}) == 1, "all of them in the same wave"

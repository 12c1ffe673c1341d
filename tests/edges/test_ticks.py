"""One timer for everything that looks at the clock: when it fires, when it need not, and what a defect does not stop."""

import asyncio

import pytest

from gateway.edges import ticks as module
from gateway.edges.ticks import EARLY_S, INTERVAL_S, REST_S, Ticks
from tests.support.driver_site import Site, turn


class Timer:
    def __init__(self, delay, function):
        self.delay, self.function, self.is_cancelled = delay, function, False

    def cancel(self):
        self.is_cancelled = True


class World:
    """Ticks with a clock and a loop of their own."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.is_resting = False
        self.timers: list[Timer] = []
        self.called: list[tuple[str, float]] = []
        self.defects: list[str] = []
        self.ticks = Ticks(lambda: self.now, lambda: self.is_resting, lambda error: self.defects.append(str(error)))
        monkeypatch.setattr(module.asyncio, "get_running_loop", lambda: self)

    def call_later(self, delay, function):
        timer = Timer(delay, function)
        self.timers.append(timer)
        return timer

    @property
    def timer(self):
        """The one that has not been cancelled and is the last."""
        assert all(timer.is_cancelled for timer in self.timers[:-1] if timer.function is not None)
        return self.timers[-1]

    def fire(self):
        timer = self.timer
        assert not timer.is_cancelled
        self.now += timer.delay
        function, timer.function = timer.function, None
        function()

    def job(self, name, interval_s=INTERVAL_S):
        self.ticks.every(interval_s, lambda: self.called.append((name, round(self.now, 3))))


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_while_there_is_work_jobs_are_called_every_interval_in_their_order(world):
    world.job("a")
    world.job("b")
    world.ticks.start()
    world.fire()
    world.fire()
    assert world.called == [("a", 100.05), ("b", 100.05), ("a", 100.1), ("b", 100.1)]


def test_a_slower_job_has_its_own_interval(world):
    world.job("fast")
    world.job("slow", 0.25)
    world.ticks.start()
    for _ in range(11):
        world.fire()
    assert [at for name, at in world.called if name == "slow"] == [100.05, 100.3, 100.55]
    assert len(world.called) == 11 + 3


def test_behind_output_a_tick_comes_early_and_the_timer_does_not_fire(world):
    world.job("a")
    world.ticks.start()
    for _ in range(30):
        world.now += 0.02
        world.ticks.worked()
    times = [at for _, at in world.called]
    assert times == [round(100.04 + 0.04 * number, 3) for number in range(15)]
    assert not world.timer.is_cancelled
    assert world.timer.delay == INTERVAL_S


def test_output_that_comes_sooner_changes_nothing(world):
    world.job("a")
    world.ticks.start()
    for _ in range(3):
        world.now += EARLY_S / 4
        world.ticks.worked()
    assert not world.called
    assert len(world.timers) == 1


def test_at_rest_ticks_are_rare_until_something_begins(world):
    world.job("a")
    world.ticks.start()
    world.is_resting = True
    world.fire()
    assert world.ticks.rests
    assert world.timer.delay == REST_S
    world.fire()
    assert world.timer.delay == REST_S
    world.now += 0.1
    world.is_resting = False
    world.ticks.wake()
    assert not world.ticks.rests
    assert world.timer.delay == INTERVAL_S
    world.ticks.worked()
    assert len(world.called) == 2, "the new interval begins with the wake-up"
    world.fire()
    assert [at for _, at in world.called] == [100.05, 100.3, 100.45]


def test_a_job_that_fails_is_a_defect_and_stops_nothing(world):
    world.ticks.every(INTERVAL_S, lambda: 1 / 0)
    world.job("a")
    world.ticks.start()
    world.fire()
    world.fire()
    assert [at for _, at in world.called] == [100.05, 100.1]
    assert world.defects == ["division by zero"] * 2


def test_ticks_go_on_even_when_telling_a_defect_fails(world):
    world.ticks._on_defect = lambda error: 1 / 0
    world.ticks.every(INTERVAL_S, lambda: 1 / 0)
    world.ticks.start()
    with pytest.raises(ZeroDivisionError):
        world.fire()
    assert not world.timer.is_cancelled
    assert len(world.timers) == 2


def test_after_a_stop_nothing_is_called(world):
    world.job("a")
    world.ticks.worked()
    world.ticks.wake()
    assert not world.timers
    world.ticks.start()
    world.ticks.stop()
    world.ticks.stop()
    assert world.timer.is_cancelled
    world.now += 1.0
    world.ticks.worked()
    world.ticks.wake()
    assert len(world.timers) == 1
    assert not world.called


def test_a_job_may_stop_the_ticks(world):
    world.ticks.every(INTERVAL_S, world.ticks.stop)
    world.ticks.start()
    world.fire()
    assert len(world.timers) == 1


def test_a_job_that_begins_something_leaves_one_timer(world):
    world.is_resting = True
    world.ticks.every(INTERVAL_S, world.ticks.wake)
    world.ticks.start()
    world.fire()
    assert [timer.is_cancelled for timer in world.timers[1:]] == [True, False]
    world.ticks.stop()
    assert all(timer.is_cancelled for timer in world.timers[1:])


class Sink:
    def flush(self, sequence):
        sequence.take()

    def end(self, request):
        pass

    def close(self):
        pass


async def test_a_request_ends_the_rest_and_its_last_output_lets_the_gateway_rest_again():
    site = Site(1)
    ticks = site.driver.ticks
    ticks.start()
    try:
        async with asyncio.timeout(5):
            while not ticks.rests:  # noqa: ASYNC110 - a tick sends no event
                await asyncio.sleep(0.01)
            request = site.submit(Sink())
            assert not ticks.rests
            await asyncio.sleep(2 * INTERVAL_S)
            assert not ticks.rests, "it is in flight"
            site.batch(0, (request.sequences[0].attempt.wire_id, [1], "stop"))
            await turn()
            while not ticks.rests:  # noqa: ASYNC110 - a tick sends no event
                await asyncio.sleep(0.01)
    finally:
        ticks.stop()


async def test_output_that_leaves_is_told_to_the_ticks(monkeypatch):
    site, told = Site(1), []
    monkeypatch.setattr(site.driver.ticks, "worked", lambda: told.append(True))
    request = site.submit(Sink())
    await turn()
    before = len(told)
    site.batch(0, (request.sequences[0].attempt.wire_id, [1], "stop"))
    await turn()
    assert len(told) == before + 1

"""Reloads one at a time, what is kept when they fail, and how a change of the file is noticed."""

import asyncio
import os
import threading

import pytest
import structlog

from gateway.config.effective import cautions
from gateway.config.errors import ConfigError
from gateway.edges.reload import FileWatch, Reloader, file_identity, fingerprint
from tests.config.test_changes import config
from tests.support.grpc_edge import until


class Site:
    """A reloader with a file that a test holds in its hands."""

    def __init__(self):
        self.running = config(2)
        self.layout = None
        self.file = config(2)
        self.problem = None
        self.loads = 0
        self.around = []
        self.gate = None
        self.reloader = Reloader(
            self.load,
            in_force=lambda: (self.running, self.layout or self.running),
            apply=self.apply,
            around=self.around.append,
        )

    def load(self):
        self.loads += 1
        if self.gate is not None:
            assert self.gate.wait(20)
        if isinstance(self.file, Exception):
            raise self.file
        return self.file

    def apply(self, wanted):
        if self.problem is not None:
            raise self.problem
        self.running = wanted


@pytest.fixture
def log():
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def site():
    return Site()


async def test_a_change_is_put_in_force(site, log):
    site.file = config(3, policy={"preset": "p2c"})
    outcome = await site.reloader.reload("SIGHUP")
    assert site.running is site.file
    assert (outcome.result, outcome.cause, outcome.problems) == ("applied", "SIGHUP", ())
    assert outcome.changed == ("policy.preset", "groups[0].ranks")
    assert site.reloader.last is outcome
    assert site.reloader.applied_at_unix_s == outcome.at_unix_s
    (line,) = [line for line in log if line["event"] == "config_reloaded"]
    assert line["sha256"] == fingerprint(site.file) != fingerprint(config(2))
    assert (await site.reloader.reload("file")).result == "unchanged"
    assert site.reloader.counts == {"applied": 1, "unchanged": 1, "invalid": 0, "refused": 0, "failed": 0}
    assert site.around == [True, False] * 2


async def test_only_remarks_that_are_new_are_said(site, log):
    def remarks():
        return [line["remark"] for line in log if line["event"] == "config_remark"]

    surprising = {"admission": {"max_in_flight_per_rank": 1}}
    (remark,) = set(cautions(config(2, **surprising))) - set(cautions(config(2)))
    steps = (
        (surprising, [remark]),
        (surprising | {"policy": {"preset": "p2c"}}, []),
        ({}, []),
        (surprising, [remark]),
    )
    for sections, expected in steps:
        log.clear()
        site.file = config(2, **sections)
        outcome = await site.reloader.reload("SIGHUP")
        assert (outcome.result, list(outcome.remarks), remarks()) == ("applied", expected, expected)


@pytest.mark.parametrize(
    ("file", "problem", "result", "text"),
    [
        (
            ConfigError("g.yaml", 3, 7, "expected a number", at="$.gateways"),
            None,
            "invalid",
            "g.yaml:3:7: expected a num",
        ),
        (config(3, ordering="preserve", state_dir="/x"), None, "refused", "state_dir: needs a restart"),
        (config(3), OSError("tcp://127.0.0.1:1: can't bind"), "failed", "can't bind"),
        (config(3), RuntimeError("boom"), "failed", "boom"),
        (ZeroDivisionError("bang"), None, "failed", "bang"),
    ],
)
async def test_whatever_goes_wrong_the_old_one_stays(site, log, file, problem, result, text):
    before, at = site.running, site.reloader.applied_at_unix_s
    site.file, site.problem = file, problem
    outcome = await site.reloader.reload("SIGHUP")
    assert site.running is before
    assert outcome.result == result
    assert text in outcome.problems[0]
    assert not outcome.is_successful
    assert site.reloader.applied_at_unix_s == at
    (line,) = [line for line in log if line["event"] == "config_kept"]
    assert line["log_level"] == "error"
    assert text in line["error"]
    # And the next one finds its way.
    site.file, site.problem = config(3), None
    assert (await site.reloader.reload("SIGHUP")).result == "applied"
    assert site.around == [True, False] * 2


async def test_reloads_take_turns_and_those_that_wait_are_one(site):
    site.gate = threading.Event()
    first = asyncio.create_task(site.reloader.reload("SIGHUP"))
    await until(lambda: site.loads == 1)
    waiting = [asyncio.create_task(site.reloader.reload(f"call {number}")) for number in range(5)]
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert site.loads == 1, "they wait for their turn"
    waiting[0].cancel()  # who gives up takes nobody else's
    site.file = config(4)
    site.gate.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert (await first).result == "applied"
    assert site.loads == 2
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert {id(outcome) for outcome in outcomes[1:]} == {id(site.reloader.last)}
    assert site.reloader.counts["applied"] + site.reloader.counts["unchanged"] == 2


async def test_a_file_that_cant_be_read_in_time_is_given_up(site, monkeypatch):
    monkeypatch.setattr("gateway.edges.reload.READ_TIMEOUT_S", 0.05)
    site.gate = threading.Event()
    outcome = await site.reloader.reload("file")
    assert (outcome.result, outcome.problems) == ("failed", ("the file could not be read within 0.05 s",))
    site.gate.set()
    assert (await site.reloader.reload("file")).result == "unchanged"


# ---- the file --------------------------------------------------------------------------------------


class Watching:
    """A watch whose looks a test makes itself."""

    def __init__(self, path):
        self.watch = FileWatch(path, file_identity(path), lambda: 1.0, self.changed)
        self.path = path

    async def changed(self):
        raise AssertionError

    def look(self):
        return self.watch._look(file_identity(self.path))

    def looks(self, count=4):
        return [self.look() for _ in range(count)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text("one")
    return path


def test_nothing_happens_while_nothing_changes(path):
    assert Watching(path).looks() == [False] * 4


def test_what_changed_between_the_first_reading_and_the_first_look_is_noticed(path):
    watching, identity = Watching(path), file_identity(path)
    path.write_text("changed while the gateway was starting")
    watching.watch = FileWatch(path, identity, lambda: 1.0, watching.changed)
    assert watching.looks() == [False, True, False, False]


def test_a_file_is_read_once_when_it_stands_still(path):
    watching = Watching(path)
    path.write_text("tw")
    assert watching.look() is False, "it may still be being written"
    path.write_text("two")
    assert watching.looks() == [False, True, False, False]


def test_a_replaced_file_is_another_one(path):
    watching = Watching(path)
    new = path.with_suffix(".new")
    new.write_text("two")
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.rename(path)
    assert watching.looks() == [False, True, False, False]


def test_a_file_that_is_gone_is_nothing_to_read_until_it_is_back(path):
    watching = Watching(path)
    path.unlink()
    assert watching.looks() == [False] * 4
    path.write_text("two")
    assert watching.looks() == [False, True, False, False]


def test_a_mounted_config_map_is_swapped_by_its_link(tmp_path):
    """As Kubernetes does it: the file is a link into `..data`, and `..data` a link to a directory that is replaced."""
    for name in ("..v1", "..v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "gateway.yaml").write_text(name)
    (tmp_path / "..data").symlink_to("..v1")
    path = tmp_path / "gateway.yaml"
    path.symlink_to("..data/gateway.yaml")
    watching = Watching(path)
    (tmp_path / "..tmp").symlink_to("..v2")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    assert watching.looks() == [False, True, False, False]
    assert path.read_text() == "..v2"


async def test_a_watch_runs_until_it_is_cancelled_and_can_be_switched_off(path, monkeypatch):
    monkeypatch.setattr("gateway.edges.reload._UNWATCHED_S", 0.001)
    interval_s, calls = [None], []

    async def changed():
        calls.append(path.read_text())

    task = asyncio.create_task(FileWatch(path, file_identity(path), lambda: interval_s[0], changed).run())
    await asyncio.sleep(0)
    path.write_text("unseen")
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert calls == []
    interval_s[0] = 0.001
    await until(lambda: calls == ["unseen"])
    path.write_text("seen")
    await until(lambda: calls == ["unseen", "seen"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

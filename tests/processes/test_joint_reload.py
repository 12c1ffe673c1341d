"""What keeps several processes from a reload, with processes that the test plays."""

import asyncio
import threading

import pytest

from gateway.config.errors import ConfigError
from gateway.processes import reload as module
from gateway.processes.reload import JointReload
from tests.processes.test_plan import config_of
from tests.support.fake_children import FakeChild


class File:
    """Stands for a source and its file. While `gate` is unset, the file can't be read."""

    def __init__(self):
        self.text = "before"
        self.gate = threading.Event()
        self.gate.set()

    def read(self):
        assert self.gate.wait(20)
        return self.text

    def parse(self, text):
        if text == "wrong":
            raise ConfigError("f.yaml", 1, 1, "wrong")
        return config_of()


class Relay:
    def configure(self, config):
        pass


class Site:
    def __init__(self):
        self.file = File()
        self.children = [FakeChild(number, {}) for number in range(3)]
        self.in_force = []
        self.joint = JointReload(self.children, self.file, Relay(), "before", config_of(), self.in_force.append)

    async def reload(self, text):
        self.file.text = text
        return await asyncio.wait_for(self.joint.reload("file"), 20)

    def reloads(self):
        """What each process was asked to reload with."""
        return [[body["text"] for what, body in child.asked if what == "reload"] for child in self.children]


@pytest.fixture
async def site():
    made = Site()
    for child in made.children:
        await child.start({})
    return made


async def test_all_take_what_all_can(site):
    outcome = await site.reload("after")
    assert outcome.result == "applied"
    assert site.reloads() == [["after"]] * 3
    assert site.joint.text == "after"
    assert len(site.in_force) == 1


async def test_a_file_that_is_wrong_is_refused_by_all(site):
    assert (await site.reload("wrong")).result == "invalid"
    assert site.reloads() == [[None]] * 3
    assert site.joint.text == "before"


@pytest.mark.parametrize("problem", ["the process is gone", "check: no answer within 60 s"])
async def test_a_process_that_can_not_check_the_text_ends_that_reload_and_no_other(site, problem):
    site.children[1].problems["check"] = problem
    outcome = await site.reload("after")
    assert (outcome.result, outcome.cause, outcome.problems) == ("failed", "file", (problem,))
    assert site.reloads() == [[]] * 3, "it might take the text after all, and would be the only one"
    assert (site.joint.text, site.in_force) == ("before", [])
    del site.children[1].problems["check"]
    assert (await site.reload("after")).result == "applied"


async def test_a_file_system_that_hangs_blocks_no_later_reload(site, monkeypatch):
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.05)
    site.file.gate.clear()
    outcome = await site.reload("after")
    assert (outcome.result, outcome.problems) == ("failed", ("the file could not be read within 0.05 s",))
    assert site.reloads() == [[]] * 3
    site.file.gate.set()
    monkeypatch.undo()
    assert (await site.reload("after")).result == "applied"

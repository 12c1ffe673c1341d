"""The log says why a request could not be served."""

import logging

import pytest

from engine_stub import failures
from engine_stub.config import Model, StubConfig
from engine_stub.engine import Fate
from engine_stub.failures import FailureLog
from engine_stub.wire.codec import Consequence, Problem
from tests.support.stub_engine import EngineDriver


@pytest.fixture
def lines(caplog):
    """What was logged as `request_failed`, so far."""
    caplog.set_level(logging.INFO, "engine_stub")
    return lambda: [record for record in caplog.records if record.getMessage() == "request_failed"]


@pytest.mark.parametrize("protocol", ["tokenspeed", "vllm"])
def test_a_token_outside_the_vocabulary_is_named_with_its_request(protocol, lines):
    driver = EngineDriver(protocol, StubConfig(model=Model(vocab_size=4)))
    driver.add("good", prompt_len=2)
    driver.add("bad", prompt_len=4)
    driver.run()
    (line,) = lines()
    assert (line.levelname, line.id, line.engine_index) == ("WARNING", "bad", 0)
    assert "vocabulary" in line.cause


def test_what_kills_a_strict_rank_is_named_too(lines):
    driver = EngineDriver("vllm", StubConfig(model=Model(vocab_size=4), strict_vllm=True))
    driver.add("bad", prompt_len=4)
    assert driver.engine.fate is Fate.DEAD
    assert [line.id for line in lines()] == ["bad"]


def test_what_cannot_be_read_has_no_id(lines):
    EngineDriver("tokenspeed").engine.receive([b"\x09", b"?"], 0.0)
    assert [line.id for line in lines()] == [None]


@pytest.mark.parametrize("protocol", ["tokenspeed", "vllm"])
def test_a_duplicate_is_logged_as_refused_alone_and_an_early_abort_not_at_all(protocol, lines):
    driver = EngineDriver(protocol)
    driver.add("a")
    driver.add("a")
    driver.abort("b")
    driver.add("b")
    driver.run()
    assert lines() == []


def test_a_flood_is_cut_and_counted(lines):
    now = 100.0
    log = FailureLog(3, lambda: now)
    problem = Problem("bad", Consequence.REFUSED)
    for number in range(failures.BURST + 5):
        log.note(f"r{number}", problem)
    assert len(lines()) == failures.BURST
    now += failures.INTERVAL_S
    log.note("later", problem)
    log.note("last", problem)
    *_, later, last = lines()
    assert (later.id, later.suppressed, later.engine_index) == ("later", 5, 3)
    assert (last.id, hasattr(last, "suppressed")) == ("last", False)

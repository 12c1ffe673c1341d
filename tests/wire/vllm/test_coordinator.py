"""What ranks say to their coordinator, and what comes of it when it makes no sense."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.types import EngineBatch, EngineControl, EngineNoise
from gateway.wire.common import Fault
from gateway.wire.vllm import VllmProtocol
from gateway.wire.vllm.coordinator import VllmCoordinator
from tests.support.wire import STATS, pack

COORDINATOR = VllmCoordinator()


def decode(message):
    return COORDINATOR.decode_report([message if isinstance(message, bytes) else pack(message)])


def test_a_load_is_marked_as_one_that_came_by_itself():
    batch = decode([3, [], STATS, 77.5])
    assert (batch.engine_index, list(batch.ids), batch.load_fault) == (3, [], None)
    load = batch.load
    assert (load.running, load.waiting, load.kv_usage, load.step_counter) == (2, 6, 0.25, 9)
    assert (load.source, load.taken_at_s, load.wave) == ("coordinator", 77.5, 0)


def test_the_wave_of_a_load_counts_with_its_step():
    assert decode([0, [], STATS | {"current_wave": 4}, 1.0]).load.wave == 4
    assert decode([0, [], STATS | {"current_wave": -1}, 1.0]).load.wave == 0


@pytest.mark.parametrize("taken_at", [None, 0.0, -1.0, 3, "now", float("inf"), float("nan")])
def test_a_time_that_is_none_is_left_out(taken_at):
    assert decode([0, [], STATS, taken_at]).load.taken_at_s is None


def test_wave_control():
    assert decode([0, [], None, 1.0, None, None, 7, None]) == EngineControl(engine_index=0, wave_complete=7)
    assert decode([1, [], None, 1.0, None, None, None, 0, None]) == EngineControl(engine_index=1, start_wave=0)


@pytest.mark.parametrize(
    "stats", [None, {}, [], "busy", STATS | {"num_running_reqs": -1}, STATS | {"kv_cache_usage": "x"}]
)
def test_a_report_without_a_usable_load_says_so(stats):
    batch = decode([0, [], stats, 1.0])
    assert (batch.load, batch.load_fault) == (None, Fault.BAD_LOAD)


def test_rows_have_no_business_here():
    """A coordinator's socket delivers no tokens, whatever is sent there."""
    batch = decode([0, [["id", [1, 2], None, None, None, 0]], STATS, 1.0])
    assert isinstance(batch, EngineBatch)
    assert not batch.ids
    assert not batch.token_ids


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers(-(2**31), 2**40), st.lists).map(msgspec.msgpack.encode)
)
def test_nothing_raises(payload):
    assert isinstance(COORDINATOR.decode_report([payload]), EngineBatch | EngineControl | EngineNoise)
    assert isinstance(COORDINATOR.decode_report([]), EngineNoise)


def test_the_start_of_a_wave_leaves_nobody_out():
    kind, payload = COORDINATOR.encode_start_wave(5)
    assert (kind, msgspec.msgpack.decode(payload)) == (b"\x02", [5, None])


def test_only_vllm_has_a_coordinator():
    from gateway.wire.registry import protocol_for

    assert protocol_for("tokenspeed").coordinator is None
    assert VllmProtocol.coordinator is not None

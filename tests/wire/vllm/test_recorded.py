"""All 286 messages recorded around real vLLM 0.32.0 engine cores decode to what they say.

The reading to compare with is msgspec's own generic decode of the same bytes: positions and keys of
the documented layout, none of the codec's code.
"""

from array import array

import msgspec
import pytest

from gateway.types import EngineBatch, EngineControl, EngineDead, EngineLoad, TokenLogprob
from gateway.wire.vllm import VllmProtocol
from tests.support.wire import Recorded, check, recorded, unpack, vllm_made

PROTOCOL = VllmProtocol()
FINISH = {None: "", 0: "stop", 1: "length", 2: "abort", 3: "error", 4: "stop"}

FROM_ENGINE = [m for m in recorded() if m.direction == "engine->frontend" and m.socket in {"output", "coord_out"}]
SENTINEL = "nocoord-duplicate_id-engine-core-dead"
MESSAGES = [m for m in FROM_ENGINE if m.name != SENTINEL]


def name(message):
    return message.name


def expected_load(stats, taken_at_s, source="output"):
    if stats is None:
        return None
    return EngineLoad(
        running=stats["num_running_reqs"],
        waiting=stats["num_waiting_reqs"] + stats["num_skipped_waiting_reqs"],
        kv_usage=stats["kv_cache_usage"],
        step_counter=stats["step_counter"],
        wave=stats["current_wave"],
        taken_at_s=taken_at_s,
        source=source,
    )


def expected_logprobs(row, frames):
    if row[2] is None:
        return None

    def numbers(tensor, typecode):
        data = tensor[2]
        values = array(typecode, data.data if isinstance(data, msgspec.msgpack.Ext) else frames[data])
        width = tensor[1][1]
        return [values[at : at + width].tolist() for at in range(0, len(values), width)]

    ids, values = numbers(row[2][0], "i"), numbers(row[2][1], "f")
    return [
        TokenLogprob(value_row[0], tuple(zip(id_row[1:], value_row[1:], strict=True)))
        for id_row, value_row in zip(ids, values, strict=True)
    ]


def expected(message, source="output"):
    index, rows, stats, taken_at_s, utility, _, wave_complete, start_wave, *_ = unpack(message.raw[message.body])
    if not rows and (utility or wave_complete is not None or start_wave is not None):
        return EngineControl(
            engine_index=index,
            wave_complete=wave_complete,
            start_wave=start_wave,
            utility_call_id=utility and utility[0],
            utility_failure=utility and utility[1],
        )
    cached = [row[11] and row[11]["num_cached_tokens"] for row in rows]
    logprobs = [expected_logprobs(row, message.raw) for row in rows]
    return EngineBatch(
        ids=[row[0] for row in rows],
        token_ids=[tuple(row[1]) for row in rows],
        finish=[FINISH[row[5]] for row in rows],
        cached_tokens=cached if any(count is not None for count in cached) else None,
        logprobs=logprobs if any(logprobs) else None,
        engine_index=index,
        load=expected_load(stats, taken_at_s, source),
    )


def comparable(message):
    """Return the message as a dict, with empty columns of every kind alike."""
    if not isinstance(message, EngineBatch):
        return message
    fields = msgspec.structs.asdict(message)
    return fields | {"failed_ids": list(message.failed_ids)}


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_output_decodes_to_what_it_says(message):
    got = PROTOCOL.decode_output(message.raw)
    check(got)
    assert comparable(got) == comparable(expected(message))


REPORTS = [m for m in MESSAGES if m.socket == "coord_out"]


@pytest.mark.parametrize("message", REPORTS, ids=name)
def test_a_report_to_the_coordinator_says_the_same_by_itself(message):
    got, wanted = PROTOCOL.coordinator.decode_report(message.raw), expected(message, "coordinator")
    if isinstance(wanted, EngineControl):
        assert got == wanted
    else:
        assert (got.load, got.engine_index, len(got.ids)) == (wanted.load, wanted.engine_index, 0)


def test_what_was_published_is_what_the_coordinator_says():
    """Recorded with one rank left out of a wave; ours leaves nobody out."""
    published = [m.raw for m in recorded() if m.socket == "coord_pub"]
    coordinator = PROTOCOL.coordinator
    assert [coordinator.ready] in published
    assert any(coordinator.is_subscription(frames[0]) for frames in published)
    ours = coordinator.encode_start_wave(1)
    (theirs,) = [frames for frames in published if frames[0] == b"\x02" and unpack(frames[1])[0] == 1]
    assert (ours[0], unpack(ours[1])) == (theirs[0], [1, None])
    assert unpack(theirs[1]) == [1, 1]


def test_every_recorded_sentinel():
    sentinels = [m for m in recorded() if m.raw == [b"ENGINE_CORE_DEAD"]]
    assert [m.name for m in sentinels] == [SENTINEL]
    assert PROTOCOL.decode_output(sentinels[0].raw) == EngineDead()


def test_the_recording_holds_what_the_other_tests_rely_on():
    """All 286 are accounted for: decoded here, by the handshake and request tests, or not for the codecs."""
    messages = recorded()
    assert len(messages) == 286
    assert len(FROM_ENGINE) == 171
    handled = {m.name for m in MESSAGES} | {SENTINEL}
    handled |= {m.name for m in messages if m.socket == "handshake"}
    handled |= {m.name for m in messages if m.socket == "input"}
    rest = {m.socket for m in messages if m.name not in handled}
    assert rest == {"coord_pub", "xsub", "pair"}  # subscriptions of the coordinator's sockets
    decoded = [PROTOCOL.decode_output(m.raw) for m in MESSAGES]
    batches = [m for m in decoded if isinstance(m, EngineBatch)]
    assert {reason for batch in batches for reason in batch.finish} == {"", "stop", "length", "abort", "error"}
    assert any(batch.logprobs for batch in batches)
    assert any(any(batch.cached_tokens or ()) for batch in batches)
    assert any(not batch.ids and batch.load is not None for batch in batches)
    assert any(m.scenario == "nocoord:prompt_logprobs_multiframe" and len(m.frames) == 4 for m in MESSAGES)
    controls = [m for m in decoded if isinstance(m, EngineControl)]
    assert any(control.start_wave for control in controls)
    assert any(control.wave_complete is not None for control in controls)
    assert any(control.utility_failure for control in controls)


@pytest.mark.parametrize("message", [m for m in recorded() if m not in FROM_ENGINE], ids=name)
def test_every_other_message_is_harmless_on_an_output_socket(message: Recorded):
    for frame in message.raw:
        check(PROTOCOL.decode_output([frame]))
    check(PROTOCOL.decode_output(message.raw))


def decode_made(name):
    return PROTOCOL.decode_output(vllm_made()[name])


def test_made_row():
    assert comparable(decode_made("row-finish-rank-1")) == comparable(
        EngineBatch(ids=["req-1"], token_ids=[(12,)], finish=["length"], engine_index=1)
    )


def test_made_controls():
    assert decode_made("wave-complete-3") == EngineControl(engine_index=0, wave_complete=3)
    assert decode_made("start-wave-4") == EngineControl(engine_index=0, start_wave=4)
    assert decode_made("utility-ok") == EngineControl(engine_index=0, utility_call_id=1)
    assert decode_made("utility-failed") == EngineControl(engine_index=0, utility_call_id=1, utility_failure="boom")

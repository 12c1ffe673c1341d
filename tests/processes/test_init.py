"""One INIT for a rank that several processes serve."""

import msgspec

from gateway.processes.init import merged_init
from gateway.wire.handshake import encode_init


def test_a_rank_learns_all_addresses_in_order_and_the_first_ones_coordinator():
    first = encode_init(
        ["ipc://a-in"], ["ipc://a-out"], coordinator_input="ipc://c-in", coordinator_output="ipc://c-out"
    )
    init = msgspec.msgpack.decode(merged_init([first, encode_init(["ipc://b-in"], ["ipc://b-out"])]))
    assert init["addresses"]["inputs"] == ["ipc://a-in", "ipc://b-in"]
    assert init["addresses"]["outputs"] == ["ipc://a-out", "ipc://b-out"]
    assert init["addresses"]["coordinator_input"] == "ipc://c-in"
    assert init["addresses"]["coordinator_output"] == "ipc://c-out"
    assert init["parallel_config"] == {}


def test_the_answer_of_one_is_passed_on_as_it_is():
    only = encode_init(["ipc://a-in"], ["ipc://a-out"])
    assert merged_init([only]) is only

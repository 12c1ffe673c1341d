"""Another HTTP/2 implementation as the client, in any order of calls, cancels, windows, settings and cuts.

Python's `h2` checks every frame that it gets; what is checked here is that every answer is whole and right.
"""

import asyncio
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.conformance import service
from tests.conformance.service import Request
from tests.conformance.wire import CANCEL, call_fields, prefixed
from tests.conformance.wired import Wired, turn

h2 = pytest.importorskip("h2", reason="the package h2 is not installed")
from h2.config import H2Configuration  # noqa: E402
from h2.connection import H2Connection  # noqa: E402
from h2.events import (  # noqa: E402
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes  # noqa: E402

SIZES = st.lists(st.integers(0, 40_000) | st.integers(0, 50), max_size=6)
EXAMPLES = int(os.environ.get("RANKGATE_TEST_EXAMPLES", "20"))
MAX_TURNS = 4000
LAST_WINDOW_BYTES = 7_000
"""At the end of each run all that is left goes through windows of this size."""
LIMITS = {"stream_window_bytes": 65_535, "connection_window_bytes": 65_535, "min_client_ping_s": 0.0}


class Asked:
    """A call: what its request has still to say, what its answer must be and is so far."""

    def __init__(self, sizes, status=0, *, is_duplex=False):
        self.sizes = sizes
        self.status = status
        self.unsent = b""
        self.is_open = is_duplex
        self.has_ended = False
        self.is_cancelled = False
        self.body = b""
        self.fields = {}
        self.is_whole = False

    def check(self):
        """The messages so far are the first of those expected."""
        found, at = [], 0
        while at + 5 <= len(self.body):
            end = at + 5 + int.from_bytes(self.body[at + 1 : at + 5])
            if end > len(self.body):
                break
            found.append(len(service.decode_reply(self.body[at + 5 : end]).body))
            at = end
        assert found == self.sizes[: len(found)]
        if self.is_whole:
            assert at == len(self.body)
            assert self.fields[b"grpc-status"] == b"%d" % self.status, self.fields
            assert found == self.sizes


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.wired = Wired(**LIMITS)
        self.loop.run_until_complete(self.wired.start())
        self.connection, self.transport = self.wired.connect()
        self.client = H2Connection(H2Configuration(header_encoding=None))
        self.client.initiate_connection()
        self.to_server, self.to_client = bytearray(), bytearray()
        self.asked = {}
        self.withheld = {}
        # Its library takes the first acknowledgement for all it has sent: one at a time, then.
        self.has_settings_out = True

    # Calls.

    def ask(self, method, asked, message):
        number = self.client.get_next_available_stream_id()
        self.client.send_headers(number, call_fields(method))
        asked.unsent = prefixed(message) if message is not None else b""
        self.asked[number] = asked
        self.speak(number)

    @rule(size=st.integers(0, 60_000), payload=st.integers(0, 50_000))
    def call(self, size, payload):
        self.ask("UnaryCall", Asked([size]), service.encode(Request([size], bytes(payload))))

    @rule(sizes=SIZES, method=st.sampled_from(["StreamingOutputCall", "DirectOutputCall"]))
    def stream(self, sizes, method):
        self.ask(method, Asked(sizes), service.encode(Request(sizes)))

    @rule(status=st.integers(1, 16))
    def be_refused(self, status):
        self.ask("UnaryCall", Asked([], status), service.encode(Request(status=status, message="no")))

    @rule()
    def open_duplex(self):
        self.ask("FullDuplexCall", Asked([], is_duplex=True), None)

    def open(self):
        return [number for number, asked in self.asked.items() if asked.is_open and not asked.is_whole]

    @precondition(lambda self: self.open())
    @rule(data=st.data(), sizes=SIZES, payload=st.integers(0, 30_000))
    def say(self, data, sizes, payload):
        number = data.draw(st.sampled_from(self.open()))
        asked = self.asked[number]
        asked.sizes = asked.sizes + sizes
        asked.unsent += prefixed(service.encode(Request(sizes, bytes(payload))))
        self.speak(number)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def end(self, data):
        number = data.draw(st.sampled_from(self.open()))
        self.asked[number].is_open = False
        self.speak(number)

    def live(self):
        return [number for number, asked in self.asked.items() if not asked.is_whole and not asked.is_cancelled]

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.sampled_from(self.live()))
        asked = self.asked[number]
        asked.is_cancelled, asked.is_open = True, False
        self.client.reset_stream(number, CANCEL)

    def speak(self, number):
        """As much of the request as the windows allow."""
        asked = self.asked[number]
        if asked.is_whole or asked.is_cancelled or asked.has_ended:
            return
        while asked.unsent:
            room = min(self.client.local_flow_control_window(number), self.client.max_outbound_frame_size)
            if room <= 0:
                return
            part, asked.unsent = asked.unsent[:room], asked.unsent[room:]
            self.client.send_data(number, part)
        if not asked.is_open:
            asked.has_ended = True
            self.client.end_stream(number)

    # The connection.

    @precondition(lambda self: not self.has_settings_out)
    @rule(size=st.sampled_from([0, 1, 100, 65_535, 200_000]))
    def set_window(self, size):
        self.set(SettingCodes.INITIAL_WINDOW_SIZE, size)

    @precondition(lambda self: not self.has_settings_out)
    @rule(size=st.sampled_from([16_384, 100_000]))
    def set_frame_size(self, size):
        self.set(SettingCodes.MAX_FRAME_SIZE, size)

    def set(self, name, value):
        self.has_settings_out = True
        self.client.update_settings({name: value})

    @rule()
    def ping(self):
        self.client.ping(b"12345678")

    @rule(increment=st.integers(1, 100_000))
    def widen(self, increment):
        self.client.increment_flow_control_window(increment)

    @rule()
    def give_back(self):
        withheld, self.withheld = self.withheld, {}
        for number, size in withheld.items():
            self.client.acknowledge_received_data(size, number)

    @rule(are_full=st.booleans())
    def fill_transport(self, are_full):
        (self.connection.pause_writing if are_full else self.connection.resume_writing)()

    @rule(cuts=st.lists(st.integers(1, 5000), max_size=5))
    def deliver(self, cuts):
        self.to_server += self.client.data_to_send()
        for cut in cuts or [len(self.to_server)]:
            part = bytes(self.to_server[:cut])
            del self.to_server[:cut]
            if part:
                self.connection.data_received(part)

    @rule(times=st.integers(1, 4))
    def turn(self, times):
        self.loop.run_until_complete(turn(times))

    @rule(cuts=st.lists(st.integers(1, 30_000), max_size=5))
    def read(self, cuts):
        self.to_client += self.transport.take()
        for cut in cuts or [len(self.to_client)]:
            part = bytes(self.to_client[:cut])
            del self.to_client[:cut]
            for event in self.client.receive_data(part):
                self.hear(event)
        for number in list(self.asked):
            self.speak(number)

    @rule(times=st.integers(1, 3))
    def converse(self, times):
        """All of it at once, as often as not."""
        for _ in range(times):
            self.deliver([])
            self.turn(2)
            self.read([])

    def hear(self, event):
        assert not isinstance(event, ConnectionTerminated), event
        asked = self.asked.get(getattr(event, "stream_id", None))
        match event:
            case ResponseReceived() | TrailersReceived():
                asked.fields.update(event.headers)
            case DataReceived():
                number, size = event.stream_id, event.flow_controlled_length
                self.withheld[number] = self.withheld.get(number, 0) + size
                asked.body += event.data
            case SettingsAcknowledged():
                self.has_settings_out = False
            case StreamEnded():
                asked.is_whole = True
            case StreamReset():
                assert asked.is_whole or asked.is_cancelled
                assert asked.is_cancelled or event.error_code == 0

    @invariant()
    def nothing_is_wrong(self):
        assert not self.wired.faults
        assert not self.transport.is_closed
        for asked in self.asked.values():
            if not asked.is_cancelled:
                asked.check()

    def teardown(self):
        try:
            self.finish()
        finally:
            self.connection.connection_lost(None)
            self.loop.run_until_complete(self.wired.stop())
            self.loop.close()

    def finish(self):
        """A client that reads and says everything gets everything."""
        self.fill_transport(are_full=False)
        self.exchange(until=lambda: not self.has_settings_out)
        self.set(SettingCodes.INITIAL_WINDOW_SIZE, LAST_WINDOW_BYTES)
        for asked in self.asked.values():
            asked.is_open = False
        self.exchange(until=lambda: not (self.live() or self.connection.http.streams))
        assert not self.live()
        self.turn(5)
        assert not self.wired.service.live

    def exchange(self, until):
        for _ in range(MAX_TURNS):
            if until():
                break
            self.deliver([])
            self.turn(2)
            self.read([])
            self.give_back()
            self.nothing_is_wrong()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)

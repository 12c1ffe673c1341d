"""A world of sequences, streams and connections to flush in, made as it is told and the same each time."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from gateway.core.events import RequestArrived
from gateway.core.outbox import Record
from gateway.core.request import Request, Sequence
from gateway.edges.grpc_engine.encode import VLLM, Layout, SequenceEncoder
from gateway.edges.grpc_engine.writer import EngineWriter, Wanted
from gateway.h2.protocol.limits import Budgets, Limits
from gateway.h2.protocol.outbound import Outbound
from gateway.h2.protocol.streams import Stream
from gateway.types import Sampling, TokenLogprob
from tests.support.native import slots_of

AMPLE = 1 << 20
KINDS = (Sequence, SequenceEncoder, Stream, Outbound, Record)


@dataclass
class Outbox:
    """One sequence of a stream. `sink`: a lane, a closed one, the writer, or somebody else's object."""

    tokens: Any = (7,)
    index: int = 0
    completed: int = 1
    has_record: bool = False
    cached: int = 0
    news: int = 0
    finish: str = ""
    has_logprobs: bool = False
    packed: int = 0
    sink: str = "lane"


@dataclass
class Channel:
    """One stream with its request. Windows are said by what is left of them behind the first message."""

    outboxes: list[Outbox] = field(default_factory=lambda: [Outbox()])
    layout: Layout = VLLM
    request_id: str = "r"
    prompt_tokens: int = 3
    left: int = AMPLE
    backlog: bytes = b""
    has_headers: bool = True
    has_ended: bool = False


@dataclass
class Link:
    """One connection. `left` of its window behind `messages` of them, of which the first may just be pushed."""

    channels: list[Channel] = field(default_factory=lambda: [Channel()])
    left: int = AMPLE
    messages: int = 0
    spare: int = AMPLE
    is_paused: bool = False
    parts: list[bytes] = field(default_factory=list)
    failing_wakes: int = 0


class Call:
    """As `gateway.h2.server.call.Call` pushes."""

    is_ready = True
    on_ready = on_closed = None

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def push(self, message: bytes) -> None:
        stream = self.stream
        if not stream.has_headers:
            stream.out.send_headers(stream, b"head")
        if not stream.push(message):
            stream.out.send_data(stream, b"\0" + len(message).to_bytes(4) + message)
            self.is_ready = not stream.backlog


class Somebody:
    """A sink of another kind."""

    def __init__(self, told: Any) -> None:
        self.told = told

    def flush(self, sequence: Any) -> None:
        self.told(sequence)
        sequence.take()


def arrived(prompt_tokens: int) -> RequestArrived:
    return RequestArrived(
        client_key="c", request_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=9), n=max(1, prompt_tokens)
    )


class World:
    """Everything of the links, and what happened there, in order."""

    def __init__(self, links: list[Link], raises_at: int | None = None) -> None:
        self.raises_at = raises_at
        self.items: list[Any] = []
        self.events: list[Any] = []
        self.outs: list[Outbound] = []
        self.things: list[Any] = []
        self.writers: list[EngineWriter] = []
        self.sequences: list[Any] = []
        self.names: dict[int, str] = {}
        for link in links:
            self._connect(link)
        self.names = {id(thing): f"{type(thing).__name__} {at}" for at, thing in enumerate(self.things)}

    def _connect(self, link: Link) -> None:
        limits = Limits()
        out = Outbound(limits, Budgets(limits))
        number = len(self.outs)
        self.outs.append(out)
        failing = [link.failing_wakes]

        def wake() -> None:
            self._tell("wake", number)
            if failing[0]:
                failing[0] -= 1
                raise OSError("no wake")

        out.wake = wake
        self.things += (out, out._budgets, out._limits, wake, out.peer)
        sizes = [size for at, channel in enumerate(link.channels) for size in self._open(out, channel, 2 * at + 1)]
        out.send_window = sum(sizes[: link.messages]) + link.left
        out.is_paused = link.is_paused
        out.parts += link.parts
        if sizes:
            out.max_push_bytes = min(out.max_push_bytes, sizes[0] - 5 + link.spare)

    def _open(self, out: Outbound, channel: Channel, number: int) -> list[int]:
        """Open a stream; returns what its messages would take of the windows."""
        stream = Stream(number, out, 0, 0)
        stream.has_headers, stream.has_ended = channel.has_headers, channel.has_ended
        if channel.backlog:
            stream.backlog = bytearray(channel.backlog)
        request = Request(number, arrived(len(channel.outboxes)), 1.0)
        wanted = Wanted("r", [1] * channel.prompt_tokens, request.arrived.sampling, 1, None, True)
        writer = EngineWriter("Generate", channel.layout, channel.request_id, wanted)
        call = Call(stream)
        call.is_ready = not channel.backlog
        writer._call = call  # type: ignore[assignment]
        self.writers.append(writer)
        self.things += (stream, request, writer, call)
        sizes = [
            self._fill(sequence, outbox, writer)
            for sequence, outbox in zip(request.sequences, channel.outboxes, strict=True)
        ]
        stream.send_window = sizes[0] + channel.left
        self.things += (request,)
        self.items += (*request.sequences, request)
        return sizes

    def _fill(self, sequence: Any, outbox: Outbox, writer: EngineWriter) -> int:
        sequence.index = sequence.index and outbox.index
        sequence.pending = type(outbox.tokens)(outbox.tokens)
        sequence.finish, sequence.cached_tokens, sequence.is_dirty, sequence.held_bytes = (
            outbox.finish,
            outbox.news,
            True,
            4,
        )
        sequence.logprobs = [TokenLogprob(-0.5)] * len(outbox.tokens) if outbox.has_logprobs else None
        sequence.packed = array("I", range(outbox.packed)) if outbox.packed else None
        if outbox.has_record:
            sequence.record = Record(cache_bytes=0, token_bytes=AMPLE)
            sequence.record.token_ids.extend([5] * min(outbox.completed + 200, 500))
            self.things += (sequence.record,)
        encoder = writer._encoder_of(sequence)
        self._set(encoder, outbox)
        spare = SequenceEncoder(writer._layout, writer._request_id, sequence.index, writer._prompt_tokens)
        self._set(spare, outbox)
        self.sequences.append(sequence)
        self.things += (sequence, encoder)
        if outbox.sink == "somebody":
            sequence.sink = Somebody(lambda item: self._tell("somebody", self.names[id(item)]))
        elif outbox.sink == "writer":
            sequence.sink = writer
        else:
            sequence.sink, encoder.writer, writer._lanes = encoder, writer, (*writer._lanes, encoder)
            if outbox.sink == "lane" and writer._call.is_ready:  # type: ignore[union-attr]
                encoder.stream = writer._call.stream  # type: ignore[union-attr]
        self.things += (sequence.sink,)
        return len(spare.chunk([max(0, token) for token in outbox.tokens], None, outbox.cached)) + 5

    @staticmethod
    def _set(encoder: SequenceEncoder, outbox: Outbox) -> None:
        encoder._completed = outbox.completed
        if encoder._ids is not None:
            encoder._ids += b"\x05"
        if outbox.cached:
            encoder.note_cached(outbox.cached)

    def _tell(self, what: str, whom: object) -> None:
        """Note what happened, and what had been written by then."""
        self.events.append((what, whom, [list(out.parts) for out in self.outs]))

    def other(self, item: Any) -> None:
        """As the driver's."""
        if isinstance(item, Request):
            self._tell("end", self.names[id(item)])
            if self.raises_at is not None and len(self.events) > self.raises_at:
                raise LookupError("an end")
            return
        try:
            item.sink.flush(item)
        except Exception as error:  # noqa: BLE001 - as the driver does
            self.broken(item, error)

    def broken(self, sequence: Any, error: Exception) -> None:
        self._tell("broken", (self.names[id(sequence)], type(error), str(error)))
        if self.raises_at is not None and self.raises_at % 3 == 2:
            raise LookupError("broken")

    def run(self, way: Any, order: list[int] | None = None) -> Any:
        items = self.items if order is None else [self.items[at % len(self.items)] for at in order]
        try:
            result = way([*items], self.other, self.broken)
        except LookupError as error:
            result = str(error)
        return result, self.events, self.look()

    def look(self) -> Any:
        """Every slot of everything, and how the writers stand."""
        slotted = [thing for thing in self.things if type(thing) in KINDS]
        writers = [
            (writer.writes, writer._call.is_ready, [self.names[id(item)] for item in writer.pending])  # type: ignore[union-attr]
            for writer in self.writers
        ]
        return [slots_of(thing, self.names) for thing in slotted], writers

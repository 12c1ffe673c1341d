"""The answer of a standard engine service's Generate: chunks, and one complete per sequence."""

from collections import deque
from collections.abc import Iterable

import msgspec

from gateway.core.errors import Reason
from gateway.core.request import Request, Sequence
from gateway.edges.grpc_context import Outlet
from gateway.edges.grpc_engine.encode import Layout, SequenceEncoder
from gateway.edges.grpc_writer import StreamWriter
from gateway.types import Sampling


class Wanted(msgspec.Struct, frozen=True):
    """A Generate request in neutral terms; ranges are not checked yet."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    n: int
    pinned_rank: int | None
    is_stream: bool


class EngineWriter(StreamWriter):
    """Sends one Generate call's sequences as chunks and completes, or as completes only."""

    # Of sequence 0, which most requests have alone.
    _encoder: SequenceEncoder | None = None
    # Of the others. Made on first use: `n` is the client's word until the core has checked it.
    _encoders: dict[int, SequenceEncoder] | None = None

    def __init__(self, rpc: str, layout: Layout, request_id: str, wanted: Wanted) -> None:
        self.pending = deque()
        self.rpc = rpc
        self._is_stream = wanted.is_stream
        self._layout = layout
        self._request_id = request_id
        self._prompt_tokens = len(wanted.prompt_token_ids)

    def encode(self, sequence: Sequence) -> Iterable[bytes]:
        """New tokens as a chunk; at the finish also the sequence's complete."""
        token_ids, logprobs = sequence.take()
        encoder = self._encoder_of(sequence)
        messages: list[bytes] = []
        if token_ids:
            if self._is_stream:
                messages.append(encoder.chunk(token_ids, logprobs, sequence.cached_tokens))
            else:
                encoder.add(token_ids, logprobs)
        if sequence.finish:
            messages.append(encoder.complete(sequence.finish, sequence.cached_tokens, sequence.record))
        return messages

    def flush(self, sequence: Sequence) -> None:
        """The sequence has tokens or a finish to send. What follows may take the short cut."""
        super().flush(sequence)
        call = self._call
        if call is not None and call.is_ready and self._is_stream and not sequence.finish and not self.pending:
            lane = self._encoder_of(sequence)
            if lane.writer is None:
                lane.writer = self
                self._lanes = (*self._lanes, lane)
                sequence.sink = lane
            lane.stream = call.stream

    def send(self, sequence: Sequence, outlet: Outlet) -> None:
        """The same, pushed."""
        token_ids, logprobs = sequence.take()
        encoder = self._encoder
        if encoder is None or sequence.index:
            encoder = self._encoder_of(sequence)
        cached_tokens = sequence.cached_tokens
        if not token_ids:
            pass
        elif not self._is_stream:
            encoder.add(token_ids, logprobs)
        else:
            outlet.push(encoder.chunk(token_ids, logprobs, cached_tokens))
        if sequence.finish:
            outlet.push(encoder.complete(sequence.finish, sequence.cached_tokens, sequence.record))

    def farewell(self, request: Request) -> Iterable[bytes] | None:
        """After an Abort call, a complete of reason "abort" with what it was sent for each sequence that lacks one."""
        if request.error is None or request.error.reason is not Reason.ABORTED:
            return None
        return [
            encoder.complete("abort", sequence.cached_tokens, sequence.record)
            for sequence in request.sequences
            if not (encoder := self._encoder_of(sequence)).is_complete
        ]

    def _encoder_of(self, sequence: Sequence) -> SequenceEncoder:
        index = sequence.index
        if not index:
            if self._encoder is None:
                self._encoder = self._new_encoder(sequence)
            return self._encoder
        if self._encoders is None:
            self._encoders = {}
        encoder = self._encoders.get(index)
        if encoder is None:
            encoder = self._encoders[index] = self._new_encoder(sequence)
        return encoder

    def _new_encoder(self, sequence: Sequence) -> SequenceEncoder:
        record = sequence.record
        return SequenceEncoder(
            self._layout,
            self._request_id,
            sequence.index,
            self._prompt_tokens,
            has_record=record is not None and record.is_lasting,
        )

"""The answer of a standard engine service's Generate: chunks, and one complete per sequence."""

from collections import deque
from collections.abc import Iterable

import msgspec

from gateway.core.errors import Reason
from gateway.core.request import Request, Sequence
from gateway.edges.grpc_context import Outlet
from gateway.edges.grpc_engine.encode import ONE_TOKEN, Layout, SequenceEncoder
from gateway.edges.grpc_writer import StreamWriter
from gateway.edges.varint import VARINTS
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
        encoder = self._encoder_of(sequence.index)
        messages: list[bytes] = []
        if token_ids:
            if self._is_stream:
                messages.append(encoder.chunk(token_ids, logprobs, sequence.cached_tokens))
            else:
                encoder.add(token_ids, logprobs)
        if sequence.finish:
            messages.append(encoder.complete(sequence.finish, sequence.cached_tokens))
        return messages

    def send(self, sequence: Sequence, outlet: Outlet) -> None:
        """The same, pushed."""
        token_ids, logprobs = sequence.take()
        encoder = self._encoder
        if encoder is None or sequence.index:
            encoder = self._encoder_of(sequence.index)
        cached_tokens = sequence.cached_tokens
        if not token_ids:
            pass
        elif not self._is_stream:
            encoder.add(token_ids, logprobs)
        elif logprobs is None and len(token_ids) == 1 and cached_tokens == encoder.cached_tokens:
            token_id = token_ids[0]
            encoder.ids += VARINTS[token_id]
            encoder.completed = completed = encoder.completed + 1
            body = ONE_TOKEN[token_id] + encoder.chunk_middle + VARINTS[completed] + encoder.chunk_end
            outlet.push(encoder.chunk_tag + VARINTS[len(body)] + body)
        else:
            outlet.push(encoder.chunk(token_ids, logprobs, cached_tokens))
        if sequence.finish:
            outlet.push(encoder.complete(sequence.finish, cached_tokens))

    def farewell(self, request: Request) -> Iterable[bytes] | None:
        """After an Abort call, a complete of reason "abort" with what it has for each unfinished sequence."""
        if request.error is None or request.error.reason is not Reason.ABORTED:
            return None
        return [
            self._encoder_of(sequence.index).complete("abort", sequence.cached_tokens)
            for sequence in request.sequences
            if not sequence.finish
        ]

    def _encoder_of(self, index: int) -> SequenceEncoder:
        if not index:
            if self._encoder is None:
                self._encoder = SequenceEncoder(self._layout, self._request_id, 0, self._prompt_tokens)
            return self._encoder
        if self._encoders is None:
            self._encoders = {}
        encoder = self._encoders.get(index)
        if encoder is None:
            encoder = SequenceEncoder(self._layout, self._request_id, index, self._prompt_tokens)
            self._encoders[index] = encoder
        return encoder

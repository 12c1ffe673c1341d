"""What waits for many sequences at once, from their outboxes to the frames of their streams."""

from gateway.core.request import Sequence
from gateway.edges.flushing import FlushItems, flush_each
from gateway.edges.grpc_engine.encode import SequenceEncoder
from gateway.h2.protocol.outbound import Outbound
from gateway.h2.protocol.streams import Stream
from gateway.native import compiled

flush_items: FlushItems = (
    flush_each if compiled is None else compiled.Outlet(Sequence, SequenceEncoder, Stream, Outbound).flush
)
"""As `SequenceEncoder.flush` and `Stream.push`, where these are all that a flush comes to."""

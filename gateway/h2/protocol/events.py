"""What a connection tells the layer above."""

import msgspec

from gateway.h2.protocol.errors import ErrorCode
from gateway.h2.protocol.heads import RequestHead
from gateway.h2.protocol.streams import Stream


class RequestStarted(msgspec.Struct):
    """A request's header block; `head` is None when it was well-formed and too large.

    `timeout` is the value of grpc-timeout, which differs from call to call: no head has it. What has arrived together with
    the block may be here already: the first piece of the body, and the request's end after it.
    """

    stream: Stream
    head: RequestHead | None
    timeout: bytes | None = None
    data: bytes = b""
    is_ended: bool = False


class DataReceived(msgspec.Struct, frozen=True):
    """A piece of a request's body, the last one or not. Give it back to the window with `Connection.consume`.

    A last piece that is empty, or about which there was more to say, is followed by `RequestEnded` instead.
    """

    stream: Stream
    data: bytes
    is_last: bool = False


class RequestEnded(msgspec.Struct, frozen=True):
    """The client has said everything."""

    stream: Stream


class StreamDrained(msgspec.Struct, frozen=True):
    """The stream can send at once again."""

    stream: Stream


class StreamReset(msgspec.Struct, frozen=True):
    """The stream is closed before its response has ended: by the client, or because it broke a rule."""

    stream: Stream
    code: ErrorCode | int


class ConnectionFailed(msgspec.Struct, frozen=True):
    """Nothing goes on here; what is left to take is a GOAWAY."""

    code: ErrorCode
    message: str


Event = RequestStarted | DataReceived | RequestEnded | StreamDrained | StreamReset | ConnectionFailed

"""Bounds on what clients may send, open and leave unread. See `gateway.config.schema`."""

from typing import Annotated

from msgspec import Meta

from gateway.config.fields import Bytes, Count, KeepaliveSeconds, Seconds, Strict, WatchSeconds


class Limits(Strict, frozen=True, kw_only=True):
    """Bounds on requests, streams and connections."""

    default_deadline_s: Annotated[Seconds | None, Meta(description="deadline of requests that bring none")] = None
    max_request_age_s: Annotated[
        Seconds | None, Meta(description="age at which a request ends whatever it waits for; null: never")
    ] = 3600.0
    max_streams_per_connection: Annotated[
        Count, Meta(description="concurrent streams on one connection, and live requests on one GenerateMany stream")
    ] = 1024
    max_streams: Annotated[
        Count, Meta(description="open calls on listen.grpc altogether; health checks do not count")
    ] = 32768
    max_connections: Annotated[
        Count | None,
        Meta(description="open connections of a listener; null: three quarters of the files that the process may open"),
    ] = None
    handshake_timeout_s: Annotated[
        KeepaliveSeconds, Meta(description="time that a new connection gets for TLS and its first HTTP/2 frames")
    ] = 20.0
    idle_connection_timeout_s: Annotated[
        KeepaliveSeconds | None, Meta(description="time after which a connection without a call is closed; null: never")
    ] = 1800.0
    idle_stream_timeout_s: Annotated[
        WatchSeconds | None,
        Meta(description="time after which a GenerateMany stream without a request ends; null: never"),
    ] = 600.0
    reader_stall_timeout_s: Annotated[
        WatchSeconds | None,
        Meta(description="time that a client may leave a message unread before its requests end; null: no limit"),
    ] = 60.0
    max_metadata_bytes: Annotated[
        int, Meta(ge=1024, le=1024 * 1024, description="metadata of one call, 32 bytes an entry included")
    ] = 16384
    max_request_bytes: Annotated[
        Bytes | None,
        Meta(
            description="largest request message, looked at before it is decoded; null: 16 bytes per token of"
            " the model's context, at least 1 MiB"
        ),
    ] = None
    max_n: Annotated[int, Meta(ge=1, le=1024, description="largest n (sequences per request)")] = 64
    max_logprobs: Annotated[int, Meta(ge=0, le=128, description="largest number of logprobs per token")] = 20
    max_stop_token_ids: Annotated[
        int, Meta(ge=0, le=4096, description="largest number of stop token ids per request")
    ] = 256
    max_request_id_bytes: Annotated[
        int, Meta(ge=1, le=4096, description="longest request id that a client may choose")
    ] = 256
    max_stream_buffer_bytes: Annotated[
        Bytes, Meta(description="unsent output of one sequence before its reader is ended")
    ] = 1024 * 1024

"""What the gRPC library is told: everything that it bounds before a call reaches this gateway, and why.

* no port sharing: a second gateway on the same port would silently take half of the calls;
* connections: further ones are closed as soon as they are made, whatever the peer; the library says so to nobody, neither
  to the client in words nor to this process;
* a connection must show its first HTTP/2 frames in time, and one without calls is closed after a while;
* streams per connection: clients hold further calls back, and those that do not are answered with REFUSED_STREAM;
* messages: somewhat more than the gate takes, so that whoever is just above the limit is told which one it was;
* metadata: likewise;
* keepalive finds clients that vanished; clients that ping too often are disconnected.

Not bounded by the library: the memory of one connection beyond its flow-control windows (64 KiB a stream and at most one
message of each), and connections per address.
"""

import resource
from typing import Any

from gateway.config.schema import Config
from gateway.edges.grpc_gate import max_request_bytes

MAX_ADMIN_CONNECTIONS = 1024
_MS = 1000
_FALLBACK_CONNECTIONS = 16384
# Ranks, logs, metrics and the event loop need files as well.
_SHARE_OF_FILES = 0.75


def max_connections(config: Config) -> int:
    """How many connections a listener may have: as set, else most of the files that the process may open."""
    limit = config.limits.max_connections
    if limit is not None:
        return limit
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _FALLBACK_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, int(files * _SHARE_OF_FILES))


def server_options(config: Config, connections: int) -> list[tuple[str, Any]]:
    """The options of a listener that takes that many connections."""
    listen, limits = config.listen, config.limits
    keepalive = listen.keepalive
    # Beyond both of these limits the library refuses by itself, without details.
    received_bytes = min(listen.max_message_bytes, 2 * max_request_bytes(config))
    metadata_bytes = 2 * limits.max_metadata_bytes
    options: list[tuple[str, Any]] = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", round(limits.handshake_timeout_s * _MS)),
        ("grpc.max_receive_message_length", received_bytes),
        ("grpc.max_send_message_length", listen.max_message_bytes),
        # The soft limit refuses at random, more often the nearer the other one is.
        ("grpc.max_metadata_size", metadata_bytes),
        ("grpc.absolute_max_metadata_size", metadata_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.keepalive_time_ms", round(keepalive.time_s * _MS)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout_s * _MS)),
        # The library pings by itself after it has received something, and keepalive waits for that ping's answer.
        ("grpc.http2.ping_timeout_ms", round(keepalive.timeout_s * _MS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(keepalive.min_client_ping_s * _MS)),
    ]
    if limits.idle_connection_timeout_s is not None:
        options.append(("grpc.max_connection_idle_ms", round(limits.idle_connection_timeout_s * _MS)))
    if keepalive.max_connection_age_s is not None:
        options.append(("grpc.max_connection_age_ms", round(keepalive.max_connection_age_s * _MS)))
        options.append(("grpc.max_connection_age_grace_ms", round(keepalive.max_connection_age_grace_s * _MS)))
    return options

"""The peers: how each is started, what stands behind it and how it is asked.

`engine` says what stands behind: `zmq` (scripted ranks), `grpc` or `http` (a server that answers by itself).
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peers import install
from tests.bench.peers.process import ROOT, PeerError, free_port, own_python

ENGINE_SERVICE = "/vllm.grpc.engine.VllmEngine/Generate"
VOCAB_SIZE = 32000
BASE = "smg"


@dataclass(frozen=True)
class Place:
    """Where one instance of a peer runs."""

    directory: Path
    port: int
    engine_port: int
    """What ranks dial, or where the server behind it listens."""
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to serve the same client."""

    name: str
    title: str
    command: Callable[[Place], list[object]]
    engine: str = "zmq"
    path: str = ENGINE_SERVICE
    same_job: bool = False
    """It serves the same service over the same ranks as ours: figures compare one to one."""
    engine_port: Callable[[Path], int] = lambda _: free_port()

    extra_events: int = 1
    """Of an answer as text: those that carry no token."""
    model: Callable[[Place], str] = lambda _: "bench"

    @property
    def is_text(self) -> bool:
        """It answers with server-sent events."""
        return self.path != ENGINE_SERVICE


def _ours(transport: str, *, is_compiled: bool = True) -> Callable[[Place], list[object]]:
    def command(place: Place) -> list[object]:
        listen = {name: f"127.0.0.1:{free_port()}" for name in ("admin", "metrics")}
        group = {"name": "bench", "protocol": "vllm", "handshake": f"tcp://127.0.0.1:{place.engine_port}"}
        config = {
            "version": 1,
            "listen": listen | {"grpc": f"127.0.0.1:{place.port}", "transport": transport},
            "model": {
                "name": "bench",
                "max_context_tokens": 131072,
                "vocab_size": VOCAB_SIZE,
                "eos_token_ids": [2],
            },
            "groups": [group | {"ranks": place.ranks}],
        }
        file = place.directory / "gateway.json"
        file.write_text(json.dumps(config))
        settings = [] if is_compiled else ["env", "RANKGATE_NATIVE=0"]
        return [*settings, sys.executable, "-m", "gateway", "serve", "-c", file]

    return command


def _servicer(place: Place) -> list[object]:
    script = ROOT / "tests/bench/peers/servicer.py"
    return [install.python("smg"), script, place.port, place.engine_port, place.ranks]


def _prototype(place: Place) -> list[object]:
    if place.ranks != 1:
        raise PeerError("the prototype has one rank")
    return own_python("prototype", place.port, place.engine_port)


def _envoy(place: Place) -> list[object]:
    cluster = {
        "name": "engine",
        "connect_timeout": "5s",
        "type": "STATIC",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "circuit_breakers": {"thresholds": [{"max_requests": 65536, "max_pending_requests": 65536}]},
        "load_assignment": {
            "cluster_name": "engine",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(place.engine_port)}}]}],
        },
    }
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}]
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "codec_type": "HTTP2",
        "http2_protocol_options": {"max_concurrent_streams": 65536},
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    connection = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    listener = {"name": "bench", "address": _address(place.port), "filter_chains": [{"filters": [connection]}]}
    file = place.directory / "envoy.json"
    file.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    options = ["--concurrency", 1, "--log-level", "warning", "--disable-hot-restart"]
    return [install.command("envoy", "envoy"), "-c", file, *options]


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def smg_handshake_port(directory: Path) -> int:
    """Where SMG's router lets ranks in: by a hash of the path of its sockets."""
    return 20000 + fnv1a(os.fsencode(directory / "engine")) % 10000


def fnv1a(data: bytes) -> int:
    """The hash of that name, in 64 bits."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def _smg_router(place: Place) -> list[object]:
    place.directory.chmod(0o700)
    model = install.make_tokenizer(place.directory / "model")
    return [
        *(install.command("smg", "smg"), "launch", "--host", "127.0.0.1", "--port", place.port),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", free_port(), "--log-level", "warn"),
        *("--worker-urls", f"ipc://{place.directory / 'engine'}", "--backend", "vllm"),
        *("--model-path", model, "--policy", "round_robin"),
    ]


def _http_router(name: str) -> Callable[[Place], list[object]]:
    def command(place: Place) -> list[object]:
        return [
            *(install.command(name, name), *(["launch"] if name == "sglang-router" else [])),
            *("--host", "127.0.0.1", "--port", place.port, "--prometheus-port", free_port()),
            *("--worker-urls", f"http://127.0.0.1:{place.engine_port}", "--policy", "round_robin"),
            *("--log-level", "warning" if name == "vllm-router" else "warn"),
        ]

    return command


_PEERS = (
    Peer(name="smg", title="SMG 1.13 Rust servicer", command=_servicer, same_job=True),
    Peer(name="fast", title="ours, transport fast", command=_ours("fast"), same_job=True),
    Peer(name="python", title="ours, fast, not compiled", command=_ours("fast", is_compiled=False), same_job=True),
    Peer(name="grpcio", title="ours, transport grpcio", command=_ours("grpcio"), same_job=True),
    Peer(name="prototype", title="plain grpc.aio prototype", command=_prototype),
    Peer(name="envoy", title="Envoy, bare gRPC proxy", command=_envoy, engine="grpc"),
    Peer(
        name="smg-router",
        title="SMG 1.13 router, HTTP text",
        command=_smg_router,
        path="/generate",
        extra_events=2,
        model=lambda place: str(place.directory / "model"),
        engine_port=smg_handshake_port,
    ),
    Peer(
        name="vllm-router",
        title="vllm-router, HTTP proxy",
        command=_http_router("vllm-router"),
        engine="http",
        path="/v1/completions",
    ),
    Peer(
        name="sglang-router",
        title="sglang-router, HTTP proxy",
        command=_http_router("sglang-router"),
        engine="http",
        path="/v1/completions",
    ),
)
PEERS = {peer.name: peer for peer in _PEERS}

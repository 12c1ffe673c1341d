"""A gateway and its ranks as the processes that an operator would start, on free loopback ports."""

import functools
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_stub.tokens import expected_tokens
from tests.support.grpcurl import Answer, grpcurl
from tests.support.processes import WAIT_S, Process, RankProcess, free_port, wait_until
from tests.support.transport import TRANSPORT

VOCAB_SIZE = 32_000
MAX_CONTEXT_TOKENS = 16_384


def expected(prompt: list[int], count: int, seed: int | None = None) -> list[int]:
    """What every rank answers."""
    return expected_tokens(prompt, seed, count, VOCAB_SIZE)


class Ports(msgspec.Struct, frozen=True):
    """The gateway's addresses."""

    grpc: str
    admin: str
    metrics: str
    handshake: str


class Deployment:
    """A gateway and its ranks in a short-lived directory. `stub` are settings of the ranks, `config` are sections.

    A rank's step takes `step_ms`. `start_gateway` again after its end starts it on the same addresses;
    `keeps_state` lets it re-attach.
    """

    transport = TRANSPORT

    def __init__(
        self,
        protocol: str,
        ranks: int = 2,
        *,
        step_ms: float = 5.0,
        keeps_state: bool = False,
        stub: dict[str, Any] | None = None,
        group: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.protocol = protocol
        self.ranks = ranks
        self.ports = Ports(*(f"127.0.0.1:{free_port()}" for _ in range(4)))
        self._stub = _paced(step_ms) | (stub or {})
        # Short: the paths of ipc sockets lie below it, and those are limited to 107 bytes.
        self._temporary = tempfile.TemporaryDirectory(prefix="rge2e-")
        self.directory = Path(self._temporary.name)
        self._group = {
            "name": "main",
            "protocol": protocol,
            "handshake": f"tcp://{self.ports.handshake}",
            "ranks": ranks,
        } | (group or {})
        self._sections = config | ({"state_dir": str(self.directory / "state")} if keeps_state else {})
        self._cleanup = ExitStack()
        self._names: dict[str, int] = {}
        self.gateway: Process = None  # type: ignore[assignment]
        self.engines: list[RankProcess] = []

    @functools.cached_property
    def config_path(self) -> Path:
        ports = self.ports
        listen = {"grpc": ports.grpc, "admin": ports.admin, "metrics": ports.metrics, "transport": self.transport}
        model = {"name": "m", "max_context_tokens": MAX_CONTEXT_TOKENS, "vocab_size": VOCAB_SIZE}
        config = {"version": 1, "listen": listen, "model": model, "groups": [self._group], **self._sections}
        path = self.directory / "gateway.yaml"
        path.write_text(json.dumps(config, indent=1))
        return path

    def __enter__(self) -> Self:
        self._cleanup.__enter__()
        self._cleanup.callback(self._temporary.cleanup)
        return self

    def __exit__(self, *details: object) -> None:
        self._cleanup.__exit__(*details)

    def start(self) -> Self:
        """The gateway and one process with all ranks, READY."""
        self.start_gateway()
        self.start_ranks()
        self.wait_ready()
        return self

    def process(self, name: str, *command: object) -> Process:
        """Any further process that ends with the deployment."""
        process = Process(self.directory, self._numbered(name), *command)
        self._cleanup.callback(process.close)
        return process

    def start_gateway(self) -> Process:
        self.gateway = self.process("gateway", "rankgate", "serve", "-c", self.config_path)
        return self.gateway

    def start_ranks(self, count: int | None = None, start_index: int = 0) -> RankProcess:
        """A process with `count` ranks (all of them unless told)."""
        path = self.directory / "ranks.yaml"
        path.write_text(json.dumps(self._stub))
        arguments = ["--protocol", self.protocol, "--handshake", f"tcp://{self.ports.handshake}", "--config", path]
        arguments += ["--ranks", count or self.ranks, "--start-index", start_index]
        engine = RankProcess(self.directory, self._numbered("ranks"), *arguments)
        self._cleanup.callback(engine.close)
        self.engines.append(engine)
        return engine

    def wait_ready(self) -> None:
        """Wait until every rank is READY and the gateway says that it is ready."""

        def is_ready() -> bool:
            for process in (self.gateway, *self.engines):
                assert process.is_running, f"{process.name} has ended"
            return self.states() == ["READY"] * self.ranks and health(self.ports.grpc, "readiness") == "SERVING"

        try:
            wait_until(is_ready, "all ranks")
        except AssertionError as error:
            logs = [process.log[-3000:] for process in (self.gateway, *self.engines)]
            raise AssertionError("\n".join((f"{error}; the logs end with", *logs))) from None

    def states(self) -> list[str]:
        """The ranks' states as the log tells them, ABSENT before the first."""
        states = ["ABSENT"] * self.ranks
        for event in self.gateway.events("rank_state"):
            states[event["rank"]] = event["new"]
        return states

    def call(self, method: str, data: Mapping[str, Any] | str | None = None, **options: Any) -> Answer:
        """`Generate`, or `AdminService/Explain`, with grpcurl; `HEALTH/…` and full names go as they are."""
        service, _, _ = method.rpartition("/")
        address = self.ports.admin if service == "AdminService" else self.ports.grpc
        if "." not in service:
            method = f"gateway.v1.{method if service else f'GatewayService/{method}'}"
        return grpcurl(address, method, data=data, **options)

    def scrape(self) -> str:
        """The metrics page."""
        with urlopen(f"http://{self.ports.metrics}/metrics", timeout=WAIT_S) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        page = self.scrape()
        assert f"# TYPE {name} " in page, f"there is no metric {name}"
        lines = (line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _numbered(self, name: str) -> str:
        self._names[name] = number = self._names.get(name, 0) + 1
        return f"{name}-{number}"


def _paced(step_ms: float) -> dict[str, Any]:
    """Ranks of the shared model that take the same time for every step."""
    return {
        "model": {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_CONTEXT_TOKENS},
        "step_time": {
            "fixed_ms": step_ms,
            "per_prefill_token_us": 0.0,
            "per_decode_row_us": 0.0,
            "per_context_token_ns": 0.0,
            "per_prefill_context_ns": 0.0,
        },
    }


def health(address: str, name: str) -> str:
    """The status of a health name: SERVING, NOT_SERVING, or the code of the error."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S / 4
            )
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

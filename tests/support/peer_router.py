"""An SMG router as a process, with the HTTP calls that the tests make to it.

"engine" is what the router calls a worker: the gateway, or with `dp_aware` one rank of it.
"""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from tests.support.peers import CALL_S, MODEL, PEERS_BIN, RANKS, Process, free_ports, until


class EventStream:
    """An answer as server-sent events. `drop` is what a client that goes away looks like."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response = connection, response

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The events up to `[DONE]`, which must come."""
        while line := self._response.readline():
            if line.startswith(b"data: "):
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
        raise AssertionError("the stream ended without [DONE]")

    def drop(self) -> None:
        self._response.close()
        self._connection.close()


class Router:
    """One SMG process in front of a gateway's port. With `dp_aware` it addresses the ranks one by one."""

    def __init__(self, directory: Path, grpc_port: int, *, dp_aware: bool) -> None:
        self.engine_url = f"grpc://127.0.0.1:{grpc_port}"
        self.port, self.metrics_port = free_ports(2)
        self.dp_aware = dp_aware
        self.process = Process(
            directory,
            "router-dp" if dp_aware else "router",
            [
                *(PEERS_BIN / "smg", "launch", "--host", "127.0.0.1", "--port", self.port),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", self.metrics_port),
                *("--worker-urls", self.engine_url, "--policy", "round_robin"),
                *("--worker-startup-check-interval", 1, "--load-monitor-interval", 1),
                *("--health-check-interval-secs", 1, "--health-failure-threshold", 1),
                *("--health-success-threshold", 1, "--shutdown-grace-period-secs", 2),
                *(["--dp-aware"] if dp_aware else []),
            ],
        )

    def wait_ready(self) -> None:
        count = RANKS if self.dp_aware else 1
        until(
            lambda: len(self.healthy_engines()) == count and self._has_tokenizer(), f"{self.process.name} to be ready"
        )

    def engines(self) -> dict[str, dict[str, Any]]:
        """What the router has registered, by URL; empty while it does not answer yet."""
        self.process.check()
        try:
            return {engine["url"]: engine for engine in self.get("/workers")["workers"]}
        except ConnectionRefusedError:
            return {}

    def healthy_engines(self) -> list[str]:
        return sorted(url for url, engine in self.engines().items() if engine["is_healthy"])

    def reported_running(self) -> dict[str, dict[int, int]]:
        """Per registered URL, the running requests per rank as the router last polled them."""
        return {
            url: {load["dp_rank"]: load["num_running_reqs"] for load in engine["engine_load"]["loads"]}
            for url, engine in self.engines().items()
            if "engine_load" in engine
        }

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a Prometheus metric of the router over the series that have these labels."""
        text = self._request("GET", "/metrics", None, self.metrics_port)[1].decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))

    def get(self, path: str) -> Any:
        status, body = self._request("GET", path, None, self.port)
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        """The JSON answer; the call must end with `status`."""
        got, answer = self._request("POST", path, {"model": MODEL} | body, self.port)
        assert got == status, answer
        return json.loads(answer)

    def stream(self, path: str, body: dict[str, Any]) -> EventStream:
        connection = self.send(path, body | {"stream": True})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return EventStream(connection, response)

    def send(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        """Send a request without waiting for its answer; the caller closes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)
        connection.request("POST", path, json.dumps({"model": MODEL} | body), {"Content-Type": "application/json"})
        return connection

    def _has_tokenizer(self) -> bool:
        return any(known["name"] == MODEL for known in self.get("/v1/tokenizers")["tokenizers"])

    def _request(self, method: str, path: str, body: Any, port: int) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_S)
        with contextlib.closing(connection):
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()

"""A real router in front of the gateway: processes on loopback, and what a test needs to see of each.

`Site` is one gateway with stub ranks, `Tokenizer` what a router turns text into ids with, and
`tests.support.peer_router` has the router. Everything runs as the installed commands, is waited for with
a bound and is ended by its own pid.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.json_format import MessageToDict

from engine_stub.control_client import ask
from engine_stub.tokens import expected_tokens
from gateway.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
PEERS_BIN = ROOT / ".venv-peers" / "bin"
OWN_BIN = Path(sys.executable).parent
MODEL = "tiny"
RANKS = 2
FAMILIES = ("vllm", "tokenspeed")
MAX_CONTEXT_TOKENS = 16_384
WAIT_S = 45.0
"""Bound of every wait. Nothing takes more than a few seconds unless the machine is very busy."""
_STOP_S = 10.0
CALL_S = 30.0
T = TypeVar("T")


def until(get: Callable[[], T], what: str) -> T:
    """The first true value of `get`; raises AssertionError when none came in time."""
    deadline = time.monotonic() + WAIT_S
    while not (value := get()):
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)
    return value


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody uses, below the range that outgoing connections are given."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} free ports")


class Process:
    """A command with its output in a file."""

    def __init__(self, directory: Path, name: str, command: list[object]) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        # No proxy of the surroundings may come between, and nothing may be looked up outside.
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=environment | {"HF_HUB_OFFLINE": "1"},
            )

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def check(self) -> None:
        code = self._process.poll()
        assert code is None, f"{self.name} ended with code {code}:\n{self.log()[-3000:]}"

    def stop(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Tokenizer:
    """A tiny tokenizer in a directory that both the router and the test read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        made = self._ask({"make": str(directory), "text": (ROOT / "LICENSE").read_text()})
        self.vocab_size: int = made["vocab_size"]
        self.special_ids: list[int] = made["special_ids"]

    def encode(self, *texts: str) -> list[list[int]]:
        return self._ask({"dir": str(self.directory), "encode": texts})

    def decode(self, *sequences: list[int]) -> list[str]:
        return self._ask({"dir": str(self.directory), "decode": sequences})

    def chat_prompt(self, content: str) -> list[int]:
        """The ids of one user message under the tokenizer's chat template."""
        return self.chat_prompts(content)[0]

    def chat_prompts(self, *contents: str) -> list[list[int]]:
        """The same for several conversations of one message each."""
        return self.encode(*(f"<|turn|>user\n{content}\n<|turn|>assistant\n" for content in contents))

    def _ask(self, request: dict[str, Any]) -> Any:
        tool = ROOT / "tests" / "peers" / "tokenizer_tool.py"
        command = [PEERS_BIN / "python", tool]
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)


class Site:
    """A gateway and its ranks, for a router to be put in front of."""

    def __init__(self, directory: Path, family: str, tokenizer: Tokenizer) -> None:
        self.directory, self.family, self.tokenizer = directory, family, tokenizer
        self.grpc_port, admin, handshake, control = free_ports(4)
        self._control = f"tcp://127.0.0.1:{control}"
        self._write_configs(f"127.0.0.1:{admin}", f"tcp://127.0.0.1:{handshake}")
        self.gateway = Process(directory, "gateway", [OWN_BIN / "rankgate", "serve", "-c", "gateway.json"])
        self._ranks = Process(
            directory,
            "ranks",
            [
                *(OWN_BIN / "engine-stub", "serve", "--protocol", family, "--ranks", RANKS, "--config", "ranks.json"),
                *("--handshake", f"tcp://127.0.0.1:{handshake}", "--control", self._control),
            ],
        )
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{port}") for port in (self.grpc_port, admin)]
        self._service = gateway_pb2_grpc.GatewayServiceStub(self._channels[0])
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channels[1])

    def wait_ready(self) -> None:
        until(lambda: len(self.ready_ranks()) == RANKS, "all ranks to be READY")

    def list_ranks(self) -> list[gateway_pb2.Rank]:
        return list(self._service.ListRanks(gateway_pb2.ListRanksRequest(), timeout=CALL_S).ranks)

    def ready_ranks(self) -> list[int]:
        """Empty while the gateway does not answer yet."""
        self.gateway.check()
        self._ranks.check()
        with contextlib.suppress(grpc.RpcError):
            return [rank.rank for rank in self.list_ranks() if rank.state == gateway_pb2.RANK_STATE_READY]
        return []

    def in_flight(self) -> list[int]:
        return [rank.in_flight for rank in self.list_ranks()]

    def decisions(self, request_id: str) -> list[dict[str, Any]]:
        """The gateway's decisions for one request, as it recorded them."""
        answer = self._admin.ListDecisions(admin_pb2.ListDecisionsRequest(limit=1000), timeout=CALL_S)
        found = [MessageToDict(decision) for decision in answer.decisions]
        return [decision for decision in found if decision["label"] == request_id]

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.gateway.log().splitlines()]

    def ended(self, request_id: str) -> dict[str, Any]:
        """The terminal log line of one request, once it is there."""
        return until(lambda: next(self._terminal_lines(request_id), None), f"the terminal line of {request_id}")

    def ranks(self, op: str = "state", **request: Any) -> list[dict[str, Any]]:
        """Look at the ranks, or do something to them, over the stub's control socket."""
        reply = ask(self._control, {"op": op} | request, CALL_S)
        assert reply["ok"], reply
        return reply["ranks"]

    def expected(self, prompt: list[int], count: int, seed: int | None = None) -> list[int]:
        """What any rank generates for a prompt."""
        return expected_tokens(prompt, seed, count, self.tokenizer.vocab_size, self.tokenizer.special_ids)

    def stop(self) -> None:
        """The gateway first: it drains, and the ranks never see it vanish under them."""
        for channel in self._channels:
            channel.close()
        self.gateway.stop()
        self._ranks.stop()

    def _terminal_lines(self, request_id: str) -> Iterator[dict[str, Any]]:
        return (
            line for line in self.log_lines() if line["event"] == "request_ended" and line["request_id"] == request_id
        )

    def _write_configs(self, admin: str, handshake: str) -> None:
        vocab_size, special_ids = self.tokenizer.vocab_size, self.tokenizer.special_ids
        group = {"name": "peers", "protocol": self.family, "handshake": handshake, "ranks": RANKS, "min_ready": RANKS}
        gateway = {
            "version": 1,
            "listen": {"grpc": f"127.0.0.1:{self.grpc_port}", "admin": admin, "metrics": None},
            "model": {
                "name": MODEL,
                "max_context_tokens": MAX_CONTEXT_TOKENS,
                "vocab_size": vocab_size,
                "eos_token_ids": special_ids[:1],
                "tokenizer_path": str(self.tokenizer.directory),
            },
            "groups": [group],
            "policy": {"preset": "lmetric", "seed": 1},
        }
        ranks = {
            "model": {
                "name": MODEL,
                "vocab_size": vocab_size,
                "max_model_len": MAX_CONTEXT_TOKENS,
                "eos_token_ids": special_ids[:1],
                "excluded_token_ids": special_ids,
            }
        }
        (self.directory / "gateway.json").write_text(json.dumps(gateway))
        (self.directory / "ranks.json").write_text(json.dumps(ranks))

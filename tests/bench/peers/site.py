"""One running peer with what stands behind it, and measurements of it."""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2

from tests.bench.peers.emitter import Script
from tests.bench.peers.install import CLIENT
from tests.bench.peers.kinds import Peer, Place
from tests.bench.peers.process import (
    LOAD_CORE,
    SERVER_CORE,
    PeerError,
    Process,
    cpu_s,
    free_port,
    own_python,
    rss_mb,
    until_listening,
)
from tests.bench.peers.scenarios import Scenario

READY_S, CLIENT_S, SETTLE_S = 40.0, 90.0, 8.0
TEXT_VOCAB_SIZE = 600
PROBE = Scenario(name="probe", tokens=1, conns=1, streams=1, warm_s=0.05, measure_s=0.05)
IDLE = msgspec.json.encode(Script()).decode()
ENGINES = {"zmq": "emitter", "grpc": "upstream", "http": "http_engine"}

Figures = dict[str, float]


class Site:
    """A peer that serves. Raises PeerError where it does not."""

    def __init__(self, peer: Peer, directory: Path, ranks: int = 1) -> None:
        directory.mkdir()
        self.peer, self._directory = peer, directory
        self._stack = contextlib.ExitStack()
        self.place = Place(directory, free_port(), peer.engine_port(directory), ranks)
        self._port = self.place.port
        self._idle_rss_mb = 0.0
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything."""
        self._stack.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[Self]:
        """Nothing of it runs: an idle peer's timers would empty the caches of the one that is measured."""
        processes = (self.server, self._engine)
        try:
            for process in processes:
                process.pause()
            yield self
        finally:
            for process in processes:
                process.resume()

    def _start(self) -> None:
        place = self.place
        command = self.peer.command(place)
        if self.peer.engine == "zmq":
            self.server = self._process(SERVER_CORE, command, "server")
            address = f"tcp://127.0.0.1:{place.engine_port}"
            self._engine = self._process(LOAD_CORE, own_python("emitter", address, place.ranks), "engine", speaks=True)
            self._engine.expect("READY")
        else:
            engine = own_python(ENGINES[self.peer.engine], place.engine_port)
            self._engine = self._process(LOAD_CORE, engine, "engine", speaks=True)
            self._engine.expect("READY")
            self.server = self._process(SERVER_CORE, command, "server")
        until_listening(place.port, self.server)
        self._until_serving()
        self._settle()
        self._idle_rss_mb = rss_mb(self.server.pid)

    def _process(self, core: str, command: list[object], name: str, *, speaks: bool = False) -> Process:
        process = Process(core, command, self._directory / f"{name}.log", speaks=speaks)
        self._stack.callback(process.stop)
        return process

    def _until_serving(self) -> None:
        """Requests are answered: ranks may join after the port is open."""
        deadline = time.monotonic() + READY_S
        while True:
            try:
                self.measure(PROBE)
            except PeerError:
                if time.monotonic() > deadline:
                    raise
                self.server.check()
                time.sleep(0.3)
            else:
                return

    def _settle(self) -> None:
        """Wait until the server has nothing left to do from before."""
        deadline = time.monotonic() + SETTLE_S
        used, quiet = cpu_s(self.server.pid), 0
        while quiet < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            used, before = cpu_s(self.server.pid), used
            quiet = quiet + 1 if used - before < 0.005 else 0

    @contextlib.contextmanager
    def directly(self) -> Iterator[Self]:
        """The client asks the server behind a proxy."""
        self._port = self.place.engine_port
        try:
            yield self
        finally:
            self._port = self.place.port

    def measure(self, scenario: Scenario) -> Figures:
        """Run a scenario once. Raises PeerError."""
        script = Script(
            step_ms=scenario.step_ms,
            tokens_per_row=scenario.tokens_per_row,
            hold=scenario.hold,
            vocab_size=TEXT_VOCAB_SIZE if self.peer.is_text else 32000,
        )
        self._engine.tell(msgspec.json.encode(script).decode())
        if scenario is not PROBE:
            self._settle()
        self.server.check()
        body = self._directory / "body"
        body.write_bytes(
            text_body(scenario, self.peer.model(self.place)) if self.peer.is_text else engine_body(scenario)
        )
        try:
            counted, used_s, rss = self._load(self._client(scenario, body))
        finally:
            self._engine.tell(IDLE)
        if self.peer.is_text:
            counted["tokens"] = max(0, counted["messages"] - self.peer.extra_events * counted["requests"])
        return figures(scenario, counted, used_s, rss, self._idle_rss_mb)

    def _client(self, scenario: Scenario, body: Path) -> list[object]:
        command = ["taskset", "-c", LOAD_CORE, CLIENT, self._port, self.peer.path, body]
        for name in ("conns", "streams", "slow", "ramp_s", "warm_s", "measure_s"):
            command += [f"--{name.replace('_', '-')}", getattr(scenario, name)]
        return [*command, *(["--hold"] if scenario.hold else []), *(["--sse"] if self.peer.is_text else [])]

    def _load(self, command: list[object]) -> tuple[dict[str, Any], float, float]:
        """Run the client. Returns what it counted, the server's CPU in its measured time, and its memory at the end."""
        client = subprocess.Popen(
            [str(each) for each in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        marks: dict[str, float] = {}
        said, rss = "", 0.0
        assert client.stderr is not None
        assert client.stdout is not None
        try:
            for line in client.stderr:  # the client bounds its own time
                if line.strip() in {"WARM", "DONE"}:
                    marks[line.strip()] = cpu_s(self.server.pid)
                    rss = rss_mb(self.server.pid)
                else:
                    said += line
            output = client.stdout.read()
            client.wait(CLIENT_S)
        finally:
            client.kill()
            client.wait()
            client.stderr.close()
            client.stdout.close()
        if len(marks) < 2 or not output:
            raise PeerError(said.strip() or "the client said nothing")
        return json.loads(output), marks["DONE"] - marks["WARM"], rss


def figures(scenario: Scenario, counted: dict[str, Any], used_s: float, rss: float, idle_rss: float) -> Figures:
    """What one measurement says. Raises PeerError if requests failed or nothing came."""
    if counted["errors"]:
        raise PeerError(f"{counted['errors']} of {counted['requests']} requests failed: {counted['error']}")
    tokens, requests = counted["tokens"], counted["requests"]
    if not tokens and not scenario.hold:
        raise PeerError("no token came")
    result = {name: float(value) for name, value in counted.items() if name != "error"}
    result |= {
        "cpu_s": used_s,
        "cpu_share": used_s / counted["elapsed_s"],
        "tokens_per_s": tokens / counted["elapsed_s"],
        "requests_per_s": requests / counted["elapsed_s"],
        "rss_mb": rss,
        "kb_per_stream": (rss - idle_rss) * 1e3 / scenario.live,
    }
    if tokens:
        result["us_per_token"] = used_s / tokens * 1e6
        # Requests end in waves: tokens, not ends, tell how many were served in the measured time.
        result["us_per_request"] = used_s / tokens * scenario.tokens * 1e6
    return result


def engine_body(scenario: Scenario) -> bytes:
    """The request of the engine service; its id is the client's to fill in."""
    sampling = vllm_engine_pb2.SamplingParams(max_tokens=scenario.tokens, ignore_eos=True, temperature=0.0)
    request = vllm_engine_pb2.GenerateRequest(
        request_id="#" * 12,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=prompt(scenario)),
        sampling_params=sampling,
        stream=True,
    )
    message: bytes = request.SerializeToString()
    return message


def text_body(scenario: Scenario, model: str) -> bytes:
    """The same for routers that speak HTTP: ids where they take them, and as many words beside it."""
    ids = [each % TEXT_VOCAB_SIZE for each in prompt(scenario)]
    sampling = {"max_new_tokens": scenario.tokens, "ignore_eos": True, "temperature": 0.0}
    body = {"model": model, "prompt": "word " * len(ids), "max_tokens": scenario.tokens, "stream": True}
    return json.dumps(body | {"input_ids": ids, "sampling_params": sampling}).encode()


def prompt(scenario: Scenario) -> list[int]:
    """Token ids, most of which take two bytes."""
    return [130 + 37 * index % 12000 for index in range(scenario.prompt_tokens)]

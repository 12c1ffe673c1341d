"""Real vLLM engine cores behind a real gateway process: the ranks are forks of one server that has imported vLLM."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.deployment import Deployment
from tests.support.processes import ROOT, environment, wait_until

VLLM_BIN = ROOT / os.environ.get("RANKGATE_TEST_VLLM_VENV", ".venv-vllm") / "bin"
SERVER = ROOT / "tests" / "real_vllm" / "rank_server.py"
RANKS = 2
VOCAB_SIZE = 512
MAX_CONTEXT_TOKENS = 2048
EOS = 2
IMPORT_S = 100.0
START_S = 60.0

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.02,
}
"""A Llama of 200 kB; its dummy weights are the same in every process."""


MOE = MODEL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
"""The same as a mixture of experts: its ranks step together."""


class VllmRank:
    """One engine core process."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self._log = log

    @property
    def is_running(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not self.is_running, f"rank process {self.pid} to be gone")

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class RankServer:
    """The process with vLLM in it. `close` ends it and every rank."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, model in (("dense", MODEL), ("moe", MOE)):
            (directory / name).mkdir()
            (directory / name / "config.json").write_text(json.dumps(model))
        self._orders = 0
        self._log = directory / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [VLLM_BIN / "python", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
                env=environment(),
                text=True,
                start_new_session=True,
            )
        answer = self._answer()
        assert answer == "ready", (answer, self._log.read_text()[-3000:])

    def start(self, handshake: str, rank: int, ranks: int, *, is_moe: bool = False, **settings: Any) -> VllmRank:
        """Fork a rank that dials `tcp://HOST:PORT`; `settings` are engine arguments."""
        self._orders += 1
        log = self.directory / f"rank-{self._orders}.log"
        model = str(self.directory / ("moe" if is_moe else "dense"))
        order = {"model": model, "handshake": handshake, "rank": rank, "ranks": ranks, "is_moe": is_moe}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order | {"log": str(log), "settings": settings}) + "\n")
        self._process.stdin.flush()
        return VllmRank(int(self._answer()), log)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, f"the rank server has ended: {self._log.read_text()[-3000:]}"
        return line


class VllmSite(Deployment):
    """A gateway process whose ranks are real. `settings` are engine arguments of every rank."""

    def __init__(
        self,
        server: RankServer,
        *,
        ranks: int = RANKS,
        is_moe: bool = False,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        model = {
            "name": "tiny",
            "max_context_tokens": MAX_CONTEXT_TOKENS,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": [EOS],
        }
        super().__init__("vllm", ranks, model=model, **options)
        self._server = server
        self._settings = {"is_moe": is_moe} | (settings or {})
        self.processes: list[VllmRank | None] = [None] * ranks
        self._cleanup.callback(self.kill_ranks)

    def start(self) -> "VllmSite":
        self.start_gateway()
        self.start_missing()
        self.wait_ready()
        return self

    def start_rank(self, rank: int) -> VllmRank:
        """A process for one rank; `wait_ready` waits for it."""
        process = self._server.start(f"tcp://{self.ports.handshake}", rank, self.ranks, **self._settings)
        self.processes[rank] = process
        return process

    def start_missing(self) -> None:
        """Processes for the ranks that have none that runs."""
        for rank, process in enumerate(self.processes):
            if process is None or not process.is_running:
                self.start_rank(rank)

    def restart_unready(self) -> None:
        """New processes for the ranks that an earlier test has left dead, or deaf."""
        for process, state in zip(self.processes, self.states(), strict=True):
            if state != "READY" and process is not None:
                process.kill()
        self.start_missing()
        self.wait_ready()

    def kill_ranks(self) -> None:
        for process in self.processes:
            if process is not None:
                process.kill()

    def rank_logs(self) -> str:
        return "\n".join(process.log[-2000:] for process in self.processes if process is not None)

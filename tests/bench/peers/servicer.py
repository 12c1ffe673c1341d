"""The direct peer, with the interpreter of the peers' environment: SMG's Rust servicer for the vLLM engine service.

`servicer.py PORT HANDSHAKE_PORT RANKS`: gRPC on PORT, ranks dial HANDSHAKE_PORT.
"""

import sys
import tempfile
import time
from pathlib import Path

from smg.servicer import VllmGrpcServer  # type: ignore[import-not-found]  # only in the peers' environment

START_S = 60.0


def main() -> None:
    """Serve until ended from outside."""
    port, handshake, ranks = map(int, sys.argv[1:4])
    with tempfile.TemporaryDirectory(prefix="rankgate-bench-smg-") as directory:
        server = VllmGrpcServer(
            f"127.0.0.1:{port}",
            f"ipc://{Path(directory) / 'engine'}",
            f"tcp://127.0.0.1:{handshake}",
            "bench",
            engine_count=ranks,
            max_context_length=131072,
            vocab_size=32000,
            data_parallel_size=ranks,
            eos_token_ids=[2],
        )
        began = time.monotonic()
        while not server.engine_ready and time.monotonic() - began < START_S:
            time.sleep(0.05)
        server.set_serving(True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()

"""The way to a rank and back without any gateway: what a time to first token can't be below. `direct HANDSHAKE_PORT`.

One request at a time, from this process to a scripted rank; prints the quantiles in milliseconds as JSON.
"""

import json
import sys
import tempfile
import time

import msgspec
import zmq

REQUESTS, WARM, WAIT_MS = 1000, 200, 30_000
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def bound(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
    """A socket that gives up."""
    made = context.socket(kind)
    made.rcvtimeo = WAIT_MS
    made.linger = 0
    made.bind(address)
    return made


def main() -> None:
    """Let the rank in, ask, report."""
    context = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="rankgate-bench-direct-") as directory:
        handshake = bound(context, zmq.ROUTER, f"tcp://127.0.0.1:{sys.argv[1]}")
        requests = bound(context, zmq.ROUTER, f"ipc://{directory}/in")
        outputs = bound(context, zmq.PULL, f"ipc://{directory}/out")
        identity, _ = handshake.recv_multipart()
        addresses = {"inputs": [f"ipc://{directory}/in"], "outputs": [f"ipc://{directory}/out"]}
        handshake.send_multipart([identity, encode({"addresses": addresses, "parallel_config": {}})])
        requests.recv_multipart()
        times = []
        for number in range(REQUESTS):
            began = time.perf_counter()
            message = encode([f"d{number}", list(range(16)), None, {"max_tokens": 1}])
            requests.send_multipart([identity, b"\x00", message])
            assert decode(outputs.recv())[1]
            times.append((time.perf_counter() - began) * 1e3)
        times = sorted(times[WARM:])
        print(json.dumps({"ttft_p50_ms": times[len(times) // 2], "ttft_p99_ms": times[len(times) * 99 // 100]}))
        context.destroy(linger=0)


if __name__ == "__main__":
    main()

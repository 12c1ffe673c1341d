"""Scripted ranks on the vLLM wire, as one process: what they answer costs almost nothing to make.

`python -m tests.bench.peers.emitter HANDSHAKE RANKS` prints READY once every rank has joined. Each line on stdin is a JSON
object that changes `Script`, ends every request that is left and is answered with OK; the end of stdin ends the process.
Rows have today's full layout and tokens that differ by request and by step; every step has its scheduler's counts.
"""

import json
import random
import select
import sys
import time
from typing import Any

import msgspec
import zmq

ROW_FIELDS, VARIANTS, MAX_LIFE_S, JOIN_S = 18, 4, 3600.0, 60.0
ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
LENGTH = 1
NIL = b"\xc0"
STATS = {
    "num_waiting_reqs": 0,
    "num_skipped_waiting_reqs": 0,
    "current_wave": 0,
    "kv_cache_usage": 0.25,
    "prefix_cache_stats": {"reset": False}
    | {f"{kind}{name}": 0 for kind in ("", "preempted_") for name in ("requests", "queries", "hits")},
    "connector_prefix_cache_stats": None,
    "kv_cache_eviction_events": [],
    "spec_decoding_stats": None,
    "kv_connector_stats": None,
    "waiting_lora_adapters": {},
    "running_lora_adapters": {},
    "cudagraph_stats": None,
    "perf_stats": None,
}
encode = msgspec.msgpack.encode


class Added(msgspec.Struct, array_like=True):
    """The head of an engine request; what follows is not looked at."""

    id: str
    prompt: msgspec.Raw
    media: msgspec.Raw
    sampling: dict[str, Any]


class Script(msgspec.Struct):
    """How ranks answer: at once or a row every `step_ms`; `hold` leaves every request open after its first row."""

    step_ms: float = 0.0
    tokens_per_row: int = 1
    hold: bool = False
    vocab_size: int = 32000


class Rows:
    """The parts of rows that do not depend on their request."""

    def __init__(self, tokens_per_row: int, vocab_size: int) -> None:
        pick = random.Random(1)
        self._tails = [self._tail([pick.randrange(3, vocab_size) for _ in range(tokens_per_row)]) for _ in range(1024)]
        self._next = 0
        self.last = self._tail([7] * tokens_per_row, finish=LENGTH)
        prefill = {"num_prompt_tokens": 16, "num_computed_tokens": 16, "num_cached_tokens": 0}
        self.first = self._tail([11] * tokens_per_row, prefill=prefill)
        self.only = self._tail([11] * tokens_per_row, finish=LENGTH, prefill=prefill)

    def of(self, head: bytes) -> list[bytes]:
        """What a request with this head sends in turn."""
        at = self._next = (self._next + VARIANTS) % 1020
        return [head + tail for tail in self._tails[at : at + VARIANTS]]

    @staticmethod
    def _tail(tokens: list[int], finish: int | None = None, prefill: dict[str, int] | None = None) -> bytes:
        row = [tokens, None, None, None, finish, *[None] * 5, prefill, None, 0, *[None] * 4]
        return b"".join(map(encode, row))


class Rank:
    """One rank: its sockets and the requests that it has."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], index: int) -> None:
        self.index = index
        self._context = context
        self._number = 0
        self.configure(Script())

    def configure(self, script: Script) -> None:
        """Answer like this from now on. What was live is forgotten."""
        self.script = script
        self._rows = Rows(script.tokens_per_row, script.vocab_size)
        self.joining: list[tuple[str, int]] = []
        self.live: dict[str, list[bytes]] = {}
        self._ends: dict[int, list[str]] = {}

    def join(self, handshake: str, count: int) -> None:
        """Greet, register, say READY. Raises TimeoutError."""
        identity = self.index.to_bytes(2, "little")
        greeting = self._socket(zmq.DEALER, handshake, identity)
        greeting.send(encode({"status": "HELLO", "local": False, "headless": True}))
        if not greeting.poll(int(JOIN_S * 1e3)):
            raise TimeoutError("no INIT came")
        addresses = msgspec.msgpack.decode(greeting.recv_multipart()[-1])["addresses"]
        self.requests = self._socket(zmq.DEALER, addresses["inputs"][0], identity)
        self.requests.send(encode(self._ready_response(count)))
        self._outputs = self._socket(zmq.PUSH, addresses["outputs"][0])
        greeting.send(encode({"status": "READY", "local": False, "headless": True, "parallel_config_hash": None}))
        greeting.close(linger=1000)

    def _socket(self, kind: int, address: str, identity: bytes | None = None) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set_hwm(0)
        made.linger = 0
        if identity is not None:
            made.identity = identity
        made.connect(address)
        return made

    def _ready_response(self, count: int) -> dict[str, Any]:
        return {
            "max_model_len": 131072,
            "num_gpu_blocks": 262144,
            "block_size": 16,
            "dp_stats_address": None,
            "dtype": "bfloat16",
            "vllm_version": "0.32.0",
            "world_size": 1,
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": self.index,
            "max_num_seqs": 16384,
            "max_num_batched_tokens": 65536,
            "instance_id": f"bench-{self.index}-of-{count}",
            "kv_cache_size_tokens": 262144 * 16,
        }

    def read(self, decoder: msgspec.msgpack.Decoder[Added]) -> None:
        """Take everything that has come."""
        while True:
            try:
                kind, payload, *_ = self.requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if kind == ADD:
                request = decoder.decode(payload)
                self.joining.append((request.id, request.sampling["max_tokens"]))
            elif kind == ABORT:
                for each in msgspec.msgpack.decode(payload):
                    self.live.pop(each, None)
            elif kind == UTILITY:
                call = msgspec.msgpack.decode(payload)[1]
                self._outputs.send(encode([self.index, [], None, time.time(), [call, None, [None, None]], *[None] * 4]))

    def step(self) -> None:
        """Send a row for every request, if there is any."""
        self._number += 1
        number, live = self._number, self.live
        ending = [each for each in self._ends.pop(number, ()) if live.pop(each, None)]
        variant = number % VARIANTS
        rows = [row[variant] for row in live.values()]
        rows += [self._head(each) + self._rows.last for each in ending]
        if self.joining:
            rows += [self._first(*each) for each in self.joining]
            self.joining = []
        if rows:
            self._outputs.send(self._batch(rows))

    def _first(self, request_id: str, tokens: int) -> bytes:
        """The first row of a request that joins."""
        head, count = self._head(request_id), -(-tokens // self.script.tokens_per_row)
        if count == 1 and not self.script.hold:
            return head + self._rows.only
        if not self.script.hold:
            self.live[request_id] = self._rows.of(head)
            self._ends.setdefault(self._number + count - 1, []).append(request_id)
        return head + self._rows.first

    @staticmethod
    def _head(request_id: str) -> bytes:
        return b"\xdc\x00" + bytes((ROW_FIELDS,)) + encode(request_id)

    def _batch(self, rows: list[bytes]) -> bytes:
        stats = STATS | {"num_running_reqs": len(self.live), "step_counter": self._number}
        head = b"\x99" + encode(self.index) + b"\xdd" + len(rows).to_bytes(4, "big")
        return b"".join((head, *rows, encode(stats), encode(time.time()), NIL * 5))


def serve(ranks: list[Rank], commands: Any) -> None:
    """Step every rank until the commands end. Ranks of one process step at different moments, as real ones do."""
    decoder = msgspec.msgpack.Decoder(Added)
    poller = zmq.Poller()
    poller.register(commands, zmq.POLLIN)
    for rank in ranks:
        poller.register(rank.requests, zmq.POLLIN)
    began = time.monotonic()
    due = began
    turn = 0
    while time.monotonic() - began < MAX_LIFE_S:
        step_s = ranks[0].script.step_ms / 1e3
        if step_s:
            due = max(due + step_s / len(ranks), time.monotonic() - step_s)
            time.sleep(max(0.0, due - time.monotonic()))
            asked = select.select([commands], [], [], 0)[0]
            now_ranks = [ranks[turn % len(ranks)]]
            turn += 1
        else:
            busy = any(rank.live for rank in ranks)
            asked = [each for each, _ in poller.poll(0 if busy else 1000) if each == commands.fileno()]
            now_ranks = ranks
        for rank in now_ranks:
            rank.read(decoder)
            rank.step()
        if asked and not obey(ranks, commands):
            return


def obey(ranks: list[Rank], commands: Any) -> bool:
    """One command. False at the end of them."""
    line = commands.readline()
    if not line:
        return False
    script = msgspec.convert(json.loads(line), Script)
    for rank in ranks:
        rank.configure(script)
    print("OK", flush=True)
    return True


def main() -> None:
    """Join, then serve."""
    handshake, count = sys.argv[1], int(sys.argv[2])
    context = zmq.Context()
    ranks = [Rank(context, index) for index in range(count)]
    for rank in ranks:
        rank.join(handshake, count)
    print("READY", flush=True)
    serve(ranks, sys.stdin)
    context.destroy(linger=0)


if __name__ == "__main__":
    main()

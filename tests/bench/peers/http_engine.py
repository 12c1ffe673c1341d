"""An engine's HTTP server with nothing behind it, for routers that speak HTTP only. `http_engine PORT`.

Completions as server-sent events in chunks, the paths that routers probe, and nothing else of HTTP.
"""

import asyncio
import contextlib
import json
import re
import sys

import uvloop

from tests.bench.peers.scripts import Pace

MODEL = "bench"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MAX_REQUEST_BYTES = 1 << 20
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_PROBED = {
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]},
    "/get_model_info": {"model_path": MODEL, "is_generation": True},
    "/get_server_info": {"model_path": MODEL, "served_model_name": MODEL},
    "/server_info": {"model_path": MODEL, "served_model_name": MODEL},
}


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, finish: str | None) -> bytes:
    """One completion event."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


ROW, LAST, DONE = event(" word", None), event(" word", "length"), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def answer(writer: asyncio.StreamWriter, pace: Pace, path: str, body: bytes) -> None:
    """One response."""
    if "completions" not in path and "generate" not in path:
        found = json.dumps(_PROBED.get(path, {})).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(found) + found
        )
        return
    tokens = json.loads(body).get("max_tokens", 1)
    writer.write(_HEAD)
    for index in range(tokens):
        await pace.row()
        if writer.is_closing():
            return
        writer.write(ROW if index + 1 < tokens else LAST)
        if not pace.script.step_ms:
            await writer.drain()
    writer.write(DONE)


async def serve(port: int) -> None:
    """Answer until the commands end."""
    pace = Pace()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if b" HTTP/1.1" not in head:  # a router asks what this speaks
                    break
                path = head.split(b" ", 2)[1].decode()
                length = _LENGTH.search(head)
                body = await reader.readexactly(min(int(length[1]), _MAX_REQUEST_BYTES)) if length else b""
                await answer(writer, pace, path, body)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    print("READY", flush=True)
    await pace.run()
    server.close()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))

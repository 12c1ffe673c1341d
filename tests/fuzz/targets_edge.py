"""What else clients and operators send: metadata, tokens, configuration, and the files of `state_dir`."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gateway.config.errors import ConfigError
from gateway.config.loader import parse_config
from gateway.config.security import Auth
from gateway.edges.auth import Authenticator, Role, TokenSet, error_of, parse_tokens, watched_tokens
from gateway.edges.credentials import CredentialsError
from gateway.edges.grpc_gate import CallGate
from gateway.edges.grpc_request import RequestReader
from gateway.edges.state_store import CorruptRecordError, RankRecord, StateStore
from tests.fuzz.mutator import Frame, Mutator
from tests.fuzz.target import Check, Target, accepts, check_error, damage_bytes, refusable
from tests.support.grpc_edge import make_config

ROOT = Path(__file__).resolve().parents[2]
_CLIENT, _OPERATOR = "client-" + "a" * 20, "operator-" + "b" * 20

# ---- metadata and tokens ---------------------------------------------------------------------------


@cache
def metadata_corpus() -> Sequence[Frame]:
    """Lines `name: value`; a name that ends with -bin has bytes."""
    texts = [
        "x-request-id: abc\nx-data-parallel-rank: 1\nx-tenant-id: team/a\nx-cache-salt: s\nx-queue-timeout-ms: 100",
        "x-data-parallel-rank: 1\nx-data-parallel-rank: 2\ngrpc-trace-bin: 00",
        f"authorization: Bearer {_CLIENT}\nuser-agent: a",
        f"authorization: bearer {_OPERATOR}\nauthorization: Basic abc",
    ]
    return [[text.encode()] for text in texts]


def _damage_metadata(mutator: Mutator, frame: Frame) -> Frame:
    words = (
        "x-tenant-id",
        "x-data-parallel-rank",
        "-1",
        "99999999999",
        "Bearer",
        "0",
        "٣",
        "\x00",
        "é",
        "a" * 600,
        " ",
    )
    return [mutator.text(frame[0].decode("latin-1"), words).encode("utf-8", "surrogatepass")]


class _Context:
    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None


def metadata_of(frame: Frame) -> "tuple[tuple[str, str | bytes], ...]":
    """The frame's lines as a call's metadata."""
    pairs = [line.partition(": ") for line in frame[0].decode("utf-8", "replace").split("\n")]
    return tuple((name, value.encode() if name.endswith("-bin") else value) for name, _, value in pairs)


def _check_metadata() -> Check:
    config = make_config()
    reader, gate = RequestReader(config), CallGate(config)
    tokens: Any = watched_tokens(Auth(tokens_file="/nowhere"))
    tokens.value = TokenSet([(_CLIENT, Role.CLIENT), (_OPERATOR, Role.ADMIN)])
    doors = [Authenticator("grpc", Role.CLIENT, tokens), Authenticator("admin", Role.ADMIN, tokens)]

    def run(frame: Frame) -> None:
        metadata = metadata_of(frame)
        context: Any = _Context(metadata)
        call = refusable(reader.call, context, 1.0)
        if call is not None:
            refusable(reader.request_id, "", call)
            assert call.queue_timeout_s is None or call.queue_timeout_s > 0
        error = gate.check_metadata(metadata)
        if error is not None:
            check_error(error)
        known = {f"bearer {token}" for token in (_CLIENT, _OPERATOR)}
        headers = [value for name, value in metadata if name == "authorization"]
        for door in doors:
            failure = door.check(metadata)
            if failure is not None:
                check_error(error_of(failure))
                continue
            (header,) = headers
            assert isinstance(header, str)
            scheme, _, token = header.partition(" ")
            assert f"{scheme.lower()} {token.strip()}" in known

    return run


@cache
def tokens_corpus() -> Sequence[Frame]:
    """Files of tokens."""
    return [[f"# ours\n{_CLIENT}\n\n  {_OPERATOR} # night\r\n".encode()], [f"{_CLIENT}\n".encode()]]


def _check_tokens() -> Check:
    def run(frame: Frame) -> None:
        found = accepts(CredentialsError, parse_tokens, frame[0], "f")
        assert found is None or all(token.encode("latin-1") in frame[0] for token in found)

    return run


# ---- files -----------------------------------------------------------------------------------------


@cache
def config_corpus() -> Sequence[Frame]:
    """The configurations that are shipped."""
    return [[path.read_bytes()] for path in sorted((ROOT / "configs").glob("*.yaml"))]


def _damage_config(mutator: Mutator, frame: Frame) -> Frame:
    words = (
        *(
            "null",
            "true",
            "-1",
            "0",
            "1e308",
            ".nan",
            "[]",
            "{}",
            "*a",
            "&a [*a]",
            "!!python/object:os.system x",
            "'",
            '"',
        ),
        *(
            "|",
            ">",
            "? ",
            "- ",
            "<<: *deployment",
            "version: 1",
            "99999999999999999999",
            "vllm",
            "tcp://0.0.0.0:1",
            "\t",
        ),
        *("cost: in_flight ^ 9", "2001-01-01", "0x10", "1_000", "~", "%", "@", "[" * 400, "{a: " * 400),
    )
    return [mutator.text(frame[0].decode(), words).encode("utf-8", "surrogatepass")]


def _check_config() -> Check:
    def run(frame: Frame) -> None:
        text = frame[0].decode("utf-8", "replace")
        try:
            parse_config(text, "gateway.yaml")
        except ConfigError as error:
            assert str(error).startswith("gateway.yaml")  # noqa: PT017 - the message is what an operator gets

    return run


@cache
def state_corpus() -> Sequence[Frame]:
    """Records as they are written."""
    long = (
        b'{"format": 1,"group": "main","index": 0,"engine_index": 4,"protocol": "vllm","incarnation": 3,'
        b'"input_address": "ipc:///run/x/in","output_address": "ipc:///run/x/out","is_ready": true,'
        b'"registration": "gaF4/w=="}'
    )
    short = b'{"format":1,"group":"main","index":0,"engine_index":0,"protocol":"tokenspeed","incarnation":0}'
    return [[long], [short]]


def _check_state() -> Check:
    directory = tempfile.mkdtemp(prefix="rgfuzz-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    store = StateStore(directory)
    path = store._path("main", 0)

    def run(frame: Frame) -> None:
        path.write_bytes(frame[0])
        found = accepts(CorruptRecordError, store.load, "main", 0)
        assert found is None or isinstance(found, RankRecord)

    return run


TARGETS = (
    Target("metadata", 2, metadata_corpus, _check_metadata, _damage_metadata),
    Target("token_files", 0.6, tokens_corpus, _check_tokens, damage_bytes),
    Target("state_files", 0.3, state_corpus, _check_state, damage_bytes),
    Target("configs", 0.1, config_corpus, _check_config, _damage_config),
)

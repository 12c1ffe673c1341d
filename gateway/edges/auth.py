"""Bearer tokens: who may call which listener.

A token is looked up by a keyed hash. The key is drawn at start and never leaves the process, so the time of a look-up
says nothing about how much of a guess was right; and the tokens themselves are not kept.
"""

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Literal

import structlog

from gateway.config.security import Auth
from gateway.core.errors import GatewayError, Reason
from gateway.edges.credentials import CredentialsError, Source, Watched
from gateway.edges.grpc_context import Metadata

HEADER = "authorization"
MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 512
LOG_INTERVAL_S = 10.0
_SCHEME = "bearer "
_SCHEME_CHARS = len(_SCHEME)
# RFC 6750 b64token. Checked on reading, so that a typing error is found at start and not by the clients.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

Failure = Literal["missing", "malformed", "unknown", "not_admin"]
FAILURES: tuple[Failure, ...] = ("missing", "malformed", "unknown", "not_admin")
"""Why a call was refused, for operators; callers learn only whether a valid token was too little."""

_log = structlog.get_logger("gateway.security")


class Role(IntEnum):
    """What a token allows; the greater includes the smaller."""

    CLIENT = 1
    ADMIN = 2


class TokenSet:
    """Tokens and their roles, as keyed hashes."""

    __slots__ = ("_keyed", "_roles")

    def __init__(self, tokens: Iterable[tuple[str, Role]]) -> None:
        self._keyed = hashlib.blake2b(key=secrets.token_bytes(32), digest_size=32)
        self._roles: dict[bytes, Role] = {}
        for token, role in tokens:
            digest = self._digest(token)
            self._roles[digest] = max(role, self._roles.get(digest, role))

    def role_of(self, token: str) -> Role | None:
        """None for a token that is not in the set. About 1 µs, however many there are."""
        return self._roles.get(self._digest(token))

    def _digest(self, token: str) -> bytes:
        state = self._keyed.copy()
        state.update(token.encode("utf-8", "surrogatepass"))
        return state.digest()


def watched_tokens(auth: Auth) -> Watched[TokenSet]:
    """The files of `listen.auth`."""
    sources = [Source("listen.auth.tokens_file", auth.tokens_file, is_secret=True)]
    if auth.admin_tokens_file is not None:
        sources.append(Source("listen.auth.admin_tokens_file", auth.admin_tokens_file, is_secret=True))

    def make(contents: Sequence[bytes]) -> TokenSet:
        roles = zip(sources, contents, (Role.CLIENT, Role.ADMIN), strict=False)
        return TokenSet(
            (token, role)
            for source, data, role in roles
            for token in parse_tokens(data, f"{source.setting}: {source.path}")
        )

    return Watched("tokens", sources, make, auth.reload_interval_s)


def parse_tokens(data: bytes, where: str) -> list[str]:
    """The tokens of a file, one a line; `#` starts a comment. Raises CredentialsError, which names line numbers only."""
    tokens = []
    for number, line in enumerate(data.decode("latin-1").split("\n"), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not MIN_TOKEN_CHARS <= len(text) <= MAX_TOKEN_CHARS or _TOKEN.fullmatch(text) is None:
            raise CredentialsError(
                f"{where}: line {number} is no token: one has {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} letters, digits"
                " or -._~+/ with = at its end, as `openssl rand -hex 32` makes them"
            )
        tokens.append(text)
    if not tokens:
        raise CredentialsError(f"{where}: the file has no token")
    return tokens


class Authenticator:
    """Lets the calls of one listener in that bring a token of the role it asks for.

    What `check` says holds as long as `tokens.value` is the same object.
    """

    def __init__(
        self,
        listener: str,
        role: Role,
        tokens: Watched[TokenSet],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listener = listener
        self.failures: dict[Failure, int] = dict.fromkeys(FAILURES, 0)
        self._role = role
        self.tokens = tokens
        self._clock = clock
        # The metrics page is served by threads.
        self._lock = threading.Lock()
        self._logged_at: dict[Failure, float] = {}
        self._not_logged: dict[Failure, int] = dict.fromkeys(FAILURES, 0)

    def check(self, metadata: Metadata | None) -> Failure | None:
        """Why a call with these headers may not come in; None lets it in. Reads only."""
        header: str | bytes | None = None
        for key, value in metadata or ():
            if key == HEADER:
                if header is not None:
                    return "malformed"
                header = value
        return self.check_header(header)

    def check_header(self, header: str | bytes | None) -> Failure | None:
        """The same, for the header `authorization` alone."""
        if header is None:
            return "missing"
        if not isinstance(header, str) or header[:_SCHEME_CHARS].lower() != _SCHEME:
            return "malformed"
        token = header[_SCHEME_CHARS:].strip()
        # None is longer, and hashing what a stranger sends must cost little.
        role = self.tokens.value.role_of(token) if len(token) <= MAX_TOKEN_CHARS else None
        if role is None:
            return "unknown"
        return None if role >= self._role else "not_admin"

    def refuse(self, failure: Failure, peer: str) -> GatewayError:
        """Count a refused call and return its error. Logs at most one line per reason and interval."""
        with self._lock:
            self.failures[failure] += 1
            now, logged_at = self._clock(), self._logged_at.get(failure)
            if logged_at is not None and now - logged_at < LOG_INTERVAL_S:
                self._not_logged[failure] += 1
            else:
                self._logged_at[failure] = now
                more, self._not_logged[failure] = self._not_logged[failure], 0
                _log.warning("call_refused", listener=self.listener, reason=failure, peer=peer, more_before=more)
        return error_of(failure)


def error_of(failure: Failure) -> GatewayError:
    """What a caller is told: not which part was wrong, as that helps only those who guess."""
    if failure == "not_admin":
        return GatewayError(
            Reason.PERMISSION_DENIED, "this token is not one of an operator; use one of listen.auth.admin_tokens_file"
        )
    return GatewayError(
        Reason.UNAUTHENTICATED, "the call brings no valid token; send the metadata `authorization: Bearer TOKEN`"
    )

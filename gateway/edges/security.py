"""What protects the listeners, as configured: their certificates, and an authenticator for each of them."""

import asyncio
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from gateway.config.schema import Listen
from gateway.edges.auth import Authenticator, Role, watched_tokens
from gateway.edges.credentials import Watched, grpc_credentials, watched_tls

ROLES = {"grpc": Role.CLIENT, "admin": Role.ADMIN, "metrics": Role.CLIENT}
"""What each listener asks for. The metrics page shows no more than clients can list anyway."""


class Security:
    """`start` before the listeners, `stop` after them. Without `listen.tls` and `listen.auth` it does nothing."""

    def __init__(self, listen: Listen) -> None:
        self._listen = listen
        self._tls = None if listen.tls is None else watched_tls(listen.tls)
        self._tokens = None if listen.auth is None else watched_tokens(listen.auth)
        self._authenticators: dict[str, Authenticator] = {}
        if self._tokens is not None:
            self._authenticators = {name: Authenticator(name, role, self._tokens) for name, role in ROLES.items()}
        self._tasks: list[asyncio.Task[None]] = []

    def load(self) -> None:
        """Read every file; the second time does nothing. Raises CredentialsError."""
        for watched in self._watched():
            watched.load()

    async def start(self) -> None:
        """Load, and follow the files from now on. Raises CredentialsError."""
        self.load()
        self._tasks = [
            asyncio.create_task(watched.watch(), name=f"watch {watched.name}") for watched in self._watched()
        ]

    async def stop(self) -> None:
        """Follow the files no longer; what is loaded stays in force."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def authenticator(self, listener: str) -> Authenticator | None:
        """The authenticator of `grpc`, `admin` or `metrics`; None where anyone may call."""
        return self._authenticators.get(listener)

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """New credentials for one gRPC listener; None for plaintext."""
        if self._tls is None or self._listen.tls is None:
            return None
        return grpc_credentials(self._tls, needs_client=self._listen.tls.client_ca_file is not None)

    def tls_context(self) -> Callable[[], ssl.SSLContext] | None:
        """What gives the context for a new connection, in Python; None for plaintext."""
        watched = self._tls
        return None if watched is None else lambda: watched.value.context

    def http2_context(self) -> Callable[[], ssl.SSLContext] | None:
        """The same for HTTP/2, which is agreed upon in the handshake (ALPN); None for plaintext."""
        watched = self._tls
        return None if watched is None else lambda: watched.value.http2_context

    def failures(self) -> Iterator[tuple[tuple[str, str], int]]:
        """Refused calls by (listener, reason)."""
        for authenticator in self._authenticators.values():
            for reason, count in authenticator.failures.items():
                yield (authenticator.listener, reason), count

    def loads(self) -> Iterator[tuple[tuple[str, str], int]]:
        """How often files were read anew, by (files, outcome)."""
        for watched in self._watched():
            for outcome, count in watched.counts.items():
                yield (watched.name, outcome), count

    def _watched(self) -> Iterator[Watched[Any]]:
        return (watched for watched in (self._tls, self._tokens) if watched is not None)

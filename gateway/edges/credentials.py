"""Files that say who is who: certificates, keys, tokens. Read with bounds, checked, and read again when they change.

Rules: a new state is taken as a whole or not at all; what can't be used is logged and counted once, and the old state
stays; nothing of a file's contents gets into messages or logs, and no object here shows it when it is printed.
Contents decide whether a file has changed: they are small, and unlike time stamps they can't miss a change.
"""

import asyncio
import hashlib
import os
import ssl
import stat
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import grpc
import structlog

from gateway.config.security import Tls
from gateway.edges.side_thread import in_side_thread

MAX_FILE_BYTES = 1024 * 1024
_LOAD_ATTEMPTS = 5
_BEGIN_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_END_OF_KEY_NAME = b"PRIVATE KEY-----"

ValueT = TypeVar("ValueT")
_log = structlog.get_logger("gateway.security")


class CredentialsError(OSError):
    """A file that can't be used: names the setting, the file and the cause, never the contents."""


class Source(NamedTuple):
    """A file and the setting that names it."""

    setting: str
    path: str
    is_secret: bool = False


class Look(NamedTuple, Generic[ValueT]):
    """What one look at the files found. Without value and error they are as they were, or just being written."""

    seen: bytes | str = b""
    value: ValueT | None = None
    error: str | None = None
    remarks: tuple[str, ...] = ()


class _File:
    __slots__ = ("data", "info")

    def __init__(self, data: bytes, info: os.stat_result) -> None:
        self.data = data
        self.info = info


class Watched(Generic[ValueT]):
    """A value that is made of files. `load` once, then `watch`; `value` is always the last one that could be used."""

    value: ValueT
    """There once `load` has succeeded."""

    def __init__(
        self, name: str, sources: Sequence[Source], make: Callable[[Sequence[bytes]], ValueT], interval_s: float
    ) -> None:
        self.name = name
        self.counts = {"loaded": 0, "failed": 0}
        self._sources = tuple(sources)
        self._make = make
        self._interval_s = interval_s
        self._is_loaded = False
        # A digest of what was looked at last, or what kept it from being read.
        self._seen: bytes | str = b""

    def load(self) -> None:
        """Read the files for the first time; later calls do nothing. Raises CredentialsError."""
        if self._is_loaded:
            return
        for _ in range(_LOAD_ATTEMPTS):
            found = self.look()
            if found.error is not None:
                raise CredentialsError(found.error)
            if found.value is not None:
                self.apply(found)
                return
        raise CredentialsError(f"{self._sources[0].setting}: the files change faster than they can be read")

    def look(self) -> Look[ValueT]:
        """Read the files and make a value if they have changed. Touches nothing, so it may run in a thread."""
        try:
            files = [_read(source) for source in self._sources]
        except CredentialsError as error:
            text = str(error)
            return Look() if text == self._seen else Look(text, error=text)
        seen = _digest(files)
        if seen == self._seen:
            return Look()
        try:
            value, problem = self._make([file.data for file in files]), None
        except CredentialsError as error:
            value, problem = None, str(error)
        # The TLS library reads files by name: only what was the same before and after it is what it has judged.
        # And whatever fails while it is being written gets its next chance at the next look.
        try:
            is_same = _digest([_read(source) for source in self._sources]) == seen
        except CredentialsError:
            is_same = False
        if not is_same:
            return Look()
        remarks = [text for each, file in zip(self._sources, files, strict=True) for text in _remarks(each, file.info)]
        return Look(seen, value, problem, tuple(remarks))

    def apply(self, found: Look[ValueT]) -> None:
        """Put into force what a look has found, or keep the old value, and say so once."""
        if found.error is None and found.value is None:
            return
        self._seen = found.seen
        if found.value is None:
            self.counts["failed"] += 1
            _log.warning("credentials_kept", files=self.name, error=found.error)
            return
        if self._is_loaded:  # at start it goes without saying
            _log.info("credentials_loaded", files=self.name)
        self._is_loaded = True
        self.value = found.value
        self.counts["loaded"] += 1
        for remark in found.remarks:
            _log.warning("credentials_remark", files=self.name, remark=remark)

    async def watch(self) -> None:
        """Look at an interval until cancelled. In a thread: a file system that hangs must not stop the data path."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self.apply(await in_side_thread(self.look))
            except Exception:  # noqa: BLE001 - a defect here must not end the watch unseen
                _log.exception("credentials_watch_failed", files=self.name)


class TlsFiles:
    """Certificates and key that fit together, for HTTP/1.1 and HTTP/2 in Python and, by `for_grpc`, for the gRPC library."""

    __slots__ = ("_certificates", "_client_cas", "_key", "context", "http2_context")

    def __init__(
        self,
        context: ssl.SSLContext,
        http2_context: ssl.SSLContext,
        certificates: bytes,
        key: bytes,
        client_cas: bytes | None,
    ) -> None:
        self.context = context
        self.http2_context = http2_context
        self._certificates = certificates
        self._key = key
        self._client_cas = client_cas

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        """A new object at each call, as the gRPC library takes each of them for itself."""
        return grpc.ssl_server_certificate_configuration([(self._key, self._certificates)], self._client_cas)


def watched_tls(tls: Tls) -> Watched[TlsFiles]:
    """The files of `listen.tls`."""
    sources = [
        Source("listen.tls.cert_file", tls.cert_file),
        Source("listen.tls.key_file", tls.key_file, is_secret=True),
    ]
    if tls.client_ca_file is not None:
        sources.append(Source("listen.tls.client_ca_file", tls.client_ca_file))
    return Watched("tls", sources, lambda contents: _make_tls(tls, *contents), tls.reload_interval_s)


def grpc_credentials(watched: Watched[TlsFiles], *, needs_client: bool) -> grpc.ServerCredentials:
    """Credentials of one gRPC listener that follow the files. Connections that are open keep what they began with."""
    given = watched.value

    def fetch() -> Any:
        # Called by a thread of the gRPC library at every new connection; None (which its types forget): as before.
        nonlocal given
        if watched.value is given:
            return None
        given = watched.value
        return given.for_grpc()

    return grpc.dynamic_ssl_server_credentials(given.for_grpc(), fetch, require_client_authentication=needs_client)


def _make_tls(tls: Tls, certificates: bytes, key: bytes, client_cas: bytes | None = None) -> TlsFiles:
    if _BEGIN_CERTIFICATE not in certificates:
        raise CredentialsError(f"listen.tls.cert_file: {tls.cert_file} has no PEM certificate")
    if _END_OF_KEY_NAME not in key:
        raise CredentialsError(f"listen.tls.key_file: {tls.key_file} has no PEM private key")
    http2_context = _make_context(tls, client_cas)
    http2_context.set_alpn_protocols(["h2"])
    return TlsFiles(_make_context(tls, client_cas), http2_context, certificates, key, client_cas)


def _make_context(tls: Tls, client_cas: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file, password=_no_passphrase)
    except CredentialsError:
        raise CredentialsError(
            f"listen.tls.key_file: {tls.key_file} is encrypted, and there is nobody to ask for its passphrase"
        ) from None
    except (OSError, ValueError) as error:
        raise CredentialsError(f"listen.tls: {_tls_problem(tls, error)}") from None
    if client_cas is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=client_cas.decode("ascii"))
        except (OSError, ValueError):  # an SSLError is an OSError, a UnicodeDecodeError a ValueError
            problem = f"listen.tls.client_ca_file: {tls.client_ca_file} is not a whole file of PEM certificates"
            raise CredentialsError(problem) from None
    return context


def _no_passphrase() -> NoReturn:
    raise CredentialsError


def _tls_problem(tls: Tls, error: Exception) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"{tls.key_file} is not the key of the first certificate in {tls.cert_file}"
    return f"{tls.cert_file} and {tls.key_file} can't be used: not whole PEM files, or of a kind that is too weak"


def _read(source: Source) -> _File:
    path = source.path
    try:
        data, info = _read_regular(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        cause = getattr(error, "strerror", None) or str(error)
        raise CredentialsError(f"{source.setting}: can't read {path}: {cause}") from None
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISREG(info.st_mode):
        problem = "is not a regular file"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"has mode {mode:04o}, others can change it: run chmod go-w {path}"
    elif len(data) > MAX_FILE_BYTES:
        problem = f"is larger than {MAX_FILE_BYTES} bytes"
    else:
        return _File(data, info)
    raise CredentialsError(f"{source.setting}: {path} {problem}")


def _read_regular(path: str) -> tuple[bytes, os.stat_result]:
    """Contents, up to one byte too many, and status of a file; nothing of what is no regular file."""
    # Not blocking: opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            return b"", info
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_FILE_BYTES + 1), info
    finally:
        os.close(descriptor)


def _remarks(source: Source, info: os.stat_result) -> list[str]:
    """What is usual where secrets are mounted into a container, and a leak elsewhere."""
    remarks = []
    mode = stat.S_IMODE(info.st_mode)
    if source.is_secret and mode & stat.S_IROTH:
        remarks.append(f"{source.setting}: {source.path} has mode {mode:04o}, every user can read it: chmod o-r")
    if info.st_uid not in (0, os.geteuid()):
        remarks.append(f"{source.setting}: {source.path} belongs to user {info.st_uid}, who can change it")
    return remarks


def _digest(files: Sequence[_File]) -> bytes:
    """What tells two states of the files apart."""
    state = hashlib.sha256()
    for file in files:
        state.update(b"%d " % len(file.data))
        state.update(file.data)
    return state.digest()

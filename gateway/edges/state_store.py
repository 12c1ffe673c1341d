"""What a restarted gateway needs to find its running ranks again: one small file per rank.

An engine connects to the addresses that it got in its handshake and registers once; when the
gateway dies it only reconnects. So the addresses and the registration are kept on disk.

Rules: a file is replaced as a whole (write beside it, rename); a file that can't be read or belongs
to another configuration is reported and never fatal; one gateway owns the directory (`flock`).
The files survive the death of the process. They aren't forced to the medium: a flush would stall the
event loop for milliseconds at every join, and a file lost with the host only costs a re-attachment.
"""

import contextlib
import fcntl
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.types import Protocol

FORMAT = 1
_LOCK_NAME = "lock"
_MAX_FILE_BYTES = 1024 * 1024


class StateStoreError(OSError):
    """The directory can't be used at all: wrong owner, wrong mode, or owned by another gateway."""


class CorruptRecordError(Exception):
    """One rank's file is unreadable or from an unknown format."""


class RankRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank. `registration` is its ready response as received (base64 in the file).

    `input_address` and `output_address` are absent while there is nothing to re-attach to; the
    record is then kept for `incarnation`, the last number that was given out for this rank.
    """

    format: int
    group: str
    index: Annotated[int, Meta(ge=0)]
    engine_index: Annotated[int, Meta(ge=0, le=65535)]
    protocol: Protocol
    incarnation: Annotated[int, Meta(ge=0, le=2**62)]
    input_address: str | None = None
    output_address: str | None = None
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None
    is_ready: bool = False
    registration: bytes | None = None


def ensure_private_dir(path: Path) -> None:
    """Create `path` with mode 0700, or check that it is a directory that only this user can enter.

    Raises OSError. Whoever can enter the directory can pose as a rank or as the gateway, since
    neither engine's wire has authentication.
    """
    # `parents=True` would leave to the umask who can enter those that are missing.
    for each in (*reversed(path.parents), path):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(f"{path} is not a directory (symbolic links are refused)")
    if info.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {info.st_uid}, not to user {os.geteuid()}: use a directory of your own"
        )
    mode = stat.S_IMODE(info.st_mode)
    if mode & 0o077:
        raise PermissionError(f"{path} has mode {mode:04o}, others can enter it: run chmod 700 {path}")


class StateStore:
    """The directory `state_dir`. `open` before use, `close` at the end; both belong to the engine link."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._lock_fd: int | None = None

    def open(self) -> None:
        """Create or check the directory and take its lock. Raises StateStoreError."""
        try:
            ensure_private_dir(self.directory)
        except OSError as error:
            advice = "; create it for this user with mode 0700, or name another directory"
            is_denied = isinstance(error, PermissionError) and error.errno is not None
            raise StateStoreError(f"state_dir: {error}{advice if is_denied else ''}") from error
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock_fd = os.open(self.directory / _LOCK_NAME, flags, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(lock_fd, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(lock_fd)
            raise StateStoreError(
                f"state_dir {self.directory} is in use by another gateway (process {owner}): give each its own"
            ) from error
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = lock_fd

    def load(self, group: str, index: int) -> RankRecord | None:
        """The rank's record, None when there is none. Raises CorruptRecordError."""
        path = self._path(group, index)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CorruptRecordError(f"{path}: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            try:
                text = file.read(_MAX_FILE_BYTES + 1)
            except OSError as error:
                raise CorruptRecordError(f"{path}: {error.strerror}") from error
        if len(text) > _MAX_FILE_BYTES:
            raise CorruptRecordError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
        try:
            record = msgspec.json.decode(text, type=RankRecord)
        except (msgspec.MsgspecError, ValueError) as error:
            raise CorruptRecordError(f"{path}: {error}") from error
        if record.format != FORMAT:
            raise CorruptRecordError(f"{path}: format {record.format}, expected {FORMAT}")
        return record

    def save(self, record: RankRecord) -> None:
        """Replace the rank's file. Raises OSError."""
        path = self._path(record.group, record.index)
        temporary = path.with_suffix(".tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record), indent=1))
        temporary.replace(path)

    def close(self) -> None:
        """Give the lock back; the files stay."""
        if self._lock_fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = None

    def _path(self, group: str, index: int) -> Path:
        # A group name may hold a slash and be longer than a file name; the checksum keeps names apart.
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", group)[:40]
        return self.directory / f"rank-{readable}-{zlib.crc32(group.encode()):08x}-{index}.json"

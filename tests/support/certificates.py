"""Certificates and token files for the tests: written as an operator would, replaced as a renewal would."""

import secrets
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import trustme

from gateway.edges.credentials import Watched

NAME = "gateway.test"
"""The name in the gateway's certificates, besides the loopback address."""


class Authority:
    """A CA, with its certificate in a file."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._directory = directory
        self.pem = self._ca.cert_pem.bytes()
        self.path = write(directory / f"{name}.pem", self.pem)

    def issue(self, *names: str) -> "Pair":
        """A new key with a certificate for the names, the gateway's unless told."""
        leaf = self._ca.issue_cert(*(names or (NAME, "127.0.0.1", "localhost")))
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        return Pair(chain, leaf.private_key_pem.bytes())

    def files(self, stem: str, *names: str) -> "Files":
        """The same in files."""
        return self.issue(*names).write(self._directory, stem)

    def client(self, stem: str = "client") -> "Files":
        """A client's certificate, in files."""
        return self.files(stem, f"{stem}.client.test")

    def channel_credentials(self, pair: "Pair | None" = None) -> grpc.ChannelCredentials:
        """For a client that trusts this CA, with a certificate of its own or without."""
        if pair is None:
            return grpc.ssl_channel_credentials(self.pem)
        return grpc.ssl_channel_credentials(self.pem, pair.key, pair.certificates)


class Pair(NamedTuple):
    """A key and its certificates, PEM."""

    certificates: bytes
    key: bytes

    def write(self, directory: Path, stem: str) -> "Files":
        cert, key = directory / f"{stem}.pem", directory / f"{stem}.key"
        return Files(write(cert, self.certificates), write(key, self.key))


class Files(NamedTuple):
    """Where a pair is kept."""

    cert: Path
    key: Path

    def replace(self, pair: Pair) -> None:
        """As a renewal does: two files, one after the other."""
        write(self.cert, pair.certificates)
        write(self.key, pair.key)

    @property
    def settings(self) -> dict[str, str]:
        """Keys of `listen.tls`."""
        return {"cert_file": str(self.cert), "key_file": str(self.key)}


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    """Replace a file as a whole: nobody sees it half."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(data)
    temporary.chmod(mode)
    temporary.replace(path)
    return path


def look(watched: Watched[Any]) -> None:
    """What the gateway does at its interval."""
    watched.apply(watched.look())


def token(hint: str = "t") -> str:
    """A token that no other test has."""
    return f"{hint}-{secrets.token_hex(16)}"


def write_tokens(path: Path, *tokens: str) -> Path:
    """A file with the tokens, between comments."""
    lines = ["# tokens of the tests", "", *(f"{each}  # somebody" for each in tokens)]
    return write(path, "\n".join([*lines, ""]).encode())

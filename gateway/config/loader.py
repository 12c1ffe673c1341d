"""File -> `Config`, or a `ConfigError` that says where to look.

The same steps for every caller: read with bounds, parse with positions, convert strictly, check what
spans keys. JSON takes the same way, because YAML contains it.
"""

from collections.abc import Mapping
from pathlib import Path

from gateway.config.checks import check
from gateway.config.convert import convert
from gateway.config.document import Document, read_text
from gateway.config.errors import ConfigError
from gateway.config.schema import Config

__all__ = ["ConfigError", "load_config", "load_fragment", "parse_config", "parse_fragment"]

_SKELETON: Mapping[str, object] = {
    "version": 1,
    "model": {"name": "any", "max_context_tokens": 2**31 - 1, "vocab_size": 2**31 - 1},
    # With a directory of their own, so that nobody's `state_dir` is too long for the sockets of these.
    "groups": [
        {"name": "any", "protocol": "vllm", "handshake": "ipc://any", "ranks": 1, "sockets": {"dir": "any"}},
    ],
}
"""Stands in for the required sections when a fragment is checked on its own."""
_PARTS = frozenset(Config.__struct_fields__) - _SKELETON.keys()


def load_config(path: Path) -> Config:
    """Read and check a configuration file. Raises `ConfigError`."""
    return parse_config(read_text(path), path)


def parse_config(text: str, path: Path | str) -> Config:
    """Check a configuration's text; `path` is what errors call it. Raises `ConfigError`."""
    return _parse(text, path, {})


def load_fragment(path: Path) -> Config:
    """Read and check a part of a configuration: some of its sections. Raises `ConfigError`."""
    return parse_fragment(read_text(path), path)


def parse_fragment(text: str, path: Path | str) -> Config:
    """Check sections as if they stood in a file whose other sections are right. Raises `ConfigError`."""
    return _parse(text, path, _SKELETON)


def _parse(text: str, path: Path | str, skeleton: Mapping[str, object]) -> Config:
    document = Document(text, path)
    if not isinstance(document.data, dict):
        raise document.error((), "expected a mapping with version, model and groups")
    if not skeleton and document.data and document.data.keys() <= _PARTS:
        raise document.error(
            (), "missing key 'version'; if this is a part of a configuration, try check-config --fragment"
        )
    config = convert(document, {**skeleton, **document.data}, Config)
    for problem in check(config):
        raise document.error(problem.loc, problem.message, at_key=problem.at_key, offset=problem.offset)
    return config

"""Annotated types that the settings are made of, and the base of every settings Struct. A leaf module."""

from typing import Annotated

import msgspec
from msgspec import Meta

_INT32_MAX = 2**31 - 1

# A title names the format in words: it is what error messages and the generated docs show. `$` in
# Python also matches before a last newline, hence the look-ahead.
Port = Annotated[str, Meta(pattern=r"^\S+:[0-9]{1,5}$(?!\n)", title="HOST:PORT")]
Endpoint = Annotated[str, Meta(pattern=r"^(tcp|ipc)://\S+$(?!\n)", title="tcp://HOST:PORT or ipc://PATH")]
Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$(?!\n)",
        title="name: 1 to 128 letters, digits or . _ / - with a letter or digit first",
    ),
]
Count = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
Tokens = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
Bytes = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
Seconds = Annotated[float, Meta(gt=0)]
KeepaliveSeconds = Annotated[float, Meta(gt=0, le=2_000_000)]
"""gRPC counts keepalive times in milliseconds of 32 bits."""
WatchSeconds = Annotated[float, Meta(ge=0.05)]
"""What is looked at in parts of this time, for as long as the process runs: less would keep it busy with looking."""
NonNegativeSeconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every settings Struct."""

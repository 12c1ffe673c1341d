"""One answer to a rank's HELLO out of those of all processes. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


def merged_init(answers: Sequence[bytes]) -> bytes:
    """INIT with the addresses of all processes, in the order of their client indexes; the rest is the first one's.

    A rank connects to all of the addresses, and answers a request on the output address whose place in the list is the
    request's client index.
    """
    if len(answers) == 1:
        return answers[0]
    maps = [_decode(answer) for answer in answers]
    first = maps[0]
    addresses = {
        **first["addresses"],
        "inputs": [address for each in maps for address in each["addresses"]["inputs"]],
        "outputs": [address for each in maps for address in each["addresses"]["outputs"]],
    }
    return _encode({**first, "addresses": addresses})

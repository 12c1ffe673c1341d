"""A Generate request of a standard engine service, cut into its parts without the protobuf library."""

# Length-delimited fields by their tags (https://protobuf.dev/programming-guides/encoding); both families number them so.
_REQUEST_ID = 0x0A
_TOKENIZED = 0x12
_MAX_LENGTH_BYTES = 4


def cut(data: bytes) -> tuple[str, bytes, bytes] | None:
    """Request id ("" without one), `TokenizedInput` and the rest of a message in which they come first, in this order.

    So serialisers write it. None for any other message, a damaged one, or one with an unusual id.
    """
    try:
        at, request_id = 0, ""
        if data[0] == _REQUEST_ID:
            size = data[1]
            if size > 0x7F:
                return None
            at = size + 2
            request_id = data[2:at].decode("ascii")
        if data[at] != _TOKENIZED:
            return None
        size, shift = 0, 0
        at += 1
        while (byte := data[at]) > 0x7F:
            size |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if shift >= 7 * _MAX_LENGTH_BYTES:
                return None
    except (IndexError, UnicodeDecodeError):
        return None
    at += 1
    end = at + (size | byte << shift)
    if end > len(data):
        return None
    return request_id, data[at:end], data[end:]

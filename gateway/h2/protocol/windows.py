"""How much a client may still send: the receiving side of flow control (RFC 9113, section 5.2)."""


class ReceiveWindow:
    """The window of one stream, or of the connection. Gives room back in batches of half its size."""

    __slots__ = ("_credit", "_left", "_size")

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        self._credit = 0

    def take(self, size: int) -> bool:
        """The client has sent so much; False when that is more than it may."""
        self._left -= size
        return self._left >= 0

    def give(self, size: int) -> int:
        """So much is done with. Returns the increment to tell the client now, 0 for not yet."""
        self._credit += size
        if self._credit * 2 < self._size:
            return 0
        increment, self._credit = self._credit, 0
        self._left += increment
        return increment

"""Bounds on what one connection may ask for, and the budgets that floods run into.

A budget is a bucket: `burst` at once, `per_s` from then on. What each of them stops:
* resets: opening and cancelling streams without end (CVE-2023-44487), and making us cancel them (CVE-2025-8671);
* chores: PING, SETTINGS, PRIORITY, empty and unknown frames (CVE-2019-9512, -9513, -9515, -9518);
* window updates without anything that was sent (CVE-2019-9511, -9517 in part).
Header blocks are bounded by size and number of frames (CVE-2024-27316 and its kin), frames that wait for a peer which
does not read by their number (CVE-2019-9512, -9514, -9515).
"""

import msgspec

from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError

UPDATES_PER_FRAME = 4
"""For each frame of ours, and each request, so many window updates."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one listener and of each of its connections. Times in seconds; None: no bound."""

    max_connections: int = 1024
    max_request_bytes: int = 4 * 1024 * 1024
    max_streams: int = 1024
    max_header_list_bytes: int = 16 * 1024
    max_header_frames: int = 16
    stream_window_bytes: int = 256 * 1024
    connection_window_bytes: int = 4 * 1024 * 1024
    max_waiting_frames: int = 4096
    """What may wait for a peer that does not read, besides bodies, which its windows bound."""
    max_turn_bytes: int = 256 * 1024
    """What is taken from waiting bodies in one go, so that large messages don't hold up the small ones."""
    chores_burst: float = 1000.0
    chores_per_s: float = 100.0
    resets_burst: float = 2048.0
    resets_per_s: float = 100.0
    window_updates_burst: float = 1000.0
    handshake_timeout_s: float = 10.0
    """From the connection's begin to its preface and SETTINGS, and for the answer to ours."""
    frame_timeout_s: float = 20.0
    """How long a frame or header block may take that has begun to arrive."""
    unread_timeout_s: float | None = 120.0
    """How long a client may take nothing of what waits for it on a stream."""
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    min_client_ping_s: float = 10.0
    max_idle_s: float | None = None
    """Without any stream."""
    max_age_s: float | None = None
    max_age_grace_s: float = 600.0


class Budget:
    """A bucket that refills with time."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = burst
        self._at: float | None = None

    def spend(self, now: float) -> bool:
        """Take one; False when there is none left."""
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Budgets:
    """What one connection may spend. Every method raises `Http2ConnectionError` when it is used up."""

    __slots__ = ("_burst", "_chores", "_pings", "_resets", "updates")

    def __init__(self, limits: Limits) -> None:
        self._chores = Budget(limits.chores_burst, limits.chores_per_s)
        self._resets = Budget(limits.resets_burst, limits.resets_per_s)
        self._burst = limits.window_updates_burst
        # What may be spent on window updates, before it is cut to the burst.
        self.updates = self._burst
        self._pings = PingPolicy(limits.min_client_ping_s)

    def chore(self, now: float) -> None:
        """A frame that brings nothing."""
        if not self._chores.spend(now):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def reset(self, now: float) -> None:
        """A stream that was opened for nothing."""
        if not self._resets.spend(now):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many streams are reset")

    def ping(self, now: float) -> None:
        """A ping to answer."""
        self.chore(now)
        if not self._pings.allows(now):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")

    def window_update(self) -> None:
        """They answer frames of ours or come with requests: a client may send a few for each of them, and some more."""
        self.updates = min(self._burst, self.updates) - 1
        if self.updates < 0:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many window updates")

    def has_sent(self, frames: int) -> None:
        """Parts of responses went out."""
        pings = self._pings
        pings.strikes = 0
        pings.last_at = None
        self.updates += frames * UPDATES_PER_FRAME


class PingPolicy:
    """gRPC's rule for clients' pings: three that come too soon, with nothing sent to the client between them, are abuse.

    When headers or data go out, `strikes` and `last_at` begin anew: clients ping to measure them.
    https://github.com/grpc/proposal/blob/master/A8-client-side-keepalive.md
    """

    __slots__ = ("_min_interval_s", "last_at", "strikes")
    MAX_STRIKES = 2

    def __init__(self, min_interval_s: float) -> None:
        self._min_interval_s = min_interval_s
        self.last_at: float | None = None
        self.strikes = 0

    def allows(self, now: float) -> bool:
        """A ping has come. False: the client has been told often enough."""
        last_at, self.last_at = self.last_at, now
        if last_at is not None and now - last_at < self._min_interval_s:
            self.strikes += 1
        return self.strikes <= self.MAX_STRIKES

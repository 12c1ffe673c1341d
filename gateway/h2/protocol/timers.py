"""Everything about a connection that depends on time; looked at now and then, as no second counts here."""

from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError
from gateway.h2.protocol.limits import Limits


class Timers:
    """When a connection began, was last heard of and last used. All times in seconds of one clock."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self.began_at = now
        self.heard_at = now
        self._idle_since: float | None = now
        # Since when a frame or a header block is incomplete.
        self.incomplete_since: float | None = None
        self.is_greeted = False
        self.is_acknowledged = False
        self.ping_sent_at: float | None = None
        self.drain_began_at: float | None = None

    def check(self, now: float) -> None:
        """Raises `Http2ConnectionError` when something takes too long."""
        limits = self._limits
        if not self.is_acknowledged and now - self.began_at >= limits.handshake_timeout_s:
            code = ErrorCode.SETTINGS_TIMEOUT if self.is_greeted else ErrorCode.PROTOCOL_ERROR
            raise Http2ConnectionError(code, "no preface, or no answer to our SETTINGS")
        if self.incomplete_since is not None and now - self.incomplete_since >= limits.frame_timeout_s:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a frame or a header block takes too long")
        ping_sent_at = self.ping_sent_at
        if ping_sent_at is not None and self.heard_at < ping_sent_at <= now - limits.keepalive_timeout_s:
            raise Http2ConnectionError(ErrorCode.NO_ERROR, "no answer to a keepalive ping")
        max_age_s = limits.max_age_s
        if max_age_s is not None and now - self.began_at >= max_age_s + limits.max_age_grace_s:
            raise Http2ConnectionError(ErrorCode.NO_ERROR, "the connection is too old")

    def has_part(self, now: float, *, is_another: bool) -> None:
        """What has arrived ends within a frame or a header block, which is another one than before or not."""
        if is_another or self.incomplete_since is None:
            self.incomplete_since = now

    def needs_ping(self, now: float) -> bool:
        """Whether nothing was heard for so long that a ping should find out; it is then taken as sent."""
        if now - max(self.heard_at, self.ping_sent_at or 0.0) < self._limits.keepalive_s:
            return False
        self.ping_sent_at = now
        return True

    def is_spent(self, now: float, *, is_used: bool) -> bool:
        """Whether the connection should end in order: it is old, or nobody uses it."""
        limits = self._limits
        if limits.max_age_s is not None and now - self.began_at >= limits.max_age_s:
            return True
        if is_used:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        return limits.max_idle_s is not None and now - self._idle_since >= limits.max_idle_s

"""One rank's columns as they are written down outside: what `RankTable.restore` takes."""

from typing import Annotated, Literal

import msgspec

from gateway.config.schema import Ratio

Amount = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class RankRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of a snapshot. None is unknown, which means 0 for the gateway's own work.

    What follows from other columns may be left out: of the raw and the normalised counts one is enough, so is one of
    the phases of what is in flight, and `own_tokens` are the queued and the context tokens.
    """

    rank: Amount
    state: Literal["ABSENT", "READY", "LOST"] = "READY"
    incarnation: int | None = None
    in_flight: Amount | None = None
    in_flight_prefill: Amount | None = None
    in_flight_decode: Amount | None = None
    queued_tokens: Amount | None = None
    ctx_tokens: Amount | None = None
    own_tokens: Amount | None = None
    sent_since_snapshot: Amount | None = None
    head_age_ms: Milliseconds | None = None
    reported_running: Amount | None = None
    reported_waiting: Amount | None = None
    running: Amount | None = None
    waiting: Amount | None = None
    kv_usage: Ratio | None = None
    snapshot_age_ms: Milliseconds | None = None
    kv_capacity_tokens: Amount | None = None
    max_in_flight: Amount | None = None
    max_model_len: Amount | None = None

    @property
    def has_report(self) -> bool:
        """Whether anything is said that only a report can tell."""
        reported = (self.reported_running, self.reported_waiting, self.running, self.waiting)
        return any(value is not None for value in (*reported, self.kv_usage, self.snapshot_age_ms))

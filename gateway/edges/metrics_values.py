"""What the values of labels mean, for `docs/metrics.md`."""

LINK_EVENT_VALUES: dict[str, str] = {
    "frames": "Messages received on ranks' output sockets.",
    "controls": "Of these, messages that are neither batches nor noise: replies and wave control.",
    "reports": "Messages to the coordinator of vLLM ranks.",
    "early_frames": "Messages from a rank that had not joined, or was lost; dropped.",
    "index_mismatch": "Batches that name another engine index than their socket's.",
    "adds": "Requests that a rank's socket took.",
    "aborted_ids": "Requests to abort, sent or taken back before they left.",
    "aborts_dropped": "Aborts for a rank that was gone.",
    "send_blocked": "Times that a rank's socket took no more.",
}
LINK_FAULT_VALUES: dict[str, str] = {
    "noise": "Messages that cannot have carried tokens.",
    "faults": "Batches that could not be read in full.",
    "load_faults": "Batches whose snapshot could not be used; their tokens were.",
    "handshakes": "Steps of handshakes, and what went wrong in them.",
    "lost": "Ranks lost, by how it showed.",
    "send_failed": "Requests that a rank was not given.",
    "state_faults": "Records in `state_dir` that could not be used or written.",
}
"""The values of `event`; reasons are those that `LinkCounters` declares."""

AUTH_FAILURE_VALUES: dict[str, str] = {
    "missing": "No token at all.",
    "malformed": "The header is none of the scheme `Bearer`, or is there twice.",
    "unknown": "No such token.",
    "not_admin": "A token of a client on `listen.admin`.",
}
"""The values of `reason` of refused calls."""

LIMIT_VALUES: dict[str, str] = {
    "max_streams": "Calls refused because as many were open.",
    "max_streams_per_connection": "Requests refused because as many were live on their GenerateMany stream.",
    "max_metadata_bytes": "Calls refused for the size of their metadata.",
    "max_request_bytes": "Calls refused, or GenerateMany streams ended, for the size of a message.",
    "reader_stall_timeout_s": "Streams ended whose client left a message unread.",
    "idle_stream_timeout_s": "GenerateMany streams ended that had no request.",
}
"""The values of `limit`: settings of `limits`. What the transport bounds by itself is not counted."""

EVIDENCE_VALUES: dict[str, str] = {
    "engine": "A row of the rank ended the sequence.",
    "rank_lost": "The rank's incarnation was gone.",
    "unsent": "It never left the gateway.",
    "caller": "The caller gave up.",
    "deadline": "The request's time was over.",
    "gateway": "The gateway ended it: drain, a slow reader, another sequence's failure.",
}
"""The values of `evidence`."""
AUDIT_VALUES: dict[str, str] = {
    "sums": "A rank's sum that differed from those of its sequences in flight.",
    "silent": "A sequence that got no token while its rank went on with others.",
}
"""The values of `kind` of the audit's findings."""

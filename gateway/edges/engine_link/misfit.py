"""What a rank says of itself at its join, against the configuration."""

from structlog.typing import FilteringBoundLogger

from gateway.types import RankInfo
from gateway.wire.protocol import EngineProtocol


def log_misfit(
    log: FilteringBoundLogger, info: RankInfo, *, protocol: EngineProtocol, is_coupled: bool, max_context_tokens: int
) -> None:
    """Say what of the rank's own words does not go with the configuration of its group and its model."""
    if not protocol.may_be(info.engine_version):
        log.error("protocol_mismatch", protocol=protocol.name, engine_version=info.engine_version)
    elif protocol.coordinator is not None and info.data_parallel_size > 1 and not is_coupled:
        # Its ranks step together; nobody wakes the others when one of them is given work.
        log.warning("group_not_coupled", data_parallel_size=info.data_parallel_size)
    if info.max_model_len < max_context_tokens:
        # Requests are admitted by the configuration, and the rank ends them by its own limit, as if that were asked for.
        log.warning(
            "rank_context_smaller",
            max_model_len=info.max_model_len,
            max_context_tokens=max_context_tokens,
            hint="longer answers end early with LENGTH; start the engine with more, or lower model.max_context_tokens",
        )

"""What a rank computes, in one short string: the fingerprint of the weights and all settings that decide a token.

Two ranks with the same fingerprint give the same tokens for the same request, so a gateway (or a person)
can see that a group is of one kind.
"""

import hashlib

import msgspec

from engine_stub.backend import BackendInfo

DIGEST_BYTES = 16


class PartialShardsError(ValueError):
    """The backend holds a part of the model only; the message says which."""


def recipe_fingerprint(info: BackendInfo) -> str:
    """Hex digest (32 digits) of the backend's recipe; independent of the order of its keys."""
    canonical = msgspec.json.encode(info.recipe, order="deterministic")
    return hashlib.blake2b(canonical, digest_size=DIGEST_BYTES).hexdigest()


def check_whole(info: BackendInfo) -> None:
    """Raise `PartialShardsError` unless the backend holds the whole model."""
    if info.shard_count != 1 or info.shard_index != 0:
        raise PartialShardsError(
            f"backend '{info.name}' holds shard {info.shard_index} of {info.shard_count}: a scheduler whose batch "
            "runs on a part of the model would emit garbage; load the whole model"
        )

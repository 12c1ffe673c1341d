"""Which settings a running gateway can change, and what keeps a configuration from taking the running one's place.

A change is taken as a whole or not at all. A setting that `LIVE` does not name needs a restart, so that a new one can't
be forgotten here: it is refused until someone has made it live. `docs/configuration.md` marks the same keys.

Ranks are numbered through the groups, and pins, metrics and decisions go by these numbers. So only the end of the list
may change: the last group may get more or fewer ranks, and groups may be added or removed after all others.
"""

from collections.abc import Iterator

from msgspec import Struct

from gateway.config.schema import Config

LIVE = frozenset(
    {
        *("policy", "filters", "load", "predictor", "admission", "slo", "gateways", "failure", "drain", "reload"),
        *("listen.stream_interval_tokens", "listen.max_flush_delay_ms"),
        *("scheduling.queue", "scheduling.batch"),
        *("limits.default_deadline_s", "limits.max_request_age_s", "limits.max_n", "limits.max_logprobs"),
        *("limits.max_streams", "limits.idle_stream_timeout_s", "limits.reader_stall_timeout_s"),
        *("limits.max_stop_token_ids", "limits.max_request_id_bytes", "limits.max_stream_buffer_bytes"),
        "observability.log_level",
        *("groups[].ranks", "groups[].min_ready", "groups[].coupled", "groups[].budget"),
    }
)
"""Keys that a reload can change, and with a mapping all that is in it."""
_RESTART = frozenset({"scheduling.queue.hold_until_queued"})
"""What needs a restart all the same."""


def is_live(path: str) -> bool:
    """Whether a reload can change the key at `path`, which is written as in `docs/configuration.md`."""
    parts = path.split(".")
    return path not in _RESTART and any(".".join(parts[: end + 1]) in LIVE for end in range(len(parts)))


def changed_keys(running: Config, wanted: Config) -> list[str]:
    """The keys whose values differ, in the order of the schema; a group that comes or goes is one of them."""
    found = [path for path in _differing(running, wanted, "") if path != "groups"]
    for number in range(max(len(running.groups), len(wanted.groups))):
        pair = running.groups[number : number + 1] + wanted.groups[number : number + 1]
        here = f"groups[{number}]"
        found += [here] if len(pair) == 1 else _differing(pair[0], pair[1], f"{here}.")
    return found


def refusals(wanted: Config, running: Config, layout: Config) -> list[str]:
    """What keeps `wanted` from taking the place of `running` without a restart: one line each; empty if nothing does.

    `layout` is `running` with the ranks that an earlier change left out and that have not gone yet.
    """
    paths = [path for path in _differing(running, wanted, "") if path != "groups"]
    return [f"{path}: needs a restart" for path in paths if not is_live(path)] + list(_groups(wanted, running, layout))


def _differing(old: Struct, new: Struct, prefix: str) -> list[str]:
    found = []
    for name in old.__struct_fields__:
        before, after, path = getattr(old, name), getattr(new, name), f"{prefix}{name}"
        if before == after:
            continue
        if isinstance(before, Struct) and type(before) is type(after):
            found += _differing(before, after, f"{path}.")
        else:
            found.append(path)
    return found


def _groups(wanted: Config, running: Config, layout: Config) -> Iterator[str]:
    for number, (old, new) in enumerate(zip(layout.groups, wanted.groups, strict=False)):
        here = f"groups[{number}]"
        in_force = running.groups[number].ranks if number < len(running.groups) else 0
        if old.name != new.name:
            yield f"{here}: {_WAIT.format(old.name, new.name) if not in_force else _PLACE.format(old.name, new.name)}"
            return
        for path in _differing(old, new, ""):
            if not is_live(f"groups[].{path}"):
                yield f"{here}.{path}: needs a restart"
        if old.has_waves is not new.has_waves:
            yield f"{here}.coupled: needs a restart, as vLLM ranks learn at their handshake whether they step together"
        elif old.has_waves and in_force not in (0, new.ranks):
            yield f"{here}.ranks: needs a restart, as ranks that step together learn at their handshake how many they are"
        behind = layout.groups[number + 1 :]
        follows = wanted.groups[number + 1 :]
        is_kept = bool(behind and follows) and behind[0].name == follows[0].name
        if new.ranks > old.ranks and behind:
            yield f"{here}.ranks: {(_LAST if is_kept else _FIRST).format(new.name, behind[0].name)}"
        elif new.ranks < old.ranks and follows:
            is_leaving = in_force <= new.ranks
            text = _WAIT if is_leaving else _LAST if is_kept else _FIRST
            yield f"{here}.ranks: {text.format(new.name, follows[0].name)}"


_PLACE = "group {} has this place, and without a restart groups come and go after all others; put {} at the end"
_LAST = "only the last group may get more or fewer ranks without a restart; {} is not, and the ranks of {} would get other numbers"
_FIRST = "numbers are free for others only when the ranks that have them are gone; change {} and {} one after the other"
_WAIT = "removed ranks of {} still end their work; reload again when they are gone, for {} to have their place"

"""What happens when files that say who is who change: the last good state counts, and failures are said once."""

import asyncio
import os

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.security import Auth, Tls
from gateway.edges import credentials
from gateway.edges.auth import Role, watched_tokens
from gateway.edges.credentials import CredentialsError, Source, Watched, watched_tls
from tests.support.certificates import look, token, write, write_tokens
from tests.support.grpc_edge import until


@pytest.fixture
def log():
    with structlog.testing.capture_logs() as lines:
        yield lines


def events(log):
    return [line["event"] for line in log]


def tls(files, **more):
    return watched_tls(Tls(**files.settings, **more))


def test_nothing_happens_while_nothing_changes(served, log):
    watched = tls(served)
    watched.load()
    value = watched.value
    os.utime(served.cert)
    for _ in range(3):
        look(watched)
    assert watched.value is value
    assert watched.counts == {"loaded": 1, "failed": 0}
    assert log == []


def test_a_new_pair_is_taken(authority, served, log):
    watched = tls(served)
    watched.load()
    old = watched.value
    served.replace(authority.issue())
    look(watched)
    assert watched.value is not old
    assert watched.counts == {"loaded": 2, "failed": 0}
    assert events(log) == ["credentials_loaded"]


def test_a_broken_pair_keeps_the_old_one_and_is_said_once(authority, served, log):
    watched = tls(served)
    watched.load()
    old = watched.value
    new = authority.issue()
    write(served.cert, new.certificates)  # half of a renewal
    for _ in range(3):
        look(watched)
    assert watched.value is old
    assert watched.counts == {"loaded": 1, "failed": 1}
    assert events(log) == ["credentials_kept"]
    assert log[-1]["log_level"] == "warning"
    write(served.key, new.key)
    look(watched)
    assert watched.value is not old
    assert watched.counts == {"loaded": 2, "failed": 1}


def test_every_new_way_to_be_broken_is_said(served, log):
    watched = tls(served)
    watched.load()
    good = served.cert.read_bytes()
    for break_it in (
        lambda: write(served.cert, b"junk"),
        served.cert.unlink,
        lambda: write(served.cert, good, mode=0o666),
        lambda: write(served.cert, b"other junk"),
    ):
        break_it()
        look(watched)
        look(watched)
    assert watched.counts == {"loaded": 1, "failed": 4}
    write(served.cert, good)
    look(watched)
    assert watched.counts == {"loaded": 2, "failed": 4}


def test_a_file_that_is_being_written_waits_for_the_next_look(authority, served, monkeypatch, log):
    watched = tls(served)
    watched.load()
    old, new, read = watched.value, authority.issue(), credentials._read
    reads = []

    def growing(source):
        """The certificate arrives between the two readings of one look."""
        reads.append(source)
        if len(reads) == 3:
            served.replace(new)
        return read(source)

    write(served.cert, new.certificates[:-60])
    monkeypatch.setattr(credentials, "_read", growing)
    look(watched)
    assert len(reads) == 4
    assert watched.value is old
    assert watched.counts == {"loaded": 1, "failed": 0}
    look(watched)
    assert watched.counts == {"loaded": 2, "failed": 0}
    assert events(log) == ["credentials_loaded"]


CONTENTS = {"good": b"good", "other": b"other", "junk": b"junk", "more junk": b"more junk", "missing": None}


@settings(max_examples=60, deadline=None)
@given(states=st.lists(st.sampled_from([*CONTENTS]), max_size=12), looks=st.lists(st.integers(1, 3), min_size=12))
def test_the_value_is_always_the_last_good_one(tmp_path_factory, states, looks):
    path = tmp_path_factory.mktemp("watched") / "file"

    def make(contents):
        if b"junk" in contents[0]:
            raise CredentialsError("junk")
        return contents[0]

    write(path, b"good")
    watched = Watched("files", [Source("setting", str(path))], make, 1.0)
    watched.load()
    expected, seen, counts = b"good", "good", {"loaded": 1, "failed": 0}
    for state, count in zip(states, looks, strict=False):
        data = CONTENTS[state]
        if data is None:
            path.unlink(missing_ok=True)
        else:
            write(path, data)
        for _ in range(count):
            look(watched)
        if state != seen:
            is_good = data in (b"good", b"other")
            counts["loaded" if is_good else "failed"] += 1
            expected = data if is_good else expected
            seen = state
        assert watched.value == expected
        assert watched.counts == counts


def test_a_list_of_tokens_changes_like_certificates_do(tmp_path):
    path = tmp_path / "tokens"
    first, second = token(), token()
    write_tokens(path, first)
    watched = watched_tokens(Auth(tokens_file=str(path)))
    watched.load()
    write_tokens(path, second)
    assert watched.value.role_of(first) is Role.CLIENT
    look(watched)
    assert (watched.value.role_of(first), watched.value.role_of(second)) == (None, Role.CLIENT)
    write(path, b"# all gone\n")
    look(watched)
    assert watched.value.role_of(second) is Role.CLIENT
    assert watched.counts == {"loaded": 2, "failed": 1}


# --- the watch ---------------------------------------------------------------------------------------


async def test_the_watch_looks_at_its_interval_until_it_is_cancelled(authority, served):
    watched = tls(served, reload_interval_s=0.005)
    watched.load()
    task = asyncio.create_task(watched.watch())
    served.replace(authority.issue())
    # The watch may have met the pair half replaced.
    await until(lambda: watched.counts["loaded"] == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_defect_does_not_end_the_watch(tmp_path, log):
    path = write(tmp_path / "file", b"1")

    def make(contents):
        if contents[0] == b"2":
            raise ZeroDivisionError("a defect")
        return contents[0]

    watched = Watched("files", [Source("setting", str(path))], make, 0.005)
    watched.load()
    task = asyncio.create_task(watched.watch())
    write(path, b"2")
    await until(lambda: "credentials_watch_failed" in events(log))
    write(path, b"3")
    await until(lambda: watched.value == b"3")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

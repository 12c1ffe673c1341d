"""Files that say who is who: what is taken, what is refused, and what happens when they change."""

import asyncio
import os
import ssl

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.security import Auth, Tls
from gateway.edges import credentials
from gateway.edges.auth import Role, watched_tokens
from gateway.edges.credentials import MAX_FILE_BYTES, CredentialsError, Source, Watched, watched_tls
from tests.support.certificates import Authority, token, write, write_tokens
from tests.support.grpc_edge import until


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def served(authority):
    return authority.files("gateway")


@pytest.fixture
def log():
    with structlog.testing.capture_logs() as lines:
        yield lines


def events(log):
    return [line["event"] for line in log]


def tls(files, **more):
    return watched_tls(Tls(**files.settings, **more))


def problem_of(watched):
    with pytest.raises(CredentialsError) as caught:
        watched.load()
    return str(caught.value)


def look(watched):
    watched.apply(watched.look())


# --- at start ----------------------------------------------------------------------------------------


def test_a_pair_that_fits_is_loaded_once(served, log):
    watched = tls(served)
    watched.load()
    value = watched.value
    watched.load()
    assert watched.value is value
    assert watched.counts == {"loaded": 1, "failed": 0}
    assert events(log) == []
    assert value.context.verify_mode is ssl.CERT_NONE
    assert value.context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_key_and_certificates_may_be_in_one_file(authority, tmp_path):
    pair = authority.issue()
    both = write(tmp_path / "both.pem", pair.key + pair.certificates)
    watched_tls(Tls(cert_file=str(both), key_file=str(both))).load()


def test_with_a_client_ca_every_client_needs_a_certificate(authority, served):
    watched = tls(served, client_ca_file=str(authority.path))
    watched.load()
    assert watched.value.context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("setting", ["cert_file", "key_file", "client_ca_file"])
class TestEachFile:
    """What holds for every one of them. `path` is the file of the setting."""

    @pytest.fixture
    def path(self, authority, served, setting):
        return {"cert_file": served.cert, "key_file": served.key, "client_ca_file": authority.path}[setting]

    @pytest.fixture
    def problem(self, authority, served, setting, path):
        def of():
            text = problem_of(tls(served, client_ca_file=str(authority.path)))
            assert text.startswith(f"listen.tls.{setting}: ")
            assert str(path) in text
            return text

        return of

    def test_missing(self, path, problem):
        path.unlink()
        assert "No such file or directory" in problem()

    def test_empty(self, path, problem):
        write(path, b"")
        assert "PEM" in problem()

    def test_a_directory(self, path, problem):
        path.unlink()
        path.mkdir()
        assert "not a regular file" in problem()

    def test_a_pipe_is_not_waited_for(self, path, problem):
        path.unlink()
        os.mkfifo(path)
        assert "not a regular file" in problem()

    def test_too_large(self, path, problem):
        write(path, path.read_bytes() + b"\n" * MAX_FILE_BYTES)
        assert f"larger than {MAX_FILE_BYTES} bytes" in problem()

    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
    def test_one_that_others_can_write(self, path, problem, mode):
        path.chmod(mode)
        assert f"chmod go-w {path}" in problem()

    def test_a_path_that_is_none(self, authority, served, setting):
        names = served.settings | {"client_ca_file": str(authority.path), setting: "a\0b"}
        assert problem_of(watched_tls(Tls(**names))).startswith(f"listen.tls.{setting}: can't read")

    def test_a_link_is_followed(self, authority, served, path, tmp_path):
        # Mounted secrets are links to the files of their present version.
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        tls(served, client_ca_file=str(authority.path)).load()


def test_a_key_of_another_certificate(authority, served):
    write(served.key, authority.issue().key)
    assert problem_of(tls(served)) == (
        f"listen.tls: {served.key} is not the key of the first certificate in {served.cert}"
    )


@pytest.mark.parametrize("which", ["cert", "key"])
def test_a_file_that_was_cut_off(served, which):
    path = getattr(served, which)
    write(path, path.read_bytes()[:-60])
    assert "can't be used: not whole PEM files" in problem_of(tls(served))


def test_a_client_ca_file_that_was_cut_off(authority, served):
    write(authority.path, authority.pem + authority.pem[:-60])
    problem = problem_of(tls(served, client_ca_file=str(authority.path)))
    assert problem == f"listen.tls.client_ca_file: {authority.path} is not a whole file of PEM certificates"


def test_an_encrypted_key_is_not_asked_for_its_passphrase(served):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(served.key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    write(served.key, key.private_bytes(encoding, form, encryption))
    assert problem_of(tls(served)).endswith(f"{served.key} is encrypted, and there is nobody to ask for its passphrase")


def test_a_file_that_never_rests_is_given_up(served, monkeypatch):
    numbers = iter(range(1000))
    monkeypatch.setattr(credentials, "_digest", lambda files: b"%d" % next(numbers))
    assert problem_of(tls(served)) == "listen.tls.cert_file: the files change faster than they can be read"


# --- remarks -----------------------------------------------------------------------------------------


def remarks(log):
    return [line["remark"] for line in log if line["event"] == "credentials_remark"]


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_key_that_not_everybody_can_read_gives_no_cause_for_remarks(served, log, mode):
    served.key.chmod(mode)
    served.cert.chmod(0o644)
    tls(served).load()
    assert remarks(log) == []


def test_a_key_that_everybody_can_read_is_remarked_on(served, log):
    served.key.chmod(0o644)
    tls(served).load()
    assert remarks(log) == [f"listen.tls.key_file: {served.key} has mode 0644, every user can read it: chmod o-r"]


def test_files_of_another_user_are_remarked_on_unless_it_is_root(served, log, monkeypatch):
    owner = served.key.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    tls(served).load()
    names = [("cert_file", served.cert), ("key_file", served.key)] if owner else []
    assert remarks(log) == [
        f"listen.tls.{setting}: {path} belongs to user {owner}, who can change it" for setting, path in names
    ]


def test_a_user_that_is_neither_root_nor_oneself(log):
    info = os.stat_result((0o100600, 1, 1, 1, 4711, 0, 0, 0, 0, 0))
    source = Source("listen.tls.key_file", "k", is_secret=True)
    assert credentials._remarks(source, info) == ["listen.tls.key_file: k belongs to user 4711, who can change it"]


# --- changes -----------------------------------------------------------------------------------------


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


# --- redaction ---------------------------------------------------------------------------------------


def test_no_message_log_line_or_printed_object_shows_contents(authority, served, log):
    key = served.key.read_bytes()
    watched = tls(served, client_ca_file=str(authority.path))
    watched.load()
    broken = key.replace(b"\n-----END", b"canary\n-----END")
    write(served.key, broken)
    found = watched.look()
    watched.apply(found)
    assert watched.counts["failed"] == 1
    shown = repr([log, found, watched, vars(watched), watched.value, credentials._read(Source("s", str(served.key)))])
    secret = [line.decode() for line in key.splitlines() if b"-----" not in line]
    assert not [line for line in [*secret, "canary"] if line in shown]
    assert str(served.key) in shown

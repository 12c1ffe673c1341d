"""Files that say who is who: what is taken at start, what is refused, and what of them is shown."""

import os
import ssl

import pytest
import structlog

from gateway.config.security import Tls
from gateway.edges import credentials
from gateway.edges.credentials import MAX_FILE_BYTES, CredentialsError, Source, watched_tls
from tests.support.certificates import write


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


@pytest.mark.parametrize("user", [0, 4711, 4712])
def test_a_user_that_is_neither_root_nor_the_gateway_s(monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    info = os.stat_result((0o100600, 1, 1, 1, user, 0, 0, 0, 0, 0))
    found = credentials._remarks(Source("listen.tls.key_file", "k", is_secret=True), info)
    expected = "listen.tls.key_file: k belongs to user 4712, who can change it"
    assert found == ([expected] if user == 4712 else [])


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

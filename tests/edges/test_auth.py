"""Bearer tokens: their files, who they let in where, and what a refused caller and the log are told."""

import gc
import re

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.security import Auth
from gateway.core.errors import Reason
from gateway.edges.auth import (
    FAILURES,
    LOG_INTERVAL_S,
    MAX_TOKEN_CHARS,
    MIN_TOKEN_CHARS,
    Authenticator,
    Role,
    TokenSet,
    error_of,
    parse_tokens,
    watched_tokens,
)
from gateway.edges.credentials import CredentialsError
from tests.support.certificates import token, write, write_tokens

CLIENT, OPERATOR = token("client"), token("operator")


# --- files -------------------------------------------------------------------------------------------


def test_one_token_a_line_with_comments():
    text = f"# all of them\n\n{CLIENT}\n   {OPERATOR} # night shift\r\n\t\n#{'x' * 20}\n".encode()
    assert parse_tokens(text, "t") == [CLIENT, OPERATOR]


@pytest.mark.parametrize("text", ["-._~+/" * 4, "a" * MIN_TOKEN_CHARS, "a" * MAX_TOKEN_CHARS, "QUJDREVGR0hJSktM=="])
def test_what_may_be_a_token(text):
    assert parse_tokens(text.encode(), "t") == [text]


BAD = ["a" * (MIN_TOKEN_CHARS - 1), "a" * (MAX_TOKEN_CHARS + 1), "two words-two-words", "a" * 20 + "é", "=" * 20, "Bearer " + "a" * 20, '"' + "a" * 20 + '"', "\0" * 20]  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_what_is_no_token_is_named_by_its_line_only(line):
    with pytest.raises(CredentialsError) as caught:
        parse_tokens(f"{CLIENT}\n\n{line}\n".encode(), "listen.auth.tokens_file: t")
    message = str(caught.value)
    assert message.startswith("listen.auth.tokens_file: t: line 3 is no token: ")
    assert line not in message
    assert CLIENT not in message


@pytest.mark.parametrize("text", ["", "\n\n", "# only words\n", "\r\n"])
def test_a_file_without_tokens_is_an_error(text):
    with pytest.raises(CredentialsError, match=r"^t: the file has no token$"):
        parse_tokens(text.encode(), "t")


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_else(data):
    try:
        tokens = parse_tokens(data, "t")
    except CredentialsError:
        return
    assert tokens
    assert all(re.fullmatch(r"[A-Za-z0-9._~+/=-]{16,512}", each) for each in tokens)


@pytest.mark.parametrize("broken", ["tokens_file", "admin_tokens_file"])
@pytest.mark.parametrize("text", [None, b"", b"short"])
def test_at_start_each_file_must_be_there_and_good(tmp_path, broken, text):
    names = {
        "tokens_file": write_tokens(tmp_path / "t", CLIENT),
        "admin_tokens_file": write_tokens(tmp_path / "a", OPERATOR),
    }
    if text is None:
        names[broken].unlink()
    else:
        write(names[broken], text)
    with pytest.raises(CredentialsError) as caught:
        watched_tokens(Auth(**{key: str(path) for key, path in names.items()})).load()
    assert str(caught.value).startswith(f"listen.auth.{broken}: ")
    assert str(names[broken]) in str(caught.value)


# --- roles -------------------------------------------------------------------------------------------


def test_each_token_has_the_greatest_role_that_a_file_gives_it():
    tokens = TokenSet([(OPERATOR, Role.ADMIN), (OPERATOR, Role.CLIENT), (CLIENT, Role.CLIENT), (CLIENT, Role.CLIENT)])
    assert tokens.role_of(OPERATOR) is Role.ADMIN
    assert tokens.role_of(CLIENT) is Role.CLIENT
    for other in ("", CLIENT[:-1], f"{CLIENT}x", CLIENT.swapcase(), "\udcff", "é"):
        assert tokens.role_of(other) is None


TEXT = st.text("abAB01", min_size=1, max_size=3)


@given(st.dictionaries(TEXT, st.sampled_from(Role)), TEXT)
def test_a_set_is_a_mapping(roles, other):
    tokens = TokenSet(roles.items())
    for text in (*roles, other):
        assert tokens.role_of(text) is roles.get(text)


def test_a_set_keeps_no_token_and_no_hash_that_could_be_guessed_from_one():
    one, two = TokenSet([(CLIENT, Role.CLIENT)]), TokenSet([(CLIENT, Role.CLIENT)])
    held = gc.get_referents(one._roles)
    assert CLIENT not in held
    assert set(one._roles).isdisjoint(two._roles), "the hash has no key of its own"


# --- who comes in -------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def authenticator_of(tmp_path, clock):
    auth = Auth(
        tokens_file=str(write_tokens(tmp_path / "t", CLIENT)),
        admin_tokens_file=str(write_tokens(tmp_path / "a", OPERATOR)),
    )
    tokens = watched_tokens(auth)
    tokens.load()
    return lambda role: Authenticator("grpc", role, tokens, clock=clock)


def bearer(text):
    return ("authorization", f"Bearer {text}")


OTHER = ("user-agent", "test")
CASES = [
    ([bearer(CLIENT)], None, "not_admin"),
    ([bearer(OPERATOR)], None, None),
    ([OTHER, bearer(OPERATOR), OTHER], None, None),
    ([("authorization", f"bearer   {OPERATOR}")], None, None),
    ([("authorization", f"BEARER {OPERATOR} ")], None, None),
    ([], "missing", "missing"),
    (None, "missing", "missing"),
    ([OTHER, ("x-authorization", f"Bearer {CLIENT}")], "missing", "missing"),
    ([("authorization", CLIENT)], "malformed", "malformed"),
    ([("authorization", f"Basic {CLIENT}")], "malformed", "malformed"),
    ([("authorization", f"Bearer{CLIENT}")], "malformed", "malformed"),
    ([("authorization", "")], "malformed", "malformed"),
    ([("authorization", f"Bearer {OPERATOR}".encode())], "malformed", "malformed"),
    ([bearer(OPERATOR), bearer(OPERATOR)], "malformed", "malformed"),
    ([bearer(CLIENT), bearer(OPERATOR)], "malformed", "malformed"),
    ([bearer("")], "unknown", "unknown"),
    ([bearer(token())], "unknown", "unknown"),
    ([bearer(CLIENT[:-1])], "unknown", "unknown"),
    ([bearer(f"{CLIENT} {CLIENT}")], "unknown", "unknown"),
    ([bearer("x" * 100_000)], "unknown", "unknown"),
    ([bearer("\udcff" * 20)], "unknown", "unknown"),
]


@pytest.mark.parametrize(("metadata", "for_client", "for_admin"), CASES)
def test_who_comes_in(authenticator_of, metadata, for_client, for_admin):
    assert authenticator_of(Role.CLIENT).check(metadata) == for_client
    assert authenticator_of(Role.ADMIN).check(metadata) == for_admin


def test_looking_changes_nothing(authenticator_of):
    authenticator = authenticator_of(Role.CLIENT)
    authenticator.check([])
    assert not any(authenticator.failures.values())


# --- refusals ----------------------------------------------------------------------------------------


def test_callers_learn_only_whether_a_valid_token_was_too_little():
    errors = {failure: error_of(failure) for failure in FAILURES}
    assert errors.pop("not_admin").reason is Reason.PERMISSION_DENIED
    assert {(error.reason, error.message) for error in errors.values()} == {
        (Reason.UNAUTHENTICATED, "the call brings no valid token; send the metadata `authorization: Bearer TOKEN`")
    }
    assert not any(error.facts or error.retryable or error.retry_after_s for error in errors.values())


def test_every_refusal_is_counted_and_few_are_logged(authenticator_of, clock):
    authenticator = authenticator_of(Role.CLIENT)
    with structlog.testing.capture_logs() as log:
        for number in range(5):
            clock.now = 100.0 + number * LOG_INTERVAL_S / 5
            authenticator.refuse("unknown", f"peer{number}")
        authenticator.refuse("missing", "other")
        clock.now = 100.0 + LOG_INTERVAL_S
        authenticator.refuse("unknown", "peer5")
        authenticator.refuse("unknown", "peer6")
        clock.now = 100.0 + 2 * LOG_INTERVAL_S
        authenticator.refuse("unknown", "peer7")
    assert authenticator.failures == {"missing": 1, "malformed": 0, "unknown": 8, "not_admin": 0}
    assert [(line["reason"], line["peer"], line["more_before"]) for line in log] == [
        ("unknown", "peer0", 0),
        ("missing", "other", 0),
        ("unknown", "peer5", 4),
        ("unknown", "peer7", 1),
    ]
    assert {(line["event"], line["log_level"], line["listener"]) for line in log} == {
        ("call_refused", "warning", "grpc")
    }

"""Which requests have a key, and that everything that may change an answer changes the key."""

from array import array

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from gateway.core.events import RequestArrived
from gateway.core.response_cache import key_of
from gateway.types import Sampling
from tests.support.ordering import make_arrived

GREEDY = make_arrived(temperature=0.0, max_tokens=10)
# Another value for every field. A new field must be added here, and is in the key without being named there.
OTHER_SAMPLING = {
    "max_tokens": 11,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "seed": 4,
    "logprobs": 0,
    "stop_token_ids": (5,),
    "ignore_eos": True,
}
# The rest of a request: what may change its answer or whose it is, what makes it uncacheable, what does neither.
KEYED = {"prompt_token_ids": [5, 6, 8], "n": 2, "tenant": "other", "cache_salt": "other"}
UNCACHEABLE = {"use_cache": False, "pinned_rank": 0}
IRRELEVANT = {
    "client_key": "other",
    "request_id": "other",
    "model": "other",  # an alias of the served model at most: the model that answers is given beside the request
    "priority": 3,
    "deadline_at": 9.0,
    "session_id": "other",
    "allow_resume": False,
    "queue_timeout_s": 1.0,
    "arrived_at_unix_s": 9.0,
    "sink": object(),
}


def with_sampling(arrived, **changes):
    return msgspec.structs.replace(arrived, sampling=msgspec.structs.replace(arrived.sampling, **changes))


def test_a_key_is_a_digest_that_depends_on_the_request_only():
    key = key_of(GREEDY, "m")
    assert isinstance(key, bytes)
    assert len(key) == 32
    assert key == key_of(make_arrived(temperature=0.0, max_tokens=10), "m")


@pytest.mark.parametrize("make", [list, tuple, lambda ids: array("I", ids), lambda ids: array("q", ids)])
def test_the_container_of_the_prompt_does_not_matter(make):
    prompt = [0, 5, 2**31 - 1]
    assert key_of(make_arrived(prompt=prompt, temperature=0.0), "m") == key_of(
        msgspec.structs.replace(make_arrived(temperature=0.0), prompt_token_ids=make(prompt)), "m"
    )


@pytest.mark.parametrize(
    ("sampling", "has_key"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7, "seed": 0}, True),
        ({"temperature": 0.0, "seed": 1}, True),
        ({"temperature": 0.7}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_only_greedy_and_seeded_requests_have_a_key(sampling, has_key, n):
    assert (key_of(make_arrived(n=n, **sampling), "m") is not None) == has_key


@pytest.mark.parametrize("field", UNCACHEABLE)
def test_no_key_for_who_declines_the_cache_or_asks_for_a_rank(field):
    assert key_of(msgspec.structs.replace(GREEDY, **{field: UNCACHEABLE[field]}), "m") is None


def test_every_sampling_parameter_is_in_the_key():
    assert set(OTHER_SAMPLING) == set(Sampling.__struct_fields__)
    base = with_sampling(GREEDY, seed=3)  # so that any temperature has a key
    keys = {key_of(base, "m")}
    for field, value in OTHER_SAMPLING.items():
        assert getattr(base.sampling, field) != value
        keys.add(key_of(with_sampling(base, **{field: value}), "m"))
    assert None not in keys
    assert len(keys) == 1 + len(OTHER_SAMPLING)


def test_every_other_field_is_in_the_key_or_can_not_change_the_answer():
    assert {"sampling", *KEYED, *UNCACHEABLE, *IRRELEVANT} == set(RequestArrived.__struct_fields__)
    keys = [key_of(msgspec.structs.replace(GREEDY, **{field: value}), "m") for field, value in KEYED.items()]
    assert len({key_of(GREEDY, "m"), key_of(GREEDY, "other"), *keys}) == 2 + len(KEYED)
    assert {key_of(msgspec.structs.replace(GREEDY, **{field: v}), "m") for field, v in IRRELEVANT.items()} == {
        key_of(GREEDY, "m")
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": "ab", "cache_salt": "c"}, {"tenant": "a", "cache_salt": "bc"}),
        ({"tenant": "ab"}, {"cache_salt": "ab"}),
        ({"prompt": [1, 2], "stop_token_ids": (3,)}, {"prompt": [1, 2, 3], "stop_token_ids": ()}),
        ({"prompt": [1, 23]}, {"prompt": [12, 3]}),
        ({"prompt": [1]}, {"prompt": [256]}),
        ({"prompt": [0]}, {"prompt": [0, 0]}),
        ({"n": 2, "prompt": [7]}, {"n": 1, "prompt": [2, 7]}),
        ({"seed": None}, {"seed": 0}),
        ({"logprobs": None}, {"logprobs": 0}),
    ],
)
def test_parts_do_not_run_into_each_other(one, other):
    assert key_of(make_arrived(temperature=0.0, **one), "m") != key_of(make_arrived(temperature=0.0, **other), "m")


def test_the_model_does_not_run_into_the_tenant():
    with_tenant = msgspec.structs.replace(GREEDY, tenant="b")
    assert key_of(with_tenant, "a") != key_of(GREEDY, "ab")


texts = st.text(st.sampled_from("ab\0é"), max_size=3)
requests = st.tuples(
    texts,
    st.builds(
        make_arrived,
        prompt=st.lists(st.sampled_from([0, 1, 127, 128, 255, 256, 65536]), min_size=1, max_size=4),
        n=st.integers(1, 2),
        max_tokens=st.integers(1, 2),
        temperature=st.just(0.0),
        seed=st.none() | st.integers(-1, 1),
        stop_token_ids=st.lists(st.integers(0, 1), max_size=2).map(tuple),
        tenant=texts,
        cache_salt=texts,
    ),
)


@given(requests, requests)
@hypothesis_settings(max_examples=300, deadline=None)
def test_equal_keys_are_equal_requests(one, other):
    assert (key_of(one[1], one[0]) == key_of(other[1], other[0])) == (one == other)

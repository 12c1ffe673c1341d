"""A router serves its HTTP API through the gateway: every token that the ranks made arrives as text, once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_stub.tokens import expected_logprob
from tests.support.peers import MAX_CONTEXT_TOKENS, MODEL, RANKS

pytestmark = pytest.mark.peers
CHAT, GENERATE = "/v1/chat/completions", "/generate"


def chat_body(content, **more):
    return {"messages": [{"role": "user", "content": content}]} | more


def chat_text(events, index=0):
    """The text of one choice, put together from the deltas of a stream."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_the_gateway_is_registered_as_one_engine_of_its_family(family, router):
    engine = router.engines()[router.engine_url]
    assert engine["runtime_type"] == family
    assert engine["connection_mode"] == "grpc"
    assert engine["model_id"] == MODEL
    assert engine["models"][0]["context_length"] == MAX_CONTEXT_TOKENS
    assert engine["labels"]["dp_size"] == str(RANKS)
    assert [model["id"] for model in router.get("/v1/models")["data"]] == [MODEL]


def test_chat(site, router):
    prompt = site.tokenizer.chat_prompt("What is a rank?")
    tokens = site.expected(prompt, 24, seed=5)
    answer = router.post(CHAT, chat_body("What is a rank?", max_tokens=24, seed=5))
    (choice,) = answer["choices"]
    assert [choice["message"]["content"]] == site.tokenizer.decode(tokens)
    assert choice["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(prompt), 24)
    (decision,) = site.decisions(answer["id"])
    assert decision["pinned_rank"] is None
    assert site.ended(answer["id"])["rank"] == decision["rank"]


def test_chat_stream(site, router):
    tokens = site.expected(site.tokenizer.chat_prompt("Count."), 24)
    body = chat_body("Count.", max_tokens=24, stream_options={"include_usage": True})
    with router.stream(CHAT, body) as stream:
        events = list(stream)
    texts = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    assert len([text for text in texts if text]) == 24  # one event per token: nothing is held back
    assert ["".join(text or "" for text in texts)] == site.tokenizer.decode(tokens)
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 24
    assert site.ended(events[0]["id"])["completion_tokens"] == 24


@pytest.mark.parametrize("prompt_kind", ["text", "ids"])
def test_generate(site, router, prompt_kind):
    text = "Licensed under the Apache License"
    (prompt,) = site.tokenizer.encode(text)
    given = {"text": text} if prompt_kind == "text" else {"input_ids": prompt}
    tokens = site.expected(prompt, 20)
    (answer,) = router.post(GENERATE, given | {"sampling_params": {"max_new_tokens": 20}})
    assert answer["output_ids"] == tokens
    assert [answer["text"]] == site.tokenizer.decode(tokens)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert (answer["meta_info"]["prompt_tokens"], answer["meta_info"]["completion_tokens"]) == (len(prompt), 20)


def test_generate_stream(site, router):
    tokens = site.expected([5, 6, 7], 20)
    with router.stream(GENERATE, {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 20}}) as stream:
        events = list(stream)
    # The router's last event repeats the token of the one before; its text is cumulative.
    assert [token for event in events[:-1] for token in event["output_ids"]] == tokens
    assert [events[-1]["text"]] == site.tokenizer.decode(tokens)
    assert events[-1]["meta_info"]["finish_reason"] == "length"


def test_several_choices_are_spread_over_the_ranks(site, router):
    (text,) = site.tokenizer.decode(site.expected(site.tokenizer.chat_prompt("Three."), 12))
    answer = router.post(CHAT, chat_body("Three.", max_tokens=12, n=3))
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [(i, text) for i in range(3)]
    assert answer["usage"]["completion_tokens"] == 36
    decisions = site.decisions(answer["id"])
    assert len(decisions) == 3
    assert {decision["rank"] for decision in decisions} == set(range(RANKS))


def test_several_choices_stream(site, router):
    (text,) = site.tokenizer.decode(site.expected(site.tokenizer.chat_prompt("Two."), 12))
    with router.stream(CHAT, chat_body("Two.", max_tokens=12, n=2)) as stream:
        events = list(stream)
    assert [chat_text(events, index) for index in range(2)] == [text, text]


def test_many_clients_at_once(site, router):
    questions = [f"Question number {number}?" for number in range(32)]
    prompts = site.tokenizer.chat_prompts(*questions)
    lengths = [5 + number for number in range(32)]
    wanted = site.tokenizer.decode(*map(site.expected, prompts, lengths))

    def ask(question, length):
        with router.stream(CHAT, chat_body(question, max_tokens=length)) as stream:
            return list(stream)

    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(ask, questions, lengths))
    assert list(map(chat_text, answers)) == wanted
    assert {site.ended(events[0]["id"])["rank"] for events in answers} == set(range(RANKS))


def test_logprobs(site, router):
    tokens = site.expected(site.tokenizer.chat_prompt("Sure?"), 8)
    answer = router.post(CHAT, chat_body("Sure?", max_tokens=8, logprobs=True))
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == site.tokenizer.decode(*([token] for token in tokens))
    assert [entry["logprob"] for entry in entries] == pytest.approx([expected_logprob(token) for token in tokens])


def test_a_stop_token_ends_the_answer(site, router):
    tokens = site.expected([9, 8, 7], 12)
    params = {"max_new_tokens": 12, "stop_token_ids": [tokens[5]]}
    (answer,) = router.post(GENERATE, {"input_ids": [9, 8, 7], "sampling_params": params})
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["output_ids"][:5] == tokens[:5]
    assert site.ended(answer["meta_info"]["id"])["completion_tokens"] == tokens.index(tokens[5]) + 1


def test_what_the_ranks_cannot_do_is_refused_by_name(router):
    answer = router.post(CHAT, chat_body("Hi", max_tokens=4, stop=["."]), status=400)
    assert "sampling_params.stop" in answer["error"]["message"]

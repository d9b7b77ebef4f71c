"""The HTTP endpoint over an engine that says prompts back: texts, fields, limits."""

from __future__ import annotations

import openai
import pytest
from echo_server import servers, start

import sparse_loop_jax as slj


@pytest.fixture(scope="module")
def tokenizer():
    return slj.load().tokenizer


@pytest.fixture
def serve(tokenizer):
    with servers(tokenizer) as begin:
        yield begin


@pytest.fixture(scope="module")
def shared(tokenizer):
    """One server for all tests that leave it as it was."""
    running = start(tokenizer, max_body_bytes=4096)
    yield running
    running.stop()


# Text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["naïve 🙂 日本語", "🙂🙃", "plain", "e\u0301é"])
def test_a_character_comes_whole_or_not_yet(shared, tokenizer, text):
    ids = tokenizer.encode(text).ids
    events = list(shared.say(ids, max_tokens=len(ids), stream=True))
    assert "".join(e.choices[0].text for e in events) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in e.choices[0].text for e in events)
    assert shared.say(ids, max_tokens=len(ids)).choices[0].text == text


def test_a_character_that_is_cut_off_is_left_out(shared, tokenizer):
    ids = tokenizer.encode("a🙂").ids
    assert len(ids) > 2, "a character of several tokens"
    for stream in (False, True):
        answer = shared.say(ids, max_tokens=len(ids) - 1, stream=stream)
        choices = [e.choices[0] for e in (answer if stream else [answer])]
        assert "".join(c.text for c in choices) == "a"
        assert choices[-1].finish_reason == "length"


def test_a_stop_string_is_found_across_tokens_and_never_shown(shared, tokenizer):
    text = "one two three four"
    ids = tokenizer.encode(text).ids
    options = {"max_tokens": len(ids), "stop": ["o thr", "zzz"]}
    events = list(shared.say(ids, stream=True, **options))
    assert "".join(e.choices[0].text for e in events) == "one tw"
    assert events[-1].choices[0].finish_reason == "stop"
    whole = shared.say(ids, **options)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("one tw", "stop")
    assert whole.usage.completion_tokens < len(ids), "nothing runs on after it"
    # What could have become a stop string is shown when nothing follows.
    events = list(shared.say(ids, stream=True, max_tokens=len(ids), stop="four more"))
    assert "".join(e.choices[0].text for e in events) == text
    assert events[-1].choices[0].finish_reason == "length"


def test_without_a_tokenizer_there_are_token_ids(serve):
    running = serve(tokenizer=None)
    extra = {"extra_body": {"return_token_ids": True}}
    choice = running.say([5, 6, 7], max_tokens=4, **extra).choices[0]
    assert (choice.text, choice.token_ids) == ("", [5, 6, 7, 5])
    events = list(running.say([5, 6, 7], max_tokens=4, stream=True, **extra))
    assert [i for e in events for i in e.choices[0].token_ids] == [5, 6, 7, 5]
    with pytest.raises(openai.BadRequestError, match="no tokenizer: send token ids"):
        running.say("text")
    with pytest.raises(openai.BadRequestError, match="no tokenizer: use stop_token_ids"):
        running.say([5], stop="x")


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_with_the_loops_they_were_read_from(shared, stream):
    extra = {"extra_body": {"return_token_ids": True, "min_loops": 2, "max_loops": 3}}
    answer = shared.say([5, 6, 7], max_tokens=4, stream=stream, **extra)
    choices = [e.choices[0] for e in (answer if stream else [answer])]
    assert [i for c in choices for i in c.token_ids] == [5, 6, 7, 5]
    assert [i for c in choices for i in c.exit_loops] == [3] * 4
    assert not hasattr(shared.say([5]).choices[0], "token_ids")


# What is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": 2}, "n", "n is not supported beyond 1, got 2"),
        ({"n": True}, "n", "n is not supported"),
        ({"best_of": 3}, "best_of", "best_of is not supported"),
        ({"echo": True}, "echo", "echo is not supported beyond False"),
        ({"logprobs": 0}, "logprobs", "logprobs is not supported"),
        ({"logprobs": 5}, "logprobs", "logprobs is not supported"),
        ({"suffix": "."}, "suffix", "suffix is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported beyond 0"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias is not supported"),
        ({"frobnicate": 1}, "frobnicate", "frobnicate is not a field that this server knows"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer >= 1"),
        ({"max_tokens": "8"}, "max_tokens", "max_tokens must be an integer, got '8'"),
        ({"max_tokens": 65}, "max_tokens", "max_tokens 65 is more than the 64 that"),
        ({"temperature": -1}, "temperature", "temperature must be a finite numbe"),
        ({"temperature": 10**400}, "temperature", "temperature must be in [0, 2]"),
        ({"temperature": "hot"}, "temperature", "temperature must be"),
        ({"top_p": 0}, "top_p", "top_p must be in (0, 1]"),
        ({"top_k": 0}, "top_k", "top_k must be an integer >= 1"),
        ({"seed": -1}, "seed", "seed must be an integer in [0, 2^63)"),
        ({"exit_threshold": 2}, "exit_threshold", "exit_threshold must be in [0, 1]"),
        ({"max_loops": 0}, "max_loops", "max_loops must be"),
        ({"ignore_eos": 1}, "ignore_eos", "ignore_eos must be True or False"),
        ({"stop": ""}, "stop", "stop must have texts of 1 to 256 characters"),
        ({"stop": ["x"] * 17}, "stop", "stop must be a text or a list of at most 16"),
        ({"stop": [5]}, "stop", "stop must have texts"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids must be a tuple"),
        ({"stream": "yes"}, "stream", "stream must be true or false"),
        ({"stream_options": {}}, None, None),
        ({"stream_options": {"include_usage": True}}, "stream_options", "is for streams"),
        ({"stream": True, "stream_options": {"x": 1}}, "x", "x is not a field"),
        ({"\ud800": 1}, "\\ud800", "\\ud800 is not a field"),
        ({"x" * 500: 1}, "x" * 80, "x is not a field"),
        ({"max_completion_tokens": 2}, "max_completion_tokens", "is not a field"),
        ({"priority": 1}, "priority", "priority has no effect on this serve"),
        ({"prompt": None}, "prompt", "prompt must be a text"),
        ({"prompt": []}, "prompt", "prompt must be a text"),
        ({"prompt": ["a", [1]], "user": "me"}, None, None),
        ({"prompt": ["a", 1]}, "prompt", "prompt must be a text"),
        ({"prompt": [1, True]}, "prompt", "prompt must be a text"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": [[]]}, "prompt", "the prompt is empty"),
        ({"prompt": [4096]}, "prompt", "token id 4096, outside the vocabulary of 4096"),
        ({"prompt": [-1]}, "prompt", "token id -1, outside the vocabulary"),
        ({"prompt": "\ud800"}, "prompt", "the prompt is no Unicode text"),
        ({"prompt": [1] * 65}, "prompt", "has 65 tokens and this server's context is 64"),
        ({"prompt": "x y " * 40}, "prompt", "tokens and this server's context is 64"),
        ({"prompt": ["a"] * 259}, "prompt", "259 prompts are more than this server takes"),
        ({"n": 1, "echo": False, "logit_bias": {}, "top_k": None, "user": "u"}, None, None),
    ],
)  # fmt: skip
def test_each_field_is_used_or_refused_by_name(shared, fields, param, message):
    body = {"prompt": "a", "max_tokens": 2} | fields
    status, _, answer = shared.raw(body=body)
    if message is None:
        assert status == 200, answer
        return
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]
    assert shared.service.open == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"a":' * 700, "not valid JSON"),
        (b"[" * 4000, "not valid JSON|nested too deeply"),
    ],
)
def test_a_body_is_one_json_object(shared, body, message):
    status, _, answer = shared.raw(body=body)
    assert status == 400
    assert any(part in answer["error"]["message"] for part in message.split("|"))


def test_what_is_too_large_is_not_read(shared, serve):
    status, _, answer = shared.raw(body={"prompt": "a" * 5000})
    assert (status, answer["error"]["message"]) == (413, "the body has more than 4096 bytes")
    chunks = iter([b'{"prompt": "', b"a" * 5000, b'"}'])
    status, _, answer = shared.raw(body=chunks, Transfer_Encoding="chunked")
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")


def test_a_text_that_cannot_fit_is_not_tokenized(serve, tokenizer):
    class Refuses:
        def get_vocab(self, with_added_tokens):
            return {"abcd": 0}

        def encode(self, *args, **kwargs):
            raise AssertionError("the text was tokenized")

    running = serve(tokenizer=Refuses())
    with pytest.raises(openai.BadRequestError, match="the prompt has 257 characters") as caught:
        running.say("a" * 257)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"Content_Type": "text/plain", "body": b"{}"}, 415, "must be application/json"),
        ({"Origin": "http://evil.example", "body": {"prompt": "a"}}, 403, "Origin"),
        ({"method": "GET"}, 405, "Method Not Allowed"),
        ({"path": "/v1/embeddings", "body": {}}, 404, "/v1/embeddings: Not Found"),
        ({"body": {"prompt": "a", "model": "other"}}, 404, "the model 'other' is not served"),
        ({"path": "/v1/chat/completions", "body": {}}, 404, "has no chat template"),
    ],
)
def test_other_refusals_have_the_same_shape(shared, request_, status, message):
    got, _, answer = shared.raw(**request_)
    assert got == status
    assert message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_priority_is_taken_where_it_counts(serve):
    running = serve(by_priority=True)
    assert running.say("a", extra_body={"priority": -3}).choices[0].finish_reason == "length"

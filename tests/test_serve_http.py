"""The HTTP endpoint over an engine that says prompts back: limits, errors, text, endings."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import tokenizers

from sparse_loop_jax.data import tiny_ouro
from sparse_loop_jax.engine import RequestOutput, RequestTimes
from sparse_loop_jax.generation.stops import StopStrings
from sparse_loop_jax.generation.text import TextStream
from sparse_loop_jax.serve.config import ServeConfig
from sparse_loop_jax.serve.server import Server, bind, url_of
from sparse_loop_jax.serve.service import Service

CONTEXT = 64


class EchoEngine:
    """Answers with the prompt's own tokens, one a step, as text of a real tokenizer.

    Attributes:
      gate: steps wait for it.
      failures: steps that are still to fail.
      fail_at: a request fails its step with so many tokens out.
      told: that step waits for it.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.fail_at: int | None = None
        self.told = threading.Event()
        self.closed = 0
        self.requests: dict[str, list] = {}  # prompt, params, tokens out, text, stop strings
        self.news: list[RequestOutput] = []

    def add_request(self, request_id, prompt, params, *, priority=0):
        if params.max_tokens > CONTEXT:
            raise ValueError(f"max_tokens {params.max_tokens} is more than {CONTEXT}")
        text = None if self.tokenizer is None else TextStream(self.tokenizer)
        self.requests[request_id] = [prompt, params, [], text, StopStrings(params.stop)]

    @property
    def has_unfinished(self):
        return bool(self.requests or self.news)

    def step(self):
        self.gate.wait(30)
        fails = self.failures > 0 and self.requests
        if any(len(r[2]) == self.fail_at for r in self.requests.values()):
            fails = self.told.wait(30)
        if fails:
            self.failures -= 1
            self.fail_at = None
            self.news = [self._output(i, "error") for i in list(self.requests)]
            raise RuntimeError("the device is on fire")
        outputs, self.news = self.news, []
        for request_id, (prompt, params, out, text, stops) in list(self.requests.items()):
            out.append(prompt[len(out) % len(prompt)])
            reason = "length" if len(out) == params.max_tokens else None
            if text is not None:
                text.add(out[-1:])
                if stops.cut(text.text(final=False), final=False)[1]:
                    reason = "stop"
            outputs.append(self._output(request_id, reason))
        return outputs

    def run(self, requests):
        for request in requests:
            self.add_request(*request)
        outputs = []
        while self.has_unfinished:
            outputs += self.step()
        return outputs[-1:]

    def abort(self, request_id):
        self.news.append(self._output(request_id, "abort"))

    def prometheus(self):
        return f"requests {len(self.requests)}\n"

    def close(self):
        self.closed += 1
        self.requests.clear()
        self.news.clear()

    def _output(self, request_id, reason):
        prompt, params, out, text, stops = self.requests[request_id]
        if reason:
            del self.requests[request_id]
        shown = text and stops.cut(text.text(final=bool(reason)), final=bool(reason))[0]
        return RequestOutput(
            request_id, list(out), out[-1:], shown,
            reason is not None, reason, len(prompt), 0, RequestTimes(None, None, None),
            exit_loops=[params.max_loops or 4] * len(out),
        )  # fmt: skip


class Running:
    """A server over an `EchoEngine`, in a thread."""

    def __init__(self, service: Service, engine: EchoEngine):
        self.service = service
        self.engine = engine
        self._listener = bind("127.0.0.1", 0)
        self.url = url_of(self._listener)
        started = threading.Event()
        self.server = Server(service, started=started.set)
        self.thread = threading.Thread(target=self.server.serve_on, args=(self._listener,))
        self.thread.start()
        assert started.wait(30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stop(self):
        self.engine.gate.set()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.client.close()
        assert self.engine.closed >= 1

    def say(self, prompt, **options):
        options = {"model": "echo", "max_tokens": 8, **options}
        return self.client.completions.create(prompt=prompt, **options)

    def raw(self, method="POST", path="/v1/completions", body: Any = b"", **headers):
        """Status, headers and JSON of a request as it is given."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        if not isinstance(body, bytes):
            body = body if hasattr(body, "__next__") else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        try:
            connection.request(
                method, path, body, headers, encode_chunked=not isinstance(body, bytes)
            )
            reply = connection.getresponse()
            text = reply.read()
            is_json = reply.headers["content-type"] == "application/json"
            return reply.status, reply.headers, json.loads(text) if is_json else text.decode()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(tiny_ouro() / "tokenizer.json"))


@pytest.fixture
def serve(tokenizer):
    """A function that starts a server and gives a `Running`; all are stopped in the end."""
    with contextlib.ExitStack() as stack:

        def start(*, tokenizer=tokenizer, by_priority=False, **config):
            model: Any = SimpleNamespace(
                tokenizer=tokenizer, config=SimpleNamespace(vocab_size=4096)
            )
            engine: Any = EchoEngine(tokenizer)
            config = ServeConfig("echo", **{"max_waiting": 2, **config})
            service = Service(
                model, engine, config, max_context=CONTEXT, rows=2, by_priority=by_priority
            )
            running = Running(service, engine)
            stack.callback(running.stop)
            return running

        yield start


@pytest.fixture(scope="module")
def shared(tokenizer):
    """One server for all tests that leave it as it was."""
    model: Any = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(vocab_size=4096))
    engine: Any = EchoEngine(tokenizer)
    config = ServeConfig("echo", max_body_bytes=4096)
    running = Running(Service(model, engine, config, max_context=CONTEXT, rows=2), engine)
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


# Load, failures and the end ------------------------------------------------------------


def _in_threads(count, call):
    """Runs `call(index)` in threads; a function that waits for all and gives the results."""
    results: list = [None] * count

    def run(index):
        try:
            results[index] = call(index)
        except openai.APIError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()

    def join():
        for thread in threads:
            thread.join(30)
        return results

    return join


def _wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def test_one_too_many_is_told_to_come_back(serve):
    running = serve()
    running.engine.gate.clear()
    join = _in_threads(4, lambda i: running.say(f"{i}"))
    _wait_until(lambda: running.service.open == 4)
    status, headers, answer = running.raw(body={"prompt": "a"})
    assert (status, headers["retry-after"]) == (429, "1")
    assert answer["error"]["type"] == "rate_limit_error"
    with pytest.raises(openai.RateLimitError, match="4 of 4 places are taken"):
        running.say("a")
    running.engine.gate.set()
    assert {r.choices[0].finish_reason for r in join()} == {"length"}
    with pytest.raises(openai.BadRequestError, match="5 prompts are more than"):
        running.say(["a"] * 5)
    assert len(running.say(["a"] * 4).choices) == 4
    assert running.service.open == 0


def test_all_prompts_of_a_request_are_taken_or_none(serve, monkeypatch):
    running = serve()
    add = running.engine.add_request

    def picky(request_id, prompt, params, *, priority=0):
        if prompt == [7]:
            raise ValueError("no sevens")
        add(request_id, prompt, params, priority=priority)

    monkeypatch.setattr(running.engine, "add_request", picky)
    with pytest.raises(openai.BadRequestError, match="no sevens"):
        running.say([[5], [6], [7]])
    _wait_until(lambda: not running.engine.has_unfinished)
    assert running.service.open == 0


def test_a_failed_step_fails_who_runs_and_is_got_over(serve, caplog):
    running = serve()
    running.engine.gate.clear()
    fails = _in_threads(1, lambda i: running.say(["a", "b"]))
    _wait_until(lambda: len(running.engine.requests) == 2)
    waits = _in_threads(2, lambda i: running.say(f"{i}"))
    _wait_until(lambda: running.service.open == 4)
    running.engine.failures = 1
    running.engine.gate.set()
    (error,) = fails()
    assert isinstance(error, openai.InternalServerError)
    assert "the device is on fire" in str(error)
    assert {r.choices[0].finish_reason for r in waits()} == {"length"}
    assert running.raw("GET", "/health")[0] == 200
    assert running.service.open == 0
    assert "a step of the engine failed" in caplog.text


def test_an_engine_that_keeps_failing_is_given_up(serve, caplog):
    running = serve()
    running.engine.failures = 2
    with pytest.raises(openai.InternalServerError, match="the device is on fire"):
        running.say("a")
    _wait_until(lambda: running.engine.closed)
    status, _, answer = running.raw("GET", "/health")
    assert (status, answer["status"]) == (503, "failed")
    assert answer["error"] == "RuntimeError: the device is on fire"
    with pytest.raises(openai.InternalServerError, match="the engine has failed") as caught:
        running.say("a")
    assert caught.value.status_code == 503
    assert running.raw("GET", "/metrics")[0] == 200
    assert "the engine is given up" in caplog.text


def test_a_failure_in_a_stream_is_its_last_event(serve):
    running = serve()
    running.engine.fail_at = 3
    stream = iter(running.say("a b c d e f", stream=True))
    assert next(stream).choices[0].text.startswith("a")
    running.engine.told.set()
    with pytest.raises(openai.APIError, match="the device is on fire"):
        list(stream)


def test_a_bug_of_the_server_is_not_told_to_clients(serve, monkeypatch, caplog):
    running = serve()

    async def broken(*args, **kwargs):
        raise KeyError("secret")

    monkeypatch.setattr(type(running.service.tokens), "encode", broken)
    status, _, answer = running.raw(body={"prompt": "a"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer["error"]["message"]


def test_metrics_do_not_wait_for_a_long_step(serve, monkeypatch):
    monkeypatch.setattr("sparse_loop_jax.serve.service._METRICS_SECONDS", 0.05)
    running = serve()
    running.engine.gate.clear()
    join = _in_threads(1, lambda i: running.say("a"))
    _wait_until(lambda: running.engine.requests)
    assert running.raw("GET", "/metrics")[0] == 503
    assert running.raw("GET", "/health")[0] == 200
    running.engine.gate.set()
    join()
    assert "requests 0" in running.raw("GET", "/metrics")[2]


@pytest.mark.parametrize("seconds", [20, 0])
def test_at_the_end_requests_may_finish_for_a_while(serve, seconds):
    running = serve(shutdown_seconds=seconds)
    running.engine.gate.clear()
    join = _in_threads(1, lambda i: running.say("a b c"))
    _wait_until(lambda: running.engine.requests)
    running.server.should_exit = True

    def refuses():
        try:
            running.raw("GET", "/health")
        except ConnectionError:
            return True
        return False

    _wait_until(refuses)
    if seconds:
        running.engine.gate.set()
        assert join()[0].choices[0].finish_reason == "length"
    else:  # however long the engine's step takes
        (result,) = join()
        assert result.status_code == 503
        assert "the server is shutting down" in str(result)
        assert running.service.open == 0
        running.engine.gate.set()
    running.thread.join(30)
    assert running.engine.closed == 1

"""The HTTP endpoint under load, when its engine fails, and when it is told to end."""

from __future__ import annotations

import threading
import time

import openai
import pytest
from echo_server import servers

import sparse_loop_jax as slj


@pytest.fixture(scope="module")
def tokenizer():
    return slj.load().tokenizer


@pytest.fixture
def serve(tokenizer):
    with servers(tokenizer) as begin:
        yield begin


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

"""An engine that says prompts back, and a server over it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import openai

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


@contextlib.contextmanager
def servers(tokenizer) -> Iterator[Callable[..., Running]]:
    """A function that starts a server as `start` does; all are stopped in the end."""
    with contextlib.ExitStack() as stack:

        def begin(**options):
            running = start(**{"tokenizer": tokenizer, "max_waiting": 2, **options})
            stack.callback(running.stop)
            return running

        yield begin


def start(tokenizer, *, by_priority=False, **config) -> Running:
    """A server that runs; stop it in the end."""
    model: Any = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(vocab_size=4096))
    engine: Any = EchoEngine(tokenizer)
    service = Service(
        model, engine, ServeConfig("echo", **config), max_context=CONTEXT, rows=2,
        by_priority=by_priority,
    )  # fmt: skip
    return Running(service, engine)

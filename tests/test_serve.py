"""The HTTP endpoint over a real engine, driven by OpenAI's client on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import threading
import time
import urllib.request

import openai
import pytest

import sparse_loop_jax as slj
from sparse_loop_jax.cli import main
from sparse_loop_jax.serve.build import load_with_template, make_service
from sparse_loop_jax.serve.config import ServeConfig
from sparse_loop_jax.serve.server import Server, bind, url_of
from sparse_loop_jax.serve.worker import EngineThread

CONTEXT, MOST = 256, 24
# The server of this module and that of the command line are one set of compiled programs;
# all prompts fit one chunk length.
SCHEDULER = slj.SchedulerConfig(max_num_seqs=16, max_context=CONTEXT, max_prefill_tokens=128)
PROMPTS = [f"{chr(65 + i % 26)}{i} " * (1 + i % 3) for i in range(62)] + ["abc", "wxyz"]
CHAT = "s: No.\nu: Hi\na:"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(ascii_checkpoint, tmp_path_factory):
    """The ASCII checkpoint, with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "ascii-chat"
    shutil.copytree(ascii_checkpoint, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def texts(checkpoint):
    """`MOST` greedy tokens of `generate` for each prompt; one character is one token."""
    model = slj.load(checkpoint, dtype="float32")
    prompts = [*PROMPTS, CHAT]
    out = slj.generate(model, prompts, max_new_tokens=MOST, eos_token_id=[])
    assert out.texts is not None
    return dict(zip(prompts, out.texts, strict=True))


@pytest.fixture(scope="module")
def service(checkpoint):
    model, template = load_with_template(str(checkpoint), dtype="float32")
    return make_service(
        model,
        ServeConfig("ascii-chat", max_waiting=64, shutdown_seconds=5),
        template=template,
        scheduler=SCHEDULER,
    )


@pytest.fixture(scope="module")
def url(service):
    """Of the server, which runs in a thread until the end of the module."""
    started = threading.Event()
    listener = bind("127.0.0.1", 0)
    where = url_of(listener)
    server = Server(service, started=started.set)
    thread = threading.Thread(target=server.serve_on, args=(listener,))
    thread.start()
    assert started.wait(30)
    yield where
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def held(service) -> dict[str, float]:
    """What the engine holds, read by the engine's own thread."""
    metrics = service.worker.call(slj.Engine.metrics).result(30)
    names = ("requests_held", "rows_in_use", "pages_in_use", "outputs_outstanding")
    return {name: metrics[name] for name in names if metrics[name]}


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def test_64_at_once_get_what_generate_gives_each(url, service, texts):
    tops = []

    async def one(client, index):
        options = {
            "model": "ascii-chat",
            "prompt": PROMPTS[index],
            "max_tokens": 1 + index % MOST,
            "temperature": 0,
            "extra_body": {"return_token_ids": True, "ignore_eos": True},
        }
        if index % 2:
            answer = await client.completions.create(**options)
            choice = answer.choices[0]
            return choice.text, choice.token_ids, choice.finish_reason
        text, ids, reason = "", [], None
        stream = await client.completions.create(
            stream=True, stream_options={"include_usage": True}, **options
        )
        async for event in stream:
            tops.append(service.open)
            for choice in event.choices:
                text += choice.text
                ids += choice.token_ids
                reason = reason or choice.finish_reason
            if event.usage is not None:
                assert event.usage.completion_tokens == len(ids)
                assert event.usage.prompt_tokens == len(PROMPTS[index])
        return text, ids, reason

    async def everybody():
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    got = asyncio.run(everybody())
    want = [texts[prompt][: 1 + i % MOST] for i, prompt in enumerate(PROMPTS)]
    assert [text for text, _, _ in got] == want
    assert [ids for _, ids, _ in got] == [[ord(c) for c in text] for text in want]
    assert {reason for _, _, reason in got} == {"length"}
    assert max(tops) > 16, "so many that some had to wait for a row"
    assert service.open == 0
    wait_until(lambda: not held(service))


def test_a_seed_decides_what_is_drawn(client):
    def draw(**options):
        answer = client.completions.create(
            model="ascii-chat", prompt="abc", max_tokens=20, **options
        )
        return answer.choices[0].text

    assert draw(seed=11, top_p=0.9) == draw(seed=11, top_p=0.9) != draw(seed=12, top_p=0.9)
    # Left out, two answers are two draws.
    assert draw() != draw()


def test_equal_prompts_of_a_request_draw_for_themselves(client):
    def draw(prompt, **options):
        answer = client.completions.create(
            model="ascii-chat", prompt=prompt, max_tokens=20, **options
        )
        return [choice.text for choice in answer.choices]

    assert len(set(draw(["abc"] * 3))) == 3
    seeded = draw(["abc", "wxyz", "abc"], seed=11)
    assert seeded == draw(["abc", "wxyz", "abc"], seed=11)
    assert seeded[:1] == draw("abc", seed=11)
    assert seeded[1:2] == draw("wxyz", seed=11)
    assert seeded[0] != seeded[2]


def test_several_prompts_are_several_choices(client, texts):
    prompts = ["abc", "wxyz"]
    want = [texts[prompt][:6] for prompt in prompts]
    options = {
        "model": "ascii-chat", "max_tokens": 6, "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    ids = [[ord(c) for c in prompt] for prompt in prompts]
    for asked in (prompts, ids):
        answer = client.completions.create(prompt=asked, **options)
        assert [c.text for c in answer.choices] == want
        assert [c.index for c in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens == 7
        assert answer.usage.total_tokens == 7 + 12
    streamed = ["", ""]
    for event in client.completions.create(prompt=prompts, stream=True, **options):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == want


def test_what_ends_a_text(client, texts):
    text = texts["abc"]
    # Two characters that come together somewhere later on: two tokens of this checkpoint.
    stop = next(text[i : i + 2] for i in range(5, 23) if text.find(text[i : i + 2]) >= 4)
    options = {"model": "ascii-chat", "prompt": "abc", "max_tokens": MOST, "temperature": 0}
    ignore = {"extra_body": {"ignore_eos": True}}
    answer = client.completions.create(stop=[stop, "\x7f\x7f"], **options, **ignore)
    assert answer.choices[0].text == text[: text.find(stop)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = client.completions.create(stop=stop, stream=True, **options, **ignore)
    assert "".join(e.choices[0].text for e in streamed) == text[: text.find(stop)]
    # A stop token is part of the text, as in `generate`.
    token = {"extra_body": {"ignore_eos": True, "stop_token_ids": [ord(text[5])]}}
    answer = client.completions.create(**options, **token)
    assert answer.choices[0].text == text[: text.find(text[5]) + 1]
    assert answer.choices[0].finish_reason == "stop"
    full = client.completions.create(**options, **ignore)
    assert (full.choices[0].text, full.choices[0].finish_reason) == (text, "length")


def test_a_chat_is_what_its_template_makes_of_it(client, texts):
    messages = [
        {"role": "system", "content": "No."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    ignore = {"extra_body": {"ignore_eos": True}}
    options = {"model": "ascii-chat", "messages": messages, "temperature": 0, **ignore}
    answer = client.chat.completions.create(max_completion_tokens=8, **options)
    assert answer.choices[0].message.content == texts[CHAT][:8]
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(CHAT)
    events = list(client.chat.completions.create(max_tokens=8, stream=True, **options))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events) == texts[CHAT][:8]
    assert events[-1].choices[0].finish_reason == "length"
    # Left out, the limit is the context.
    answer = client.chat.completions.create(**options)
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == CONTEXT + 1


def _gone_in_a_stream(url, client):
    stream = client.completions.create(
        model="ascii-chat", prompt="abc", max_tokens=CONTEXT - 3, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    stream.close()


def _gone_while_waiting(url, client):
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "abc", "max_tokens": CONTEXT - 3, "ignore_eos": True})
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        time.sleep(0.05)


@pytest.mark.parametrize("leave", [_gone_in_a_stream, _gone_while_waiting])
def test_who_goes_away_leaves_nothing_behind(leave, url, client, service):
    def aborted():
        return service.worker.call(slj.Engine.metrics).result(30)["requests_finished_abort"]

    before = aborted()
    leave(url, client)
    wait_until(lambda: aborted() == before + 1)
    wait_until(lambda: service.open == 0)
    assert not held(service)


def test_what_there_is_to_know(url, client):
    (listed,) = client.models.list().data
    assert (listed.id, listed.max_model_len) == ("ascii-chat", CONTEXT)
    assert client.models.retrieve("ascii-chat") == listed
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
        client.models.retrieve("other")
    with urllib.request.urlopen(f"{url}/health") as reply:
        assert json.load(reply) == {"status": "ok"}
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = reply.read().decode().splitlines()
    assert "sparse_loop_requests_held 0" in lines
    assert "sparse_loop_prompts_capacity 80" in lines


def test_the_command_serves_until_it_is_told_to_end(checkpoint, texts, capsys):
    answers: list = []
    printed = ""

    def visit():
        try:

            def is_ready():
                nonlocal printed
                printed += capsys.readouterr().out
                return "serving" in printed

            wait_until(is_ready, seconds=120)
            where = printed.split(" on ")[1].split(",")[0]
            with openai.OpenAI(base_url=f"{where}/v1", api_key="none", max_retries=0) as client:
                answers.append(
                    client.completions.create(
                        model="ascii-chat", prompt="abc", max_tokens=3, temperature=0
                    )
                )
        finally:
            signal.raise_signal(signal.SIGTERM)

    threads = threading.active_count()
    visitor = threading.Thread(target=visit)
    with _survived(signal.SIGTERM) as unhandled:
        visitor.start()
        status = main([
            "serve", str(checkpoint), "--port", "0", "--dtype", "float32",
            "--max-num-seqs", "16", "--max-context", str(CONTEXT),
            "--max-prefill-tokens", "128",
        ])  # fmt: skip
        visitor.join(30)
    assert status == 0
    assert not unhandled
    assert texts["abc"].startswith(answers[0].choices[0].text)
    assert threading.active_count() == threads, "the engine's thread has ended"


def test_options_reach_the_engine(monkeypatch, capsys):
    seen = {}

    def stop_here(model, config, **options):
        seen.update(options, config=config)
        raise ValueError("seen enough")

    monkeypatch.setattr("sparse_loop_jax.serve.build.make_service", stop_here)
    assert main([
        "serve", "--port", "0", "--retention", "0.25", "--speculative-tokens", "2",
        "--draft-loops", "1", "--adaptive", "--kv-memory", "1MiB", "--page-size", "8",
        "--prefix-caching", "--policy", "priority", "--max-num-seqs", "3",
        "--max-body", "64KiB", "--max-waiting", "5", "--implementation", "xla",
    ]) == 2  # fmt: skip
    assert seen["sparse"] == slj.SparseDecodeConfig(key_retention=0.25)
    assert seen["speculative"] == slj.SpeculativeConfig(2, 1, adaptive=True)
    assert seen["cache"] == slj.CacheConfig(
        memory_bytes=1 << 20, page_size=8, enable_prefix_caching=True
    )
    assert seen["scheduler"] == slj.SchedulerConfig(max_num_seqs=3, policy="priority")
    assert seen["config"].model_name == "tiny-ouro"
    assert (seen["config"].max_body_bytes, seen["config"].max_waiting) == (64 << 10, 5)
    assert seen["implementation"] == "xla"


@contextlib.contextmanager
def _survived(number):
    """Signals that the command did not take, where they would have ended the tests."""
    unhandled: list[int] = []
    before = signal.signal(number, lambda *_: unhandled.append(number))
    try:
        yield unhandled
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-loops", "2"], "--draft-loops and --adaptive need --speculative-tokens"),
        (["--port", "70000"], "--port must be in"),
        (["--max-waiting", "-1"], "--max-waiting must be >= 0"),
        (["--shutdown-seconds", "-1"], "--shutdown-seconds must be >= 0"),
        (["--max-body", "big"], "--max-body must be a size like 80GiB or 141GB, got 'big'"),
        (["--kv-memory", "0"], "--kv-memory must be a size like"),
        (["--num-pages", "2"], "--num-pages 2, and a page of all loops takes"),
        (["--implementation", "cuda"], "--implementation must be one of"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be"),
        (["no/such/directory/at/all"], "no such directory"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys):
    assert main(["serve", "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [(KeyboardInterrupt(), 130, ""), (RuntimeError("stuck"), 1, "sparse-loop: error: stuck\n")],
    ids=["interrupted", "stuck"],
)
def test_a_thread_that_compiles_does_not_abort_the_end(
    checkpoint, monkeypatch, capsys, error, status, told
):
    def serve_on(self, listener, *, warm_up):
        listener.close()
        raise error

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(Server, "serve_on", serve_on)
    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(EngineThread, "running", True)
    with pytest.raises(SystemExit) as left:
        main(["serve", str(checkpoint), "--port", "0", "--max-context", str(CONTEXT)])
    assert left.value.code == status
    assert capsys.readouterr().err.endswith("first requests\n" + told)


def test_a_port_that_is_taken_is_found_out_first(capsys, tmp_path):
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["serve", str(tmp_path / "absent"), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err

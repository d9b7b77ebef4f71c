"""Parts of the HTTP endpoint by themselves: stop strings, chat templates, messages."""

from __future__ import annotations

import json
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

import sparse_loop_jax as slj
from sparse_loop_jax.cli import main
from sparse_loop_jax.generation.stops import StopStrings
from sparse_loop_jax.serve.chat import ChatTemplate
from sparse_loop_jax.serve.errors import ApiError
from sparse_loop_jax.serve.fields import read_chat, read_completion
from sparse_loop_jax.serve.worker import EngineThread

MESSAGES = [{"role": "user", "content": "Hi"}]


# Stop strings --------------------------------------------------------------------------


def _first_stop(text, stops):
    """Where the text is cut: character by character, as slow as can be."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=20, max_size=20),
)
def test_stop_strings_do_not_depend_on_how_text_comes(text, stops, cuts):
    finder = StopStrings(stops)
    at = _first_stop(text, stops)
    want = text if at is None else text[:at]
    length, shown, stopped = 0, "", False
    for cut in cuts:
        length = min(length + cut, len(text))
        now, stopped = finder.cut(text[:length], final=length == len(text))
        assert now.startswith(shown), "nothing is taken back"
        assert want.startswith(now)
        shown = now
        # What is held back could still become a stop string.
        back = text[len(now) : length]
        assert stopped or not back or any(s.startswith(back) for s in stops)
        if stopped or length == len(text):
            break
    assert (shown, stopped) == (want, at is not None)


# Chat templates ------------------------------------------------------------------------


def _write(directory, **files):
    for name, content in files.items():
        name = {"jinja": "chat_template.jinja", "json_": "chat_template.json"}.get(
            name, f"{name}.json"
        )
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(text)


def test_without_a_template_there_is_none(tmp_path):
    _write(tmp_path, tokenizer_config={"eos_token": "<e>"})
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"tokenizer_config": {"chat_template": "config"}}, "config"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "default"},
                    ]
                }
            },
            "default",
        ),
        (
            {"json_": {"chat_template": "json"}, "tokenizer_config": {"chat_template": "c"}},
            "json",
        ),
        ({"jinja": "jinja", "json_": {"chat_template": "json"}}, "jinja"),
        (
            {
                "jinja": "{{ bos_token }}{{ eos_token }}",
                "special_tokens_map": {"bos_token": {"content": "<b>"}, "eos_token": "<x>"},
                "tokenizer_config": {"eos_token": "<e>"},
            },
            "<b><e>",
        ),
        (
            # What the published templates use: blocks without their line breaks, `continue`,
            # JSON, whether the assistant is next.
            {
                "jinja": "{% for m in messages %}\n{% if m.role == 'system' %}{% continue %}"
                "{% endif %}\n{{ m | tojson }}{% endfor %}\n"
                "{% if add_generation_prompt %}>{% endif %}{{ tools is none }}"
            },
            '{"role": "user", "content": "Hi"}>True',
        ),
    ],
)
def test_templates_are_found_where_checkpoints_have_them(tmp_path, files, text):
    _write(tmp_path, **files)
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(MESSAGES, {}) == text


def test_options_are_variables_but_not_the_messages():
    template = ChatTemplate("{{ enable_thinking }}{{ messages[0].content }}{{ eos_token }}",
                            {"eos_token": "<e>"}, "test")  # fmt: skip
    options = {"enable_thinking": False, "messages": [], "eos_token": "no"}
    assert template.render(MESSAGES, options) == "FalseHi<e>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only one at a time') }}", "only one at a time"),
        ("{{ messages[0].content.missing.deep }}", "has no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_a_template_that_refuses_is_the_clients_error(source, message):
    template = ChatTemplate(source, {}, "test")
    with pytest.raises(ApiError, match=message) as caught:
        template.render(MESSAGES, {})
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"jinja": "{% for %}"}, r"chat_template\.jinja: is no chat template"),
        ({"jinja": "x" * (2 << 20)}, "more than 1048576 bytes"),
        ({"json_": {"chat_template": 5}}, r"chat_template\.json: chat_template must be a text"),
        ({"tokenizer_config": "["}, r"tokenizer_config\.json: not valid JSON"),
    ],
)
def test_malformed_templates_are_refused_at_the_start(tmp_path, files, message):
    _write(tmp_path, **files)
    with pytest.raises(ValueError, match=message):
        ChatTemplate.load(tmp_path)


# Messages ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "messages must be a list of at least one message"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": "Hi"}, "messages must be a list of at least one message"),
        ({"messages": [5]}, r"messages\[0\], which is no object"),
        (
            {"messages": [*MESSAGES, {"role": "tool", "content": "x"}]},
            r"messages\[1\] with the",
        ),
        ({"messages": [{"role": "user"}]}, "whose content is no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is no text"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "'tool_calls'"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "whose name is no text"),
        ({"tools": [{}]}, r"tools is not supported beyond \[\]"),
        ({"logprobs": True}, "logprobs is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        (
            {"chat_template_kwargs": {"x": [1]}},
            "chat_template_kwargs has 'x': a text, a number",
        ),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be an object"),
        ({"max_completion_tokens": "8"}, "max_completion_tokens must be an integer"),
        ({"model": 5}, "model must be a text"),
    ],
)
def test_messages_and_options_are_checked(fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        read_chat({"messages": MESSAGES} | fields, "m", False)
    assert caught.value.status == 400


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts, "name": "N"}], "tools": []}
    assert read_chat(body, "m", False).messages == [
        {"role": "user", "content": "ab", "name": "N"}
    ]


# What is missing -----------------------------------------------------------------------


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
def test_without_the_extra_the_command_says_what_to_install(module, monkeypatch, capsys):
    for name in ("server", "app", "reply"):
        monkeypatch.delitem(sys.modules, f"sparse_loop_jax.serve.{name}", raising=False)
    for name in [n for n in sys.modules if n == module or n.startswith(f"{module}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["serve", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "pip install -e '.[serve]'" in error
    assert module in error


def test_a_template_without_jinja_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"needs jinja2: pip install -e '\.\[serve\]'"):
        ChatTemplate("x", {}, "test")


# Fields --------------------------------------------------------------------------------


def test_an_error_can_be_encoded_whatever_it_quotes():
    error = ApiError(400, "no \ud800", param="\udfff")
    assert json.dumps(error.body, ensure_ascii=False).encode()
    assert error.message == r"no \ud800"


def test_each_prompt_has_a_seed_and_room():
    asked = read_completion({"prompt": "a", "seed": 2**63 - 1}, "m", False).asked
    assert asked.params_for(20, 0).seed == 2**63 - 1
    assert asked.params_for(20, 1).seed == 0
    assert asked.params_for(20, 0).max_tokens == 16
    asked = read_completion({"prompt": "a"}, "m", False).asked
    assert asked.params_for(20, 0).seed != asked.params_for(20, 0).seed
    with pytest.raises(ApiError, match="max_tokens 16 is more than the 15 that") as caught:
        asked.params_for(15, 0)
    assert caught.value.code == "context_length_exceeded"


def test_a_chat_has_one_limit():
    chat = {"messages": MESSAGES, "max_completion_tokens": 5}
    for older in (None, 5):
        assert read_chat(chat | {"max_tokens": older}, "m", False).asked.max_tokens == 5
    with pytest.raises(ApiError, match="max_completion_tokens and max_tokens differ"):
        read_chat(chat | {"max_tokens": 6}, "m", False)


# The engine's thread -------------------------------------------------------------------


def test_after_the_warm_up_short_requests_compile_nothing(load_gold, compile_counter):
    engine = slj.Engine(
        load_gold("mha").model(),
        cache=slj.CacheConfig(num_pages=4 * 24, page_size=8),
        scheduler=slj.SchedulerConfig(max_num_seqs=3, max_context=64, max_prefill_tokens=64),
    )
    thread = EngineThread(engine, lambda news: None)
    thread.start()
    try:
        thread.warm_up().result(300)
        counted = thread.call(slj.Engine.metrics).result(60)
        assert counted["requests_finished_length"] == counted["generated_tokens"] == 0

        def serve(count, temperature):
            params = slj.SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True)
            requests = [(str(i), [i + 1, 5, 9], params) for i in range(count)]
            return thread.call(lambda engine: engine.run(requests)).result(300)

        with compile_counter() as compiled:
            for count in (1, 2, 3, 5):
                for temperature in (0.0, 0.8):
                    assert len(serve(count, temperature)) == count
        assert compiled.count == 0, compiled
    finally:
        assert thread.stop(timeout=60)
    assert not thread.running


def test_the_warm_up_fits_a_pool_of_one_page(load_gold):
    engine = slj.Engine(
        load_gold("mha").model(),
        cache=slj.CacheConfig(num_pages=4, page_size=8),
        scheduler=slj.SchedulerConfig(max_num_seqs=2, max_context=64),
    )
    assert engine.memory_plan.max_context == 8
    thread = EngineThread(engine, lambda news: None)
    thread.start()
    try:
        thread.warm_up().result(300)
    finally:
        assert thread.stop(timeout=60)

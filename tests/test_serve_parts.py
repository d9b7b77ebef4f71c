"""Parts of the HTTP endpoint by themselves: stop strings, chat templates, messages."""

from __future__ import annotations

import json
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sparse_loop_jax.cli import main
from sparse_loop_jax.generation.stops import StopStrings
from sparse_loop_jax.serve.chat import ChatTemplate
from sparse_loop_jax.serve.errors import ApiError
from sparse_loop_jax.serve.fields import read_chat

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
        ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs x must be a text"),
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

"""Chat templates of checkpoints: from messages to the text of a prompt.

A template is a Jinja program that came with somebody's weights. It runs in Jinja's sandbox,
with the names that Hugging Face's `transformers` documents for templates and no others.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from sparse_loop_jax.checkpoint.strict_json import read_json_object
from sparse_loop_jax.serve.errors import ApiError

_FILE = "chat_template.jinja"
_JSON_FILE = "chat_template.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_MAX_TEMPLATE_BYTES = 1 << 20


class ChatTemplate:
    """A compiled template.

    Args:
      source: of the template.
      special_tokens: texts by name, such as "eos_token".
      where: what errors name.

    Raises:
      ValueError: the source is no template, or Jinja is not installed.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], where: str):
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError:
            raise ValueError(
                f"{where}: a chat template needs jinja2: pip install -e '.[serve]'"
            ) from None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{where}: is no chat template: {error}") from None
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """The template of a checkpoint, None where it has none.

        `chat_template.jinja` goes before `chat_template.json` and that before
        `tokenizer_config.json`; of several templates the one named "default" is taken.

        Raises:
          ValueError: a file is malformed.
        """
        special: dict[str, str] = {}
        found: tuple[str, Path] | None = None
        for name in (_SPECIAL_TOKENS, _TOKENIZER_CONFIG, _JSON_FILE):
            path = directory / name
            if not path.is_file():
                continue
            values = read_json_object(path)
            special |= _special_tokens(values)
            source = _source(values.get("chat_template"), path)
            found = found if source is None else (source, path)
        path = directory / _FILE
        if path.is_file():
            if path.stat().st_size > _MAX_TEMPLATE_BYTES:
                raise ValueError(f"{path}: more than {_MAX_TEMPLATE_BYTES} bytes")
            found = path.read_text(encoding="utf-8"), path
        return None if found is None else cls(found[0], special, str(found[1]))

    def render(self, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
        """The prompt after which the assistant speaks.

        Args:
          messages: with "role" and "content".
          options: further variables of the template, such as "enable_thinking".

        Raises:
          ApiError: 400 where the template refuses the messages, or fails on them.
        """
        variables = {
            **options,
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # a template can raise whatever Python can
            raise ApiError(
                400,
                f"the chat template refuses these messages: {error!s:.300}",
                param="messages",
            ) from None


def _source(value: Any, path: Path) -> str | None:
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{path}: chat_template must be a text, got {value!r:.80}")
    return value


def _special_tokens(values: dict[str, Any]) -> dict[str, str]:
    """ "eos_token" and its like, each a text or an object with the text as "content"."""
    tokens = {}
    for name, value in values.items():
        if name.endswith("_token"):
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens[name] = value
    return tokens


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

"""What a client asks for, from the JSON of its request.

A field is used, or it is one of `IGNORED`, which change no token, or it has the value that
asks for nothing (`NEUTRAL`; null always does). Everything else is refused by name: an answer
never looks like one to a question that was not understood.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

from sparse_loop_jax.engine import SamplingParams
from sparse_loop_jax.generation.options import is_int, is_number
from sparse_loop_jax.serve.errors import ApiError

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tools": [],
    "tool_choice": "none",
}
# Passed on to `SamplingParams`, which checks them.
_SAMPLING = (
    "temperature", "top_p", "top_k", "seed", "ignore_eos", "exit_threshold", "min_loops",
    "max_loops",
)  # fmt: skip
# What the engine's errors may begin with.
SAMPLING_FIELDS = frozenset({*_SAMPLING, "max_tokens", "stop", "stop_token_ids"})
_MAX_TEMPERATURE = 2  # OpenAI's; JSON has numbers that no float holds
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 256
_DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions


@dataclasses.dataclass(frozen=True)
class Asked:
    """What both endpoints take.

    Attributes:
      params: all but `max_tokens` and `seed`, if they were left out.
      max_tokens: None: what the context has room for.
      seed: None: one is drawn for each prompt.
      priority: see `Engine.add_request`.
      stream, include_usage: how to answer.
      token_ids: whether the answer has token ids and their exit loops too.
    """

    params: SamplingParams
    max_tokens: int | None
    seed: int | None
    priority: int
    stream: bool
    include_usage: bool
    token_ids: bool

    def params_for(self, room: int, equals: int) -> SamplingParams:
        """For one prompt.

        Args:
          room: new tokens that may follow it.
          equals: how many equal prompts come before it; each draws for itself.

        Raises:
          ApiError: more tokens are asked for than there is room.
        """
        if self.max_tokens is not None and self.max_tokens > room:
            raise ApiError(
                400,
                f"max_tokens {self.max_tokens} is more than the {room} that this server's "
                "context has room for after the prompt: lower it, or shorten the prompt",
                param="max_tokens",
                code="context_length_exceeded",
            )
        seed = secrets.randbits(63) if self.seed is None else (self.seed + equals) % 2**63
        limit = room if self.max_tokens is None else self.max_tokens
        return dataclasses.replace(self.params, max_tokens=limit, seed=seed)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request to /v1/completions."""

    prompts: list[str | list[int]]
    asked: Asked


@dataclasses.dataclass(frozen=True)
class Chat:
    """A request to /v1/chat/completions; `messages` are as templates take them."""

    messages: list[dict[str, str]]
    template_options: dict[str, Any]
    asked: Asked


def read_completion(body: dict[str, Any], model_name: str, by_priority: bool) -> Completion:
    """Checks the fields of a completion.

    Args:
      body: the request's JSON.
      model_name: what `model` must be, where it is given.
      by_priority: whether `priority` has an effect.

    Raises:
      ApiError: 400 for a field that cannot be, 404 for another model.
    """
    fields = Fields(body)
    prompts = _prompts(fields.take("prompt"))
    asked = _asked(fields, model_name, by_priority, _DEFAULT_MAX_TOKENS)
    fields.require_empty()
    return Completion(prompts, asked)


def read_chat(body: dict[str, Any], model_name: str, by_priority: bool) -> Chat:
    """Checks the fields of a chat; arguments and errors as `read_completion`."""
    fields = Fields(body)
    messages = _messages(fields.take("messages"))
    options = fields.take("chat_template_kwargs", _dict, {})
    for name, value in options.items():
        if not isinstance(value, str | bool | int | float):
            raise _bad(
                "chat_template_kwargs", f"has {name!r:.80}: a text, a number or a bool is taken"
            )
    newer = fields.take("max_completion_tokens", _integer)
    older = body.get("max_tokens")
    if None not in (newer, older) and newer != older:
        raise _bad("max_completion_tokens", "and max_tokens differ: leave one of them out")
    asked = _asked(fields, model_name, by_priority, newer)
    fields.require_empty()
    return Chat(messages, options, asked)


class Fields:
    """The fields of a request, each taken once."""

    def __init__(self, body: dict[str, Any]):
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(
        self,
        name: str,
        check: Callable[[str, Any], Any] = lambda name, value: value,
        default: Any = None,
    ) -> Any:
        """The value, checked; the default where the field is missing or null."""
        if name not in self._left:
            return default
        return check(name, self._left.pop(name))

    def require_empty(self) -> None:
        """Refuses what was not taken, unless it asks for nothing."""
        for name, value in self._left.items():
            if name in IGNORED or (name in NEUTRAL and _same(value, NEUTRAL[name])):
                continue
            if name in NEUTRAL:
                raise _bad(
                    name, f"is not supported beyond {NEUTRAL[name]!r}, got {value!r:.80}"
                )
            raise _bad(name[:80], "is not a field that this server knows: leave it out")


def _asked(
    fields: Fields, model_name: str, by_priority: bool, default_tokens: int | None
) -> Asked:
    model = fields.take("model", _string, model_name)
    if model != model_name:
        raise ApiError(
            404,
            f"the model {model!r:.80} is not served here, {model_name!r} is",
            param="model",
            code="model_not_found",
        )
    max_tokens = fields.take("max_tokens", _integer, default_tokens)
    given = {name: fields.take(name) for name in _SAMPLING}
    given = {name: value for name, value in given.items() if value is not None}
    if is_number(given.get("temperature")) and given["temperature"] > _MAX_TEMPERATURE:
        raise _bad("temperature", f"must be in [0, {_MAX_TEMPERATURE}]")
    stop_ids = fields.take("stop_token_ids", default=())
    stop = _stops(fields.take("stop", default=[]))
    priority = fields.take("priority", _integer, 0)
    if priority and not by_priority:
        raise _bad("priority", "has no effect on this server: start it with --policy priority")
    stream = fields.take("stream", _bool, False)
    stream_options = fields.take("stream_options", _dict, {})
    if stream_options and not stream:
        raise _bad("stream_options", "is for streams: leave it out, or set stream")
    stream_options = Fields(stream_options)
    include_usage = stream_options.take("include_usage", _bool, False)
    stream_options.require_empty()
    # A client that leaves the temperature or the seed out expects what OpenAI's API does.
    sampling = {"temperature": 1.0, **given}
    try:
        params = SamplingParams(
            max_tokens=1 if max_tokens is None else max_tokens,
            stop=stop,
            stop_token_ids=stop_ids,
            **sampling,
        )
    except ValueError as error:
        raise ApiError(400, f"{error!s:.500}", param=str(error).split()[0]) from None
    return Asked(
        params=params,
        max_tokens=max_tokens,
        seed=given.get("seed"),
        priority=priority,
        stream=stream,
        include_usage=include_usage,
        token_ids=fields.take("return_token_ids", _bool, False),
    )


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(map(is_int, value)):
            return [value]
        if all(isinstance(p, str) or _is_ids(p) for p in value):
            return value
    raise _bad("prompt", "must be a text, a list of texts, token ids, or a list of token ids")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_int, value))


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        raise _bad("stop", f"must be a text or a list of at most {_MAX_STOPS} texts")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= _MAX_STOP_CHARACTERS:
            raise _bad(
                "stop",
                f"must have texts of 1 to {_MAX_STOP_CHARACTERS} characters, got {stop!r:.80}",
            )
    return tuple(stops)


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise _bad("messages", "must be a list of at least one message")
    return [_message(index, message) for index, message in enumerate(value)]


def _message(index: int, message: Any) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise _bad("messages", f"has {where}, which is no object")
    unknown = {k for k, v in message.items() if v is not None} - {"role", "content", "name"}
    if unknown:
        raise _bad("messages", f"has {where} with {min(unknown)!r:.80}, which is not supported")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise _bad(
            "messages", f"has {where} with the role {role!r:.80}: system, user or assistant"
        )
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _bad("messages", f"has {where} whose content is no text")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise _bad("messages", f"has {where} whose name is no text")
    return {"role": role, "content": content} | ({} if name is None else {"name": name})


def _is_text_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") != "text":
        return False
    return isinstance(part.get("text"), str)


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells True from 1."""
    if is_number(neutral):
        return is_number(value) and value == neutral
    return type(value) is type(neutral) and value == neutral


def _integer(name: str, value: Any) -> int:
    if not is_int(value):
        raise _bad(name, f"must be an integer, got {value!r:.80}")
    return value


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, f"must be true or false, got {value!r:.80}")
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(name, f"must be a text, got {value!r:.80}")
    return value


def _dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(name, f"must be an object, got {value!r:.80}")
    return value


def _bad(name: str, rest: str) -> ApiError:
    return ApiError(400, f"{name} {rest}", param=name)

"""Responses and events in the shapes of OpenAI's API."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from typing import Any

from sparse_loop_jax.serve.worker import Progress


@dataclasses.dataclass(frozen=True)
class Shape:
    """How one response looks.

    Attributes:
      chat: a chat's, or a completion's.
      model: its name.
      token_ids: whether choices have token ids and exit loops too.
    """

    chat: bool
    model: str
    token_ids: bool
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def whole(self, progress: list[Progress]) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = []
        for index, p in enumerate(progress):
            content = (
                {"message": {"role": "assistant", "content": p.text}}
                if self.chat
                else {"text": p.text}
            )
            choices.append(self._choice(index, content, p.finish_reason, p))
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, choices) | {"usage": usage(progress)}

    def opening(self, index: int) -> dict[str, Any]:
        """The first event of a chat's choice."""
        content = {"delta": {"role": "assistant", "content": ""}}
        return self._event([self._choice(index, content, None, Progress())])

    def piece(self, index: int, text: str, since: int, progress: Progress) -> dict[str, Any]:
        """An event with what is new of a choice: a text, and the tokens from `since` on."""
        content = {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
        reason = progress.finish_reason
        return self._event([self._choice(index, content, reason, progress, since)])

    def last(self, progress: list[Progress]) -> dict[str, Any]:
        """The event with the usage, after all choices."""
        return self._event([]) | {"usage": usage(progress)}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._object(kind, choices)

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        reason: str | None,
        progress: Progress,
        since: int = 0,
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        if self.token_ids:
            choice["token_ids"] = list(progress.token_ids[since:])
            choice["exit_loops"] = list(progress.exit_loops[since:])
        return choice

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage(progress: list[Progress]) -> dict[str, Any]:
    """Tokens of all prompts and answers; a stop token counts."""
    prompt = sum(p.prompt_tokens for p in progress)
    answer = sum(len(p.token_ids) for p in progress)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(p.cached_tokens for p in progress)},
    }


class Pieces:
    """What is new of each choice since the last time."""

    def __init__(self, shape: Shape, count: int):
        self._shape = shape
        self._texts = [0] * count  # characters told
        self._tokens = [0] * count
        self._ended = [False] * count

    def events(self, progress: list[Progress]) -> list[dict[str, Any]]:
        """Events that bring a client from the last progress to this one."""
        events = []
        for index, p in enumerate(progress):
            if self._ended[index]:
                continue
            text = p.text[self._texts[index] :]
            since = self._tokens[index]
            new_tokens = self._shape.token_ids and len(p.token_ids) > since
            self._ended[index] = p.finish_reason is not None
            if not (text or new_tokens or self._ended[index]):
                continue
            self._texts[index] += len(text)
            self._tokens[index] = len(p.token_ids)
            events.append(self._shape.piece(index, text, since, p))
        return events


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()

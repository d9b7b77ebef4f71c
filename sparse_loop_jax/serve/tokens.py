"""Prompts to token ids, within limits that are checked as early as they can be."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from sparse_loop_jax.generation.inputs import require_unicode
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.serve.errors import ApiError

# Characters of a request's prompts; more are tokenized in a thread. A megabyte takes seconds.
_LONG_TEXT = 4096


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The model's vocabulary and what fits its context.

    Attributes:
      tokenizer: a `tokenizers.Tokenizer`, or None.
      vocab_size: token ids are below it.
      max_context: prompt and continuation, in tokens of K/V.
      longest: characters of the longest token: a text of more than `max_context` times as
        many has too many tokens, whatever it says.
    """

    tokenizer: Any
    vocab_size: int
    max_context: int
    longest: int

    @classmethod
    def of(cls, model: Ouro, max_context: int) -> Tokens:
        """Those of a model whose requests may hold so many tokens of K/V."""
        longest = 0
        if model.tokenizer is not None:
            longest = max(map(len, model.tokenizer.get_vocab(with_added_tokens=True)))
        return cls(model.tokenizer, model.config.vocab_size, max_context, longest)

    def left_after(self, prompt_tokens: int) -> int:
        """New tokens that may follow a prompt: the last one needs no K/V."""
        return self.max_context - prompt_tokens + 1

    async def encode(
        self, prompts: Sequence[str | list[int]], *, special: bool = True
    ) -> list[list[int]]:
        """Token ids of prompts that fit the context.

        Args:
          special: whether the tokenizer adds what it puts around a text; a chat template has
            written it already.

        Raises:
          ApiError: no tokenizer, no tokens, too many, or ids outside the vocabulary.
        """
        characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        if characters > _LONG_TEXT:
            return await asyncio.to_thread(self._encode_all, prompts, special)
        return self._encode_all(prompts, special)

    def _encode_all(self, prompts, special: bool) -> list[list[int]]:
        return [self._encode(prompt, special) for prompt in prompts]

    def _encode(self, prompt: str | list[int], special: bool) -> list[int]:
        if isinstance(prompt, list):
            ids = self._checked(prompt)
        else:
            self._check_text(prompt)
            ids = self.tokenizer.encode(prompt, add_special_tokens=special).ids
        if not ids:
            raise _bad("the prompt is empty: it needs at least one token")
        if len(ids) > self.max_context:
            raise _too_long(f"{len(ids)} tokens", self.max_context)
        return ids

    def _check_text(self, text: str) -> None:
        if self.tokenizer is None:
            raise _bad("the checkpoint has no tokenizer: send token ids as the prompt")
        if len(text) > self.max_context * self.longest:
            raise _too_long(f"{len(text)} characters", self.max_context)
        try:
            require_unicode(text, "the prompt")
        except ValueError as error:
            raise _bad(str(error)) from None

    def _checked(self, ids: list[int]) -> list[int]:
        if len(ids) > self.max_context:
            raise _too_long(f"{len(ids)} tokens", self.max_context)
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise _bad(
                    f"the prompt has token id {token}, outside the vocabulary of "
                    f"{self.vocab_size}"
                )
        return ids


def _bad(message: str) -> ApiError:
    return ApiError(400, message, param="prompt")


def _too_long(length: str, context: int) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {length} and this server's context is {context} tokens: shorten it",
        param="prompt",
        code="context_length_exceeded",
    )

"""What a caller of `generate` passed, checked and turned into requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sparse_loop_jax.generation.options import is_int
from sparse_loop_jax.models.ids import id_array, within_vocabulary
from sparse_loop_jax.models.ouro import Ouro


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and what may follow it."""

    prompt: np.ndarray  # int32 [tokens], at least one
    max_new_tokens: int  # at least 1, within the context
    stop_ids: tuple[int, ...]
    occurrence: int  # how many equal prompts come before it in the call

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K/V may be held: the last emitted token is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


def make_requests(
    model: Ouro,
    prompts: str | Sequence,
    max_new_tokens: int | Sequence[int],
    eos_token_id: int | Sequence[int] | None,
) -> list[Request]:
    """Checks prompts and limits, and tokenises strings.

    Raises:
      ValueError: nothing to do, no list of prompts, an empty prompt, a token id outside the
        vocabulary, a prompt longer than the context, a limit below 1, or text without a
        tokenizer.
    """
    try:
        each = iter([prompts] if isinstance(prompts, str) else prompts)
    except TypeError:
        raise ValueError(
            f"prompts must be a string or a list of prompts, got {prompts!r}"
        ) from None
    prompts = list(each)
    if not prompts:
        raise ValueError("prompts is empty: pass at least one string or list of token ids")
    if not isinstance(prompts[0], str | Sequence | np.ndarray) and not hasattr(
        prompts[0], "__array__"
    ):
        raise ValueError("prompts must be a list of prompts: wrap one list of ids in a list")
    limits = _limits(max_new_tokens, len(prompts))
    stop_ids = _stop_ids(model, eos_token_id)
    seen: dict[bytes, int] = {}
    requests = []
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        ids = token_ids(model, prompt, f"prompt {index}")
        if len(ids) > model.config.max_position_embeddings:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens, more than the context of "
                f"{model.config.max_position_embeddings}: shorten it"
            )
        occurrence = seen.get(ids.tobytes(), 0)
        seen[ids.tobytes()] = occurrence + 1
        room = model.config.max_position_embeddings - len(ids) + 1
        requests.append(Request(ids, min(limit, room), stop_ids, occurrence))
    return requests


def _limits(max_new_tokens, count: int) -> list[int]:
    each = (
        [max_new_tokens] * count
        if is_int(max_new_tokens) or not isinstance(max_new_tokens, Sequence)
        else list(max_new_tokens)
    )
    if len(each) != count:
        raise ValueError(
            f"max_new_tokens has {len(each)} values for {count} prompts: pass one, or one each"
        )
    for limit in each:
        if not is_int(limit) or limit < 1:
            raise ValueError(f"max_new_tokens must be an integer >= 1, got {limit!r}")
    return [int(limit) for limit in each]


def _stop_ids(model: Ouro, eos_token_id) -> tuple[int, ...]:
    if eos_token_id is None:
        return model.config.eos_token_ids
    ids = [eos_token_id] if is_int(eos_token_id) else eos_token_id
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise ValueError(
            f"eos_token_id must be a token id or a list of them, got {eos_token_id!r}"
        )
    for token in ids:
        if not is_int(token) or not 0 <= token < model.config.vocab_size:
            raise ValueError(
                f"eos_token_id has {token!r}, which is not a token id below "
                f"{model.config.vocab_size}"
            )
    return tuple(int(t) for t in ids)


def token_ids(model: Ouro, prompt, name: str) -> np.ndarray:
    """Token ids int32 of a text, or of ids as they are; `name` is for complaints.

    Raises:
      ValueError: nothing is there, an id is none, or text is no Unicode or meets a model
        without a tokenizer.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(
                f"{name} is text and the model has no tokenizer: pass token ids, or load a "
                "checkpoint with a tokenizer.json"
            )
        require_unicode(prompt, name)
        prompt = model.tokenizer.encode(prompt).ids
    ids = id_array(prompt, name)
    if ids.size == 0:
        raise ValueError(f"{name} is empty: it needs at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{name} must be a string or a flat list of integer token ids, got {ids.dtype} of "
            f"shape {ids.shape}"
        )
    return within_vocabulary(ids, model.config.vocab_size, name)


def require_unicode(text: str, name: str) -> None:
    """Raises ValueError for what no tokenizer takes: halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no Unicode text: {error}") from None

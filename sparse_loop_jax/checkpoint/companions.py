"""The small files next to the weights: tokenizer, generation settings, chat template."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from sparse_loop_jax.checkpoint.huggingface_config import token_ids
from sparse_loop_jax.checkpoint.strict_json import read_json_object
from sparse_loop_jax.models.config import OuroConfig

TOKENIZER_NAME = "tokenizer.json"
GENERATION_NAME = "generation_config.json"

# Copied unchanged from one format to the other.
COMPANIONS = (
    TOKENIZER_NAME,
    GENERATION_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def copy_companions(source: Path, target: Path) -> None:
    """Copies those of `COMPANIONS` that `source` has, byte for byte."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def load_tokenizer(directory: Path, config: OuroConfig) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None where there is no `tokenizer.json`.

    It neither cuts nor pads, whatever the file says.

    Raises:
      ValueError: the file cannot be read, or it has ids outside the model's vocabulary.
    """
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare exceptions
        raise ValueError(f"{path}: not a tokenizer: {error!s:.300}") from None
    # A file can ask for these; a prompt that is cut or filled up is not the one that was given.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= config.vocab_size:
        raise ValueError(
            f"{path}: has the token id {highest}, but the model's vocab_size is "
            f"{config.vocab_size}"
        )
    return tokenizer


def with_generation_eos(directory: Path, config: OuroConfig) -> OuroConfig:
    """`config` whose stop ids include those of `generation_config.json`, if there is one.

    The two files disagree in published chat models: `config.json` names the end of a text
    (id 0), `generation_config.json` the end of a turn (id 2). Both end a generation.

    Raises:
      ValueError: the file is malformed, or an id is outside the vocabulary.
    """
    path = directory / GENERATION_NAME
    if not path.is_file():
        return config
    try:
        more = token_ids(read_json_object(path).get("eos_token_id"))
        both = tuple(dict.fromkeys((*config.eos_token_ids, *more)))
        return dataclasses.replace(config, eos_token_ids=both)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None

"""From a model, or from a checkpoint of the other format, to a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparse_loop_jax.checkpoint.atomic import new_directory
from sparse_loop_jax.checkpoint.companions import TOKENIZER_NAME, copy_companions
from sparse_loop_jax.checkpoint.huggingface import write_huggingface
from sparse_loop_jax.checkpoint.loading import PathLike, is_native, open_source
from sparse_loop_jax.checkpoint.orbax import write_orbax
from sparse_loop_jax.checkpoint.shards import DEFAULT_SHARD_BYTES
from sparse_loop_jax.checkpoint.source import ParamsSource, Source, choose_dtype
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.models.params import OuroParams


def convert(src: PathLike, dst: PathLike, *, dtype: Any = None) -> None:
    """Converts a Hugging Face directory into a native one, or a native one back.

    Streamed: one array is in memory at a time. Without `dtype` every tensor keeps its bits.
    Tokenizer, generation settings and chat template are copied as they are. `dst` appears
    complete or not at all.

    Args:
      src: a checkpoint of either format.
      dst: where to; must not exist, or be an empty directory.
      dtype: of the weights, as for `load`; None: as stored.

    Raises:
      FileNotFoundError: `src` is no checkpoint, or the parent of `dst` does not exist.
      ValueError: `src` is refused (see `load`), `dst` has contents, or a value is out of
        `dtype`'s range.
    """
    directory = Path(src)
    native = is_native(directory)
    with new_directory(Path(dst)) as target:
        source = open_source(directory)
        write: Callable[[Path, Source, np.dtype], None]
        write = write_huggingface if native else write_orbax
        write(target, source, choose_dtype(source, dtype))
        copy_companions(directory, target)


def save_huggingface(
    model: Ouro | OuroParams,
    path: PathLike,
    *,
    config: OuroConfig | None = None,
    dtype: Any = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a model as a Hugging Face directory with the published names.

    Streamed, and bit for bit without `dtype`. The tokenizer goes with an `Ouro` that has one.

    Args:
      model: an `Ouro`, or its weights alone.
      path: the directory; must not exist, or be empty.
      config: required with weights alone, refused otherwise.
      dtype: of the file, as for `load`; None: the model's.
      shard_bytes: most bytes of tensors in a file; more files and an index if need be.

    Raises:
      FileNotFoundError: the parent of `path` does not exist.
      ValueError: `path` has contents; weights that do not fit the configuration; a value
        out of `dtype`'s range; `shard_bytes` below 1.
    """
    source = _source(model, config)
    with new_directory(Path(path)) as target:
        write_huggingface(target, source, choose_dtype(source, dtype), shard_bytes)
        _save_tokenizer(model, target)


def save_orbax(
    model: Ouro | OuroParams,
    path: PathLike,
    *,
    config: OuroConfig | None = None,
    dtype: Any = None,
) -> None:
    """Writes a model as a directory of the native format; as `save_huggingface` otherwise.

    Raises:
      FileNotFoundError, ValueError: as `save_huggingface`.
    """
    source = _source(model, config)
    with new_directory(Path(path)) as target:
        write_orbax(target, source, choose_dtype(source, dtype))
        _save_tokenizer(model, target)


def _source(model: Ouro | OuroParams, config: OuroConfig | None) -> ParamsSource:
    if isinstance(model, Ouro):
        if config is not None:
            raise ValueError("config is for weights alone; an Ouro has its own")
        return ParamsSource(model.params, model.config)
    if config is None:
        raise ValueError("weights alone need config=...")
    return ParamsSource(model, config)


def _save_tokenizer(model: Ouro | OuroParams, target: Path) -> None:
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        (target / TOKENIZER_NAME).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")

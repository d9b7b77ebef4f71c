"""From a path to a model that can generate."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparse_loop_jax.checkpoint import hub
from sparse_loop_jax.checkpoint.companions import load_tokenizer, with_generation_eos
from sparse_loop_jax.checkpoint.huggingface import CONFIG_NAME, HuggingFaceSource
from sparse_loop_jax.checkpoint.orbax import MANIFEST_NAME, OrbaxSource, read_manifest
from sparse_loop_jax.checkpoint.source import read_params
from sparse_loop_jax.data import tiny_ouro
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.models.params import OuroParams

PathLike = str | os.PathLike[str]


def is_native(directory: Path) -> bool:
    """True for the native format, False for Hugging Face's.

    Raises:
      FileNotFoundError: there is no such directory, or it is no checkpoint.
      ValueError: it is a file.
    """
    if not directory.exists():
        raise FileNotFoundError(f"{directory}: no such directory")
    if not directory.is_dir():
        raise ValueError(f"{directory}: is a file; a checkpoint is a directory")
    if (directory / MANIFEST_NAME).exists():
        return True
    if (directory / CONFIG_NAME).exists():
        return False
    raise FileNotFoundError(
        f"{directory}: is no checkpoint: it has neither {CONFIG_NAME} (Hugging Face) nor "
        f"{MANIFEST_NAME} (native, written by `sparse-loop convert`)"
    )


def open_source(directory: Path) -> HuggingFaceSource | OrbaxSource:
    """The checkpoint in `directory`, checked as far as possible without reading weights.

    Raises:
      FileNotFoundError, ValueError: it is none, or a bad one.
    """
    return OrbaxSource(directory) if is_native(directory) else HuggingFaceSource(directory)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What is known of a checkpoint without reading its weights."""

    format: str  # "Hugging Face" or "native"
    config: OuroConfig
    dtypes: frozenset[np.dtype]
    nbytes: int  # of all weights as stored


def summarize(directory: Path) -> Summary:
    """Reads configuration and headers; starts no device.

    Raises:
      FileNotFoundError, ValueError: as `load`.
    """
    if is_native(directory):
        config, dtype = read_manifest(directory)
        nbytes = config.num_parameters * dtype.itemsize
        summary = Summary("native", config, frozenset([dtype]), nbytes)
    else:
        source = HuggingFaceSource(directory)
        summary = Summary("Hugging Face", source.config, source.dtypes, source.nbytes)
    config = with_generation_eos(directory, summary.config)
    return dataclasses.replace(summary, config=config)


@contextlib.contextmanager
def local_directory(path: PathLike | None, revision: str | None = None) -> Iterator[Path]:
    """The directory that `path` means to `load`: local, the Hub's cache, or bundled.

    Raises:
      FileNotFoundError, ValueError: see `load`.
    """
    if path is None:
        if revision is not None:
            raise ValueError("the bundled model has no revision; leave it out")
        with importlib.resources.as_file(tiny_ouro()) as directory:
            yield directory
        return
    directory = Path(path)
    if not directory.exists() and hub.is_repository(os.fspath(path)):
        directory = hub.download(os.fspath(path), revision)
    elif revision is not None:
        raise ValueError(f"{path}: revision is for Hub ids, and this is a local path")
    yield directory


def load(
    path: PathLike | None = None,
    *,
    dtype: Any = None,
    revision: str | None = None,
    sharding: Any = None,
) -> Ouro:
    """Loads a model and its tokenizer.

    Everything that can be checked without reading weights is checked first, and all problems
    with tensors are reported together. Weights go one at a time to their devices. No code of
    the checkpoint is ever run, and no pickle read.

    Args:
      path: a Hugging Face directory (`config.json` and safetensors), a directory of the
        native format, or, where there is no such directory, a Hub id `organisation/name`.
        None: the small trained model that comes with the package.
      dtype: of the weights: "float32", "bfloat16", "float16" or the NumPy or JAX dtype of
        that name. None: as stored.
      revision: the full commit hash of a Hub id; required there, refused elsewhere.
      sharding: where the weights go: a `jax.sharding.Sharding` for all, or an `OuroParams`
        of them. None: JAX's default device.

    Returns:
      An `Ouro`. Its `tokenizer` is a `tokenizers.Tokenizer`, or None where the checkpoint
      has no `tokenizer.json`. Its `config.eos_token_ids` are those of `config.json` and of
      `generation_config.json` together.

    Raises:
      FileNotFoundError: there is no such directory, it is no checkpoint, or a file of it is
        missing.
      ValueError: anything wrong with the checkpoint or with the arguments.
    """
    with local_directory(path, revision) as directory:
        source = open_source(directory)
        # The small files first: they should not fail after minutes of reading weights.
        config = with_generation_eos(directory, source.config)
        tokenizer = load_tokenizer(directory, config)
        params = read_params(source, dtype=dtype, sharding=sharding)
    model = Ouro(config, params=params)
    model.tokenizer = tokenizer
    return model


def load_huggingface(
    path: PathLike, *, dtype: Any = None, sharding: Any = None
) -> tuple[OuroConfig, OuroParams]:
    """Configuration and weights of a Hugging Face directory; arguments as `load`'s.

    The configuration is that of `config.json` alone.

    Raises:
      FileNotFoundError, ValueError: as `load`.
    """
    source = HuggingFaceSource(Path(path))
    return source.config, read_params(source, dtype=dtype, sharding=sharding)


def load_orbax(
    path: PathLike, *, dtype: Any = None, sharding: Any = None
) -> tuple[OuroConfig, OuroParams]:
    """Configuration and weights of a native directory; arguments as `load`'s.

    Raises:
      FileNotFoundError, ValueError: as `load`.
    """
    source = OrbaxSource(Path(path))
    return source.config, read_params(source, dtype=dtype, sharding=sharding)

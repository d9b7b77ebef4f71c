"""Hugging Face checkpoints: the published tensor names, checked and mapped to `OuroParams`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparse_loop_jax.checkpoint.huggingface_config import config_from_dict, config_to_dict
from sparse_loop_jax.checkpoint.safetensors import TensorInfo, read_tensor_into
from sparse_loop_jax.checkpoint.shards import DEFAULT_SHARD_BYTES, read_headers, write_tensors
from sparse_loop_jax.checkpoint.source import Source, check_layer_count, leaf_shapes
from sparse_loop_jax.checkpoint.strict_json import listed, read_json_object
from sparse_loop_jax.models.config import OuroConfig

CONFIG_NAME = "config.json"

# Bounds of what looking for similar names may cost.
_SUGGESTED, _CANDIDATES, _NAME_LENGTH = 20, 600, 200


class Piece(NamedTuple):
    """One published tensor: a block of rows of one leaf."""

    tensor: str
    leaf: str
    row: int  # first row inside the leaf
    shape: tuple[int, ...]


# Leaf to the published names of its blocks of rows, from the first row on.
_TOP = {
    "embed": ("model.embed_tokens.weight",),
    "norm": ("model.norm.weight",),
    "exit_gate": ("model.early_exit_gate.weight",),
    "exit_gate_bias": ("model.early_exit_gate.bias",),
    "head": ("lm_head.weight",),
}
_LAYER = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "out": ("self_attn.o_proj.weight",),
    "input_norm_2": ("input_layernorm_2.weight",),
    "post_attention_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
    "post_attention_norm_2": ("post_attention_layernorm_2.weight",),
}


def pieces(config: OuroConfig) -> list[Piece]:
    """Every tensor of a checkpoint of `config`, leaf by leaf and row by row."""
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    fused = {"qkv": (query, key, key), "gate_up": (config.intermediate_size,) * 2}
    result = []
    for leaf, shape in leaf_shapes(config).items():
        if leaf.startswith("layers."):
            _, layer, field = leaf.split(".")
            names = [f"model.layers.{layer}.{name}" for name in _LAYER[field]]
        else:
            field, names = leaf, list(_TOP[leaf])
        row = 0
        for name, rows in zip(names, fused.get(field, shape[:1]), strict=True):
            result.append(Piece(name, leaf, row, (rows, *shape[1:])))
            row += rows
    return result


class HuggingFaceSource:
    """A checkpoint directory whose configuration and headers have been checked.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a refused configuration, a malformed file, or tensors that are not exactly
        those of the configuration; all problems with tensors are listed together.
    """

    def __init__(self, directory: Path):
        self.name = str(directory)
        where = directory / CONFIG_NAME
        self.config = config_from_dict(read_json_object(where), str(where))
        self._infos = read_headers(directory)
        check_tensors(self.name, self.config, self._infos)
        self._shapes = leaf_shapes(self.config)
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces(self.config):
            self._pieces.setdefault(piece.leaf, []).append(piece)

    @property
    def dtypes(self) -> frozenset[np.dtype]:
        return frozenset(info.dtype for info in self._infos.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self._infos.values())

    def read(self, leaf: str, dtype: np.dtype) -> np.ndarray:
        """One leaf, its tensors read straight into their rows of it."""
        out = _aligned_empty(self._shapes[leaf], dtype)
        for piece in self._pieces[leaf]:
            rows = out[piece.row : piece.row + piece.shape[0]]
            read_tensor_into(self._infos[piece.tensor], rows)
        return out


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that JAX's CPU backend takes over without a copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + nbytes].view(dtype).reshape(shape)


def check_tensors(where: str, config: OuroConfig, infos: dict[str, TensorInfo]) -> None:
    """Compares names and shapes with what `config` asks for.

    Raises:
      ValueError: with every missing, surplus and misshapen tensor.
    """
    check_layer_count(where, config, len(infos))
    expected = {piece.tensor: piece.shape for piece in pieces(config)}
    missing = [name for name in expected if name not in infos]
    surplus = [name for name in infos if name not in expected]
    problems = []
    for name in missing:
        shape = list(expected[name])
        near = _nearest(name, surplus, len(problems))
        there = f"; the nearest name there is {near} {list(infos[near].shape)}" if near else ""
        problems.append(f"{name} {shape} is missing{there}{_tie_hint(name)}")
    for name in surplus:
        near = _nearest(name, missing or list(expected), len(problems))
        meant = f"; the nearest expected name is {near} {list(expected[near])}" if near else ""
        what = f"{name:.{_NAME_LENGTH}} {list(infos[name].shape)}"
        problems.append(f"{what} is not part of the model{meant}{_tie_hint(name)}")
    for name, shape in expected.items():
        if name in infos and infos[name].shape != shape:
            problems.append(
                f"{name} has shape {list(infos[name].shape)}, expected {list(shape)}"
            )
    if problems:
        raise ValueError(
            f"{where}: {len(problems)} of its tensors do not fit config.json:{listed(problems)}"
        )


def _nearest(name: str, candidates: list[str], already: int) -> str | None:
    """The candidate most like `name`; only for the first problems, as it is slow."""
    if already >= _SUGGESTED or len(name) > _NAME_LENGTH:
        return None
    short = [c for c in candidates[:_CANDIDATES] if len(c) <= _NAME_LENGTH]
    return next(iter(difflib.get_close_matches(name, short, n=1)), None)


def _tie_hint(name: str) -> str:
    """`lm_head.weight` is missing or surplus exactly if the flag does not agree with it."""
    return " (tie_word_embeddings in config.json disagrees)" if name == "lm_head.weight" else ""


def write_huggingface(
    directory: Path,
    source: Source,
    dtype: np.dtype,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes `config.json` and safetensors files into an existing directory, streamed.

    Raises:
      ValueError: `shard_bytes` is not a positive integer.
    """
    layout = pieces(source.config)
    specs = {piece.tensor: (dtype, piece.shape) for piece in layout}
    write_tensors(directory, specs, _split(source, layout, dtype), shard_bytes)
    config: dict[str, Any] = config_to_dict(source.config, dtype)
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def _split(
    source: Source, layout: list[Piece], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """The published tensors of each leaf, of which one is held at a time."""
    name, leaf = "", np.empty(0)
    for piece in layout:
        if piece.leaf != name:
            del leaf
            name, leaf = piece.leaf, source.read(piece.leaf, dtype)
        yield piece.tensor, leaf[piece.row : piece.row + piece.shape[0]]

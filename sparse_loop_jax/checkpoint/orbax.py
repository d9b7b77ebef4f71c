"""The native format: a small manifest next to an Orbax checkpoint of the weights.

    sparse_loop_jax.json    format version, dtype, configuration in the keys of config.json
    params/                 an Orbax PyTree of plain arrays: {"embed": ..., "layers":
                            {"0": {"qkv": ...}, ...}, ...}, the leaves of `OuroParams`

Nothing in it names a device or a sharding, so that it restores anywhere. Orbax itself would
copy a whole tree of host arrays before it writes the first one, and read a whole tree at
once; here both go leaf by leaf.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_loop_jax.checkpoint.dtypes import WEIGHT_DTYPES, cast
from sparse_loop_jax.checkpoint.huggingface_config import config_from_dict, config_to_dict
from sparse_loop_jax.checkpoint.source import (
    Source,
    check_layer_count,
    check_shapes,
    leaf_shapes,
)
from sparse_loop_jax.checkpoint.strict_json import read_json_object
from sparse_loop_jax.models.config import OuroConfig

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

MANIFEST_NAME = "sparse_loop_jax.json"
PARAMS_NAME = "params"
FORMAT = "sparse-loop-jax"
VERSION = 1


def read_manifest(directory: Path) -> tuple[OuroConfig, np.dtype]:
    """The configuration and the dtype of the weights, without opening the weights.

    Raises:
      FileNotFoundError: there is no manifest.
      ValueError: it was written by another version, or `config_from_dict` refuses it.
    """
    path = directory / MANIFEST_NAME
    manifest = read_json_object(path)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ValueError(
            f"{path}: format {manifest.get('format')!r:.100} version "
            f"{manifest.get('version')!r:.100}; this library reads {FORMAT!r} version {VERSION}"
        )
    if set(manifest) != {"format", "version", "dtype", "config"}:
        raise ValueError(f"{path}: expected format, version, dtype and config")
    dtype = manifest["dtype"]
    if not isinstance(dtype, str) or dtype not in WEIGHT_DTYPES:
        raise ValueError(
            f"{path}: dtype must be one of {list(WEIGHT_DTYPES)}, got {dtype!r:.100}"
        )
    if not isinstance(manifest["config"], dict):
        raise ValueError(f"{path}: config must be an object, got {manifest['config']!r:.100}")
    return config_from_dict(manifest["config"], str(path)), WEIGHT_DTYPES[dtype]


class OrbaxSource:
    """A native checkpoint whose manifest agrees with the arrays that Orbax has.

    Raises:
      FileNotFoundError: there is no manifest.
      ValueError: another version; arrays that are missing, surplus, misshapen or of another
        dtype (all are listed); or Orbax cannot read the directory.
    """

    def __init__(self, directory: Path):
        import orbax.checkpoint as ocp

        self.name = str(directory)
        self.config, self._dtype = read_manifest(directory)
        self._path = (directory / PARAMS_NAME).absolute()
        self._checkpointer = ocp.PyTreeCheckpointer()
        self._check_arrays()

    @property
    def dtypes(self) -> frozenset[np.dtype]:
        return frozenset([self._dtype])

    def _check_arrays(self) -> None:
        # Orbax opens all arrays at once. In a damaged directory all of them would fail, but
        # only the first failure would reach us, the others the user's terminal. So one array
        # goes alone in front.
        self._restore("norm")
        try:
            metadata: Any = self._checkpointer.metadata(self._path)
            arrays = _flatten(metadata.item_metadata.tree)
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise _unreadable(self._path, error) from error
        check_layer_count(self.name, self.config, len(arrays))
        check_shapes(self.name, self.config, {n: tuple(a.shape) for n, a in arrays.items()})
        other = [f"{n} is {a.dtype}" for n, a in arrays.items() if a.dtype != self._dtype]
        if other:
            raise ValueError(
                f"{self.name}: the manifest says {self._dtype}, but {', '.join(other[:10])}"
            )

    def read(self, leaf: str, dtype: np.dtype) -> np.ndarray:
        """One leaf, read by itself, so that nothing else is in memory."""
        return cast(self._restore(leaf), dtype, leaf)

    def _restore(self, leaf: str) -> np.ndarray:
        import orbax.checkpoint as ocp

        item: Any = np.empty(())
        restore: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for key in reversed(leaf.split(".")):
            item, restore = {key: item}, {key: restore}
        try:
            tree = self._checkpointer.restore(
                self._path,
                args=ocp.args.PyTreeRestore(item, restore_args=restore, partial_restore=True),
            )
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise _unreadable(self._path, error) from error
        return _flatten(tree)[leaf]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {
        name: leaf
        for key, value in tree.items()
        for name, leaf in _flatten(value, f"{prefix}{key}.").items()
    }


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: Orbax cannot read it: {error!s:.500}")


def write_orbax(directory: Path, source: Source, dtype: np.dtype) -> None:
    """Writes the manifest and the weights into an existing directory, streamed."""
    import jax
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for name, shape in leaf_shapes(source.config).items():
        *parents, last = name.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = _PendingLeaf(source, name, dtype, math.prod(shape))
    registry = ocp.type_handlers.create_type_handler_registry(
        (_PendingLeaf, _streaming_handler()),
        # Orbax wants to know how it would write these, although there are none.
        (jax.Array, ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False)),
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save((directory / PARAMS_NAME).absolute(), args=ocp.args.PyTreeSave(tree))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": str(dtype),
        "config": config_to_dict(source.config, dtype),
    }
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")


@dataclasses.dataclass(frozen=True)
class _PendingLeaf:
    """What stands for an array in the tree that Orbax is asked to save."""

    source: Source
    name: str
    dtype: np.dtype
    size: int  # older releases of Orbax add up what there is to write

    def read(self) -> np.ndarray:
        return self.source.read(self.name, self.dtype)


def _streaming_handler() -> ocp.type_handlers.TypeHandler:
    """Writes `_PendingLeaf`s as NumPy arrays, each read only when it is its turn."""
    import orbax.checkpoint as ocp

    base = ocp.type_handlers.NumpyHandler
    # An array that was read for this alone need not be copied; older releases do anyway.
    named = inspect.signature(base).parameters
    options: dict[str, Any] = {}
    if "deepcopy_host_arrays" in named:
        options["deepcopy_host_arrays"] = False

    class StreamingHandler(base):
        async def serialize(self, values: Any, infos: Any, args: Any = None):
            args = args or [ocp.SaveArgs()] * len(values)
            for value, info, arg in zip(values, infos, args, strict=True):
                for future in await super().serialize([value.read()], [info], [arg]):
                    future.result()
            return []

    return StreamingHandler(**options)

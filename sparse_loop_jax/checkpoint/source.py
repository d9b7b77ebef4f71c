"""Weights one leaf at a time, whatever format they come from.

A leaf is one array of `OuroParams`, named by its path: `embed`, `layers.3.qkv`, `norm`. A
`Source` gives leaves as host arrays one after another, so that whoever takes them, a device
or a file of the other format, never needs the whole model in host memory.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.checkpoint.dtypes import cast, weight_dtype
from sparse_loop_jax.checkpoint.strict_json import listed
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.models.params import OuroParams, param_shapes


class Source(Protocol):
    """A model whose leaves can be read one at a time."""

    @property
    def name(self) -> str:
        """What errors call it, a path for example."""
        ...

    @property
    def config(self) -> OuroConfig: ...

    @property
    def dtypes(self) -> frozenset[np.dtype]:
        """Dtypes of the stored tensors; more than one need a choice to be read."""
        ...

    def read(self, leaf: str, dtype: np.dtype) -> np.ndarray:
        """One leaf, rounded to `dtype`, as an array that nobody else will write to."""
        ...


def leaf_shapes(config: OuroConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every leaf by name, in the order in which files hold them."""
    return {
        name: leaf.shape for name, leaf in leaves(param_shapes(config, jnp.float32)).items()
    }


def leaves(params: Any) -> dict[str, Any]:
    """The leaves of an `OuroParams` (of arrays, shardings, ...) by name."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def choose_dtype(source: Source, dtype: Any) -> np.dtype:
    """`dtype`, or the one in which `source` is stored where `dtype` is None.

    Raises:
      ValueError: an unknown dtype, or None where the tensors have several or such a one.
    """
    if dtype is not None:
        return weight_dtype(dtype)
    if len(source.dtypes) > 1:
        names = ", ".join(sorted(map(str, source.dtypes)))
        raise ValueError(f"{source.name}: tensors are of {names}; choose one with dtype=...")
    return weight_dtype(next(iter(source.dtypes)))


def read_params(source: Source, *, dtype: Any = None, sharding: Any = None) -> OuroParams:
    """Reads a model leaf by leaf onto its devices.

    Args:
      source: where from.
      dtype: of the weights; None: as stored.
      sharding: a `jax.sharding.Sharding` for every leaf, or an `OuroParams` of them; None:
        JAX's default device.

    Raises:
      ValueError: as `choose_dtype`; shardings that do not fit the model.
    """
    dtype = choose_dtype(source, dtype)
    shapes = param_shapes(source.config, dtype)
    names = list(leaves(shapes))
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        places = dict.fromkeys(names, sharding)
    else:
        places = leaves(sharding)
        if list(places) != names:
            raise ValueError(
                "sharding must be one jax.sharding.Sharding or an OuroParams of them with "
                f"the {len(names)} leaves of this model, got {len(places)} leaves"
            )
    arrays = {}
    # The largest first: what reading needs beside its result is then over before most of the
    # host's memory is taken.
    for name, leaf in sorted(leaves(shapes).items(), key=lambda item: -item[1].size):
        # The next leaf is read only when this one is where it belongs: transfers are
        # asynchronous, and each that is under way keeps its host array.
        array = jax.device_put(source.read(name, leaf.dtype), places[name])
        arrays[name] = jax.block_until_ready(array)
    structure = jax.tree_util.tree_structure(shapes)
    return jax.tree_util.tree_unflatten(structure, [arrays[name] for name in names])


class ParamsSource:
    """Leaves of a model in memory, each brought to the host only while it is read.

    Raises:
      ValueError: shapes that do not fit `config`, or arrays that other processes hold a
        part of.
    """

    def __init__(self, params: OuroParams, config: OuroConfig):
        self.config = config
        self.name = "the model"
        self._leaves = leaves(params)
        check_shapes(self.name, config, {n: tuple(x.shape) for n, x in self._leaves.items()})
        for name, leaf in self._leaves.items():
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                raise ValueError(
                    f"leaf {name} is spread over several processes; gather it before saving"
                )

    @property
    def dtypes(self) -> frozenset[np.dtype]:
        return frozenset(np.dtype(leaf.dtype) for leaf in self._leaves.values())

    def read(self, leaf: str, dtype: np.dtype) -> np.ndarray:
        return cast(_host_array(self._leaves[leaf]), dtype, leaf)


def _host_array(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array) or [d.platform for d in leaf.devices()] == ["cpu"]:
        return np.asarray(leaf)  # no copy
    # A JAX array keeps its host copy for as long as it lives; of a copy, that is not long.
    return np.asarray(jnp.copy(leaf))


def check_layer_count(where: str, config: OuroConfig, arrays: int) -> None:
    """Refuses an absurd number of layers, before a name is made for each of their arrays.

    Raises:
      ValueError: more than a thousand layers, and more than there are arrays.
    """
    if config.num_hidden_layers > max(1000, arrays):
        raise ValueError(
            f"{where}: num_hidden_layers is {config.num_hidden_layers}, but there are only "
            f"{arrays} arrays"
        )


def check_shapes(where: str, config: OuroConfig, found: dict[str, tuple[int, ...]]) -> None:
    """Compares leaves with what `config` asks for.

    Raises:
      ValueError: with every missing, surplus and misshapen leaf.
    """
    expected = leaf_shapes(config)
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not part of the model" for name in found if name not in expected]
    problems += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    if problems:
        raise ValueError(f"{where}: does not fit its configuration:{listed(problems)}")

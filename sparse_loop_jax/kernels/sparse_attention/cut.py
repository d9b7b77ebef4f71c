"""How the kernels that gather kept keys cut their work, and what they serve."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherConfig:
    """How a kernel cuts the work.

    Attributes:
      block_keys: keys of one step of a program, a power of two of at least 16.
      splits: pieces of the kept keys, at most.
      num_warps, num_stages: warps of a program, tiles in flight.
    """

    block_keys: int = 32
    splits: int = 1
    num_warps: int = 1
    num_stages: int = 3

    def __post_init__(self):
        block = self.block_keys
        if block < 16 or block & (block - 1):
            raise ValueError(f"block_keys must be a power of two of at least 16, got {block}")
        if min(self.splits, self.num_warps, self.num_stages) < 1:
            raise ValueError(f"splits, num_warps and num_stages must be positive, got {self}")


def choose_config(rows: int, capacity: int) -> GatherConfig:
    """A configuration for `rows` selections (all rows and heads) of up to `capacity` keys.

    About 512 programs keep an H200 busy in one round, and a second round that is not full
    costs more than longer programs do.
    """
    return GatherConfig(splits=min(max(512 // rows, 1), -(-capacity // 32)))


def check_shapes(head_dim: int, **arrays: jax.Array) -> None:
    """Refuses what the kernels do not serve.

    Raises:
      NotImplementedError: it names the head size or the array and its dtype.
    """
    if head_dim not in (16, 32, 64, 128):
        raise NotImplementedError(f"head_dim must be 16, 32, 64 or 128, got {head_dim}")
    for name, array in arrays.items():
        if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise NotImplementedError(f"{name} must be a float of 2 or 4 bytes: {array.dtype}")

"""Kernels that stream a weight matrix past a few rows.

Decoding multiplies 1 to 128 rows by every weight, so that the time is that of reading the
weights. The rows are the narrow operand of the matrix units, padded to a power of two, so
that a row's result does not depend on the others or on how many there are. Each program
takes a block of outputs and a slice of the reduction, and the slices are added by whoever
reads the result.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels.pallas_triton import load, release_next, store


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatvecConfig:
    """How a product is cut. All powers of two.

    Attributes:
      block_out, block_in: outputs of a program, reduction of one of its steps.
      splits: slices of the reduction.
      num_warps, num_stages: warps of a program, tiles in flight.
    """

    block_out: int
    block_in: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("block_out", "block_in", "splits", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.block_out < 16 or self.block_in < 16:
            raise ValueError(f"a tile needs at least 16 outputs and inputs, got {self}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be positive, got {self.num_stages}")

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether blocks cover the matrix `[outputs, inputs]` exactly."""
        return not (outputs % self.block_out or inputs % (self.block_in * self.splits))

    def padded_rows(self, rows: int, height: int) -> int:
        """Rows of a tile, whose weights are `height` outputs.

        The same instruction has to serve any number of rows, or they round differently: with
        64 outputs and four warps that is the warpgroup's product. Below 32 rows the
        assembler has each of these wait for the one before.
        """
        warpgroup = height >= 64 and self.num_warps >= 4
        return max(32 if warpgroup else 8, pl.next_power_of_2(rows))


def product_kernel(
    x_ref,  # [M, K]
    weight_ref,  # [N, K], or [2 N, K] where `gated`
    out_ref,  # [M, N], or float32 [splits, M, N]
    *,
    config: MatvecConfig,
    gated: bool,
):
    """Grid (N / block_out, splits)."""
    rows, inputs = x_ref.shape
    outputs = out_ref.shape[-1]
    padded = config.padded_rows(rows, config.block_out * (2 if gated else 1))
    share = inputs // config.splits
    block, slice_ = release_next(pl.program_id(0)), pl.program_id(1)
    out = block * config.block_out + jax.lax.iota(jnp.int32, config.block_out)
    weights = out
    if gated:  # one tile, the gate's rows above those of up
        line = jax.lax.iota(jnp.int32, 2 * config.block_out)
        weights = block * config.block_out + line % config.block_out
        weights += line // config.block_out * outputs
    row = jax.lax.iota(jnp.int32, padded)
    within = slice_ * share + jax.lax.iota(jnp.int32, config.block_in)
    real = jnp.broadcast_to((row < rows)[:, None], (padded, config.block_in))

    def body(step, total):
        column = (within + step * config.block_in)[None, :]
        x = load(x_ref.at[row[:, None], column], mask=real, other=0)
        return total + dot_rows(load(weight_ref.at[weights[:, None], column]), x)

    zero = jnp.zeros((weights.shape[0], padded), jnp.float32)
    result = jax.lax.fori_loop(0, share // config.block_in, body, zero)
    if gated:
        gate, up = jnp.split(result.astype(out_ref.dtype).astype(jnp.float32), 2, axis=0)
        silu = (gate / (1.0 + jnp.exp(-gate))).astype(out_ref.dtype)
        result = silu.astype(jnp.float32) * up
    # A padding row's index is past the end, so that it repeats no live one.
    index = (row[None, :], out[:, None])
    real = jnp.broadcast_to((row < rows)[None, :], (config.block_out, padded))
    if len(out_ref.shape) == 3:
        index = (slice_, *index)
    store(out_ref.at[index], result.astype(out_ref.dtype), mask=real)


def add_norm_kernel(
    parts_ref,  # float32 [splits, M, N], the slices of the branch's last product
    residual_ref,  # [M, N]
    gain_ref,  # [N]
    next_gain_ref,  # [N]
    new_residual_ref,  # [M, N]
    normed_ref,  # [M, N]
    *,
    eps: float,
):
    """Grid (M,). Rounds where the reference does: the product, each norm, each gain."""
    row = release_next(pl.program_id(0))
    splits, _, width = parts_ref.shape
    padded = pl.next_power_of_2(width)
    column = jax.lax.iota(jnp.int32, padded)
    inside = column < width
    dtype = residual_ref.dtype

    def read(ref, *lead):
        return load(ref.at[(*lead, column)], mask=inside, other=0)

    # All loads come first: behind a reduction's barrier they would wait for it.
    parts = [read(parts_ref, part, row) for part in range(splits)]
    residual, gain, next_gain = read(residual_ref, row), read(gain_ref), read(next_gain_ref)

    def norm(x, gain):
        x = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.sum(x * x, axis=0) / width + eps)
        return gain * (x * scale).astype(dtype)

    branch = sum(parts[1:], start=parts[0])
    residual = residual + norm(branch.astype(dtype), gain)
    store(new_residual_ref.at[row, column], residual, mask=inside)
    store(normed_ref.at[row, column], norm(residual, next_gain), mask=inside)


def dot_rows(weight, x):
    """`weight @ x.T` with sums in float32."""
    return jax.lax.dot_general(
        weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )

"""Products of a few rows with a weight matrix as Pallas kernels."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from sparse_loop_jax.kernels import pallas_triton, tuning
from sparse_loop_jax.kernels.matvec.op import gated_linear, linear, linear_add_norm
from sparse_loop_jax.kernels.matvec.pallas_kernels import (
    MatvecConfig,
    add_norm_kernel,
    product_kernel,
)

# Rows up to which one configuration serves any number of them, so that a row has the same
# bits alone and among others; and the rows up to which another one does.
FEW_ROWS, MAX_ROWS = 32, 128


@linear.register("pallas")
def linear_pallas(
    x: jax.Array, weight: jax.Array, *, config: MatvecConfig | None = None
) -> jax.Array:
    """`linear` for at most 128 rows of bfloat16 or float16.

    Raises:
      NotImplementedError: more rows, another dtype, or a matrix that no blocks cover.
    """
    config = _serve(x, weight, config, "linear")
    return _product(x, weight, config=config, gated=False, interpret=_interpreting())


@gated_linear.register("pallas")
def gated_linear_pallas(
    x: jax.Array, gate_up: jax.Array, *, config: MatvecConfig | None = None
) -> jax.Array:
    """`gated_linear` for at most 128 rows; raises as `linear_pallas`."""
    config = _serve(x, gate_up, config, "gated_linear", gated=True)
    return _product(x, gate_up, config=config, gated=True, interpret=_interpreting())


@linear_add_norm.register("pallas")
def linear_add_norm_pallas(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array,
    gain: jax.Array,
    next_gain: jax.Array,
    *,
    eps: float,
    config: MatvecConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`linear_add_norm` for at most 128 rows, in two launches; raises as `linear_pallas`."""
    config = _serve(x, weight, config, "linear_add_norm", splits=True)
    return _product_add_norm(
        x,
        weight,
        residual,
        gain,
        next_gain,
        eps=eps,
        config=config,
        interpret=_interpreting(),
    )


def rows_served(rows: int) -> int:
    """The most rows that a configuration for `rows` serves: configurations have two kinds."""
    return FEW_ROWS if rows <= FEW_ROWS else MAX_ROWS


def find_config(
    op: str,
    outputs: int,
    inputs: int,
    rows: int,
    dtype,
    *,
    gated: bool = False,
    splits: bool = False,
) -> MatvecConfig | None:
    """The configuration measured for these shapes, else what `choose_config` computes.

    Of the rows, only `rows_served` decides.
    """
    computed = choose_config(outputs, inputs, gated=gated, splits=splits, rows=rows)
    if computed is None or op not in tuning.OPS:
        return computed
    return tuning.tuned(
        op,
        functools.partial(dataclasses.replace, computed),
        rows=rows_served(rows),
        outputs=outputs,
        inputs=inputs,
        dtype=dtype,
    )


def choose_config(
    outputs: int, inputs: int, *, gated: bool, splits: bool, rows: int = 1
) -> MatvecConfig | None:
    """A `MatvecConfig` computed from shapes; None where no blocks cover the matrix.

    The same for all rows up to `FEW_ROWS`, so that a row's result does not depend on how
    many there are; more rows need their registers and shared memory for themselves.
    """
    many = rows > FEW_ROWS
    tiles = ((64, 128), (32, 128), (16, 128), (16, 64), (16, 32), (16, 16))
    for height, depth in tiles:
        block_in = min(depth, 64) if gated and many else depth
        # A tile holds twice the outputs where gated.
        block_out = max(height // 2, 16) if gated and not many else height
        cut = 1
        # About one program for each multiprocessor: more slices are more to add up.
        while splits and cut < 8 and outputs // block_out * cut < 128:
            cut *= 2
        while cut > 1 and inputs % (block_in * cut):
            cut //= 2
        config = MatvecConfig(
            block_out=block_out,
            block_in=block_in,
            splits=cut,
            num_warps=block_out // 16 * (2 if gated and many else 1),
            num_stages=4 if gated else 3 if many else 5,
        )
        if config.fits(outputs, inputs):
            return config
    return None


def _serve(x, weight, config, name: str, *, gated=False, splits=False) -> MatvecConfig:
    """The configuration to use, or the reason why there is none."""
    rows = math.prod(x.shape[:-1])
    outputs, inputs = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        raise NotImplementedError(f"{name} of {x.dtype} rows and {weight.dtype} weights")
    if not 1 <= rows <= MAX_ROWS:
        raise NotImplementedError(f"{name} takes 1 to {MAX_ROWS} rows, got {rows}")
    if config is None:
        config = find_config(name, outputs, inputs, rows, x.dtype, gated=gated, splits=splits)
    if config is None or not config.fits(outputs, inputs):
        raise NotImplementedError(f"{name} cannot cut a matrix {weight.shape} by {config}")
    if config.splits > 1 and not splits:
        raise ValueError(f"{name} does not cut the reduction, got {config}")
    return config


def _interpreting() -> bool:
    return pallas_triton.interpreting()


@functools.partial(jax.jit, static_argnames=("config", "gated", "interpret"))
def _product(x, weight, *, config: MatvecConfig, gated: bool, interpret: bool):
    flat = x.reshape(-1, x.shape[-1])
    outputs = weight.shape[0] // (2 if gated else 1)
    out = jax.ShapeDtypeStruct((flat.shape[0], outputs), x.dtype)
    out = _launch(flat, weight, out, config=config, gated=gated, interpret=interpret)
    return out.reshape(*x.shape[:-1], outputs)


@functools.partial(jax.jit, static_argnames=("eps", "config", "interpret"))
def _product_add_norm(
    x, weight, residual, gain, next_gain, *, eps: float, config, interpret: bool
):
    flat, outputs = x.reshape(-1, x.shape[-1]), weight.shape[0]
    parts = jax.ShapeDtypeStruct((config.splits, flat.shape[0], outputs), jnp.float32)
    parts = _launch(flat, weight, parts, config=config, gated=False, interpret=interpret)
    out = jax.ShapeDtypeStruct((flat.shape[0], outputs), x.dtype)
    new, normed = pallas_triton.call(
        functools.partial(add_norm_kernel, eps=eps),
        grid=(flat.shape[0],),
        out_shape=(out, out),
        num_warps=8,
        interpret=interpret,
        name="add_norm",
    )(parts, residual.reshape(-1, outputs), gain, next_gain)
    return new.reshape(residual.shape), normed.reshape(residual.shape)


def _launch(x, weight, out, *, config: MatvecConfig, gated: bool, interpret: bool):
    return pallas_triton.call(
        functools.partial(product_kernel, config=config, gated=gated),
        grid=(out.shape[-1] // config.block_out, config.splits),
        out_shape=out,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="gated_linear" if gated else "linear",
    )(x, weight)

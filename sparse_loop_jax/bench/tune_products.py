"""What `sparse-loop bench tune` measures of the products, by the matrices of a model.

Each is timed in a chain of the kernels that surround it in a layer: a kernel is launched
while the one before it ends, and what suits the two together is what a step sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from sparse_loop_jax.bench.chain import Chain, sets_for
from sparse_loop_jax.bench.tune_cases import Case
from sparse_loop_jax.kernels import tuning
from sparse_loop_jax.kernels.matvec import pallas as products
from sparse_loop_jax.kernels.matvec.pallas_kernels import MatvecConfig
from sparse_loop_jax.kernels.project_qkv import pallas as projection
from sparse_loop_jax.models.config import OuroConfig

# The numbers of rows that decide on a configuration, by the most that it serves.
ROWS = {products.FEW_ROWS: (1, 32), products.MAX_ROWS: (64, 128)}
EPS = 1e-6
# block_out, block_in, num_warps, num_stages; then slices, where a reduction is cut.
TILES = {
    ("project_qkv", products.FEW_ROWS): [
        (64, 128, 4, 4),
        (64, 64, 4, 6),
        (32, 128, 2, 4),
        (32, 128, 2, 5),
    ],
    ("gated_linear", products.FEW_ROWS): [
        (32, 128, 4, 4),
        (16, 128, 2, 4),
        (16, 128, 2, 5),
    ],
    ("linear_add_norm", products.FEW_ROWS): [
        (64, 128, 4, 4, 4),
        (64, 64, 4, 6, 4),
        (32, 128, 2, 4, 4),
    ],
    ("project_qkv", products.MAX_ROWS): [
        (64, 64, 4, 4),
        (64, 64, 4, 5),
        (64, 128, 4, 4),
    ],
    ("gated_linear", products.MAX_ROWS): [
        (32, 64, 4, 4),
        (64, 128, 8, 3),
    ],
    ("linear_add_norm", products.MAX_ROWS): [
        (64, 64, 4, 4, 4),
        (64, 64, 4, 5, 2),
        (64, 128, 4, 4, 4),
    ],
}


def product_cases(config: OuroConfig, dtype: str = "bfloat16") -> Iterator[Callable[[], Case]]:
    """Cases of the four matrices of a layer, few rows first."""
    for served in ROWS:
        yield functools.partial(_projection_case, config, served, dtype)
        for op, which in (("gated_linear", 0), ("linear_add_norm", 1)):
            yield functools.partial(_mlp_case, config, served, dtype, op, which)
        yield functools.partial(_output_case, config, served, dtype)


def _projection_case(config: OuroConfig, served: int, dtype: str) -> Case:
    """Queries, keys and values; the queries are the next call's rows."""
    hidden, dim = config.hidden_size, config.head_dim
    if config.num_attention_heads * dim != hidden:
        raise ValueError(
            f"queries of {config.num_attention_heads} heads are no {hidden} inputs"
        )
    weights = _weights([(config.qkv_size, hidden)], dtype)

    def chain(rows: int, cut: MatvecConfig) -> Chain:
        pool = jnp.zeros((rows, config.num_key_value_heads, 16, dim), dtype)
        place = jnp.arange(rows, dtype=jnp.int32)[:, None]
        turn = jnp.ones((rows, 1, dim), dtype)
        shared = turn, place, jnp.zeros_like(place), jnp.ones((rows, 1), bool)

        def step(carry, shared, item):
            x, k_pool, v_pool = carry
            turn, *place = shared
            q, k_pool, v_pool = projection.project_qkv_pallas(
                x, item[0], turn, turn, k_pool, v_pool, *place, config=cut
            )
            return q.reshape(x.shape), k_pool, v_pool

        carry = _normal((rows, 1, hidden), dtype), pool, pool
        return Chain(step, carry, shared, weights, _nbytes(weights))

    shape = (config.qkv_size, hidden)
    return _case(
        "project_qkv",
        f"{shape[0]} from {shape[1]}",
        served,
        projection.choose_config(dim, hidden, gated=False, splits=False, rows=served),
        chain,
        lambda cut: cut.fits(dim, hidden),
        outputs=shape[0],
        inputs=hidden,
        head_dim=dim,
        dtype=dtype,
    )


def _mlp_case(config: OuroConfig, served: int, dtype: str, op: str, which: int) -> Case:
    """The two products of the MLP, of which one is cut anew."""
    hidden, inner = config.hidden_size, config.intermediate_size
    weights = _weights([(2 * inner, hidden), (hidden, inner)], dtype)
    computed = (
        products.choose_config(inner, hidden, gated=True, splits=False, rows=served),
        products.choose_config(hidden, inner, gated=False, splits=True, rows=served),
    )

    def chain(rows: int, cut: MatvecConfig) -> Chain:
        first, second = (cut, computed[1]) if which == 0 else (computed[0], cut)

        def step(carry, gain, item):
            x, normed = carry
            gate_up, down = item
            normed = products.gated_linear_pallas(normed, gate_up, config=first)
            return products.linear_add_norm_pallas(
                normed, down, x, gain, gain, eps=EPS, config=second
            )

        return _stream_chain(step, rows, hidden, dtype, weights)

    outputs, inputs = ((inner, hidden), (hidden, inner))[which]
    return _case(
        op,
        f"{outputs} from {inputs}",
        served,
        computed[which],
        chain,
        lambda cut: cut.fits(outputs, inputs),
        outputs=outputs,
        inputs=inputs,
        dtype=dtype,
    )


def _output_case(config: OuroConfig, served: int, dtype: str) -> Case:
    """The projection of what attention gave."""
    hidden, inputs = config.hidden_size, config.num_attention_heads * config.head_dim
    weights = _weights([(hidden, inputs)], dtype)

    def chain(rows: int, cut: MatvecConfig) -> Chain:
        def step(carry, gain, item):
            x, normed = carry
            return products.linear_add_norm_pallas(
                normed, item[0], x, gain, gain, eps=EPS, config=cut
            )

        return _stream_chain(step, rows, hidden, dtype, weights)

    return _case(
        "linear_add_norm",
        f"{hidden} from {inputs}",
        served,
        products.choose_config(hidden, inputs, gated=False, splits=True, rows=served),
        chain,
        lambda cut: cut.fits(hidden, inputs),
        outputs=hidden,
        inputs=inputs,
        dtype=dtype,
    )


def _case(op, name, served, computed, chain, fits, **shape) -> Case:
    grid = [cut_of(tile) for tile in TILES[op, served]]
    return Case(
        op,
        f"{name} for {served} rows",
        tuning.bucketed(op, rows=served, **shape),
        computed,
        [cut for cut in grid if fits(cut)],
        {rows: functools.partial(chain, rows) for rows in ROWS[served]},
    )


def cut_of(tile: tuple[int, ...]) -> MatvecConfig:
    """The configuration of an entry of `TILES`."""
    names = ("block_out", "block_in", "num_warps", "num_stages", "splits")
    return MatvecConfig(**{"splits": 1, **dict(zip(names, tile, strict=False))})


def _stream_chain(step, rows: int, hidden: int, dtype: str, weights) -> Chain:
    """Calls that hand on the residual stream and its norm."""
    x = _normal((rows, 1, hidden), dtype)
    return Chain(step, (x, x), jnp.ones((hidden,), dtype), weights, _nbytes(weights))


def _weights(shapes: list[tuple[int, int]], dtype: str) -> list[tuple[jax.Array, ...]]:
    """Matrices for as many calls as it takes that a cache does not hold them."""
    size = jnp.dtype(dtype).itemsize * sum(outputs * inputs for outputs, inputs in shapes)
    return [
        tuple(_normal(s, dtype, seed=i) * jnp.asarray(s[1] ** -0.5, dtype) for s in shapes)
        for i in range(sets_for(size))
    ]


def _normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _nbytes(weights: list[tuple[jax.Array, ...]]) -> int:
    return sum(weight.nbytes for weight in weights[0])

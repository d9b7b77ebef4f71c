"""Checks of the products of a decode step, for `check_kernels.py`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from checking import PAGE, TOLERANCE, Report, error

from sparse_loop_jax.kernels import matvec
from sparse_loop_jax.kernels.matvec.pallas import FEW_ROWS, MAX_ROWS
from sparse_loop_jax.kernels.project_qkv import project_qkv

PRODUCTS = ("linear", "gated_linear", "linear_add_norm")


def check_product(name: str, report: Report, small: bool) -> None:
    """One of the products: its error, its repeats, and rows among others and without them."""
    hidden, inner = (128, 256) if small else (2048, 5632)
    outputs, inputs = {
        "linear": (3 * hidden, hidden),
        "gated_linear": (2 * inner, hidden),
        "linear_add_norm": (hidden, inner),
    }[name]
    keys = iter(jax.random.split(jax.random.key(1), 5))

    def draw(*shape, scale=1.0):
        return (jax.random.normal(next(keys), shape) * scale).astype(jnp.bfloat16)

    weight, x = draw(outputs, inputs, scale=inputs**-0.5), draw(MAX_ROWS, inputs)
    residual = draw(MAX_ROWS, hidden)
    gains = 1 + draw(hidden, scale=0.1), 1 + draw(hidden, scale=0.1)

    def run(pick, implementation: str = "pallas", dtype=jnp.bfloat16) -> list[np.ndarray]:
        args, options = [x[pick], weight], {}
        if name == "linear_add_norm":
            args += [residual[pick], *gains]
            options["eps"] = 1e-6
        args = [a.astype(dtype) for a in args]
        op = getattr(matvec, name)
        with jax.default_matmul_precision("highest"):
            out = jax.tree.leaves(op(*args, implementation=implementation, **options))
        return [np.asarray(a.astype(jnp.float32)) for a in out]

    def equal(out, want) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(out, want, strict=True))

    want = run(slice(None), "xla", jnp.float32)
    # A configuration serves any number of rows up to the last of each of these.
    for counts in ((1, 2, 8, 9, 31, FEW_ROWS), (33, 64, MAX_ROWS)):
        full = run(slice(counts[-1]))
        for count in counts:
            out = run(slice(count))
            gap = max(error(a, b[:count]) for a, b in zip(out, want, strict=True))
            report(f"{name}, {count} rows", gap < 2 * TOLERANCE["bfloat16"], f"error {gap:.1e}")
            same = equal(out, [a[:count] for a in full])
            how = "repeats" if count == counts[-1] else f"the bits of {counts[-1]}"
            report(f"{name}, {count} rows: {how}", same)
        turned = run(slice(counts[-1] - 1, None, -1))
        report(f"{name}, {counts[-1]} rows reversed", equal(turned, [a[::-1] for a in full]))
        if counts[0] == 1:
            alone = run(slice(17, 18))
            report(f"{name}, row 17 alone", equal(alone, [a[17:18] for a in full]))


def check_projection(report: Report, small: bool) -> None:
    hidden, heads, dim, pages = (128, 4, 64, 150) if small else (2048, 16, 128, 300_000)
    keys = jax.random.split(jax.random.key(2), 4)
    weight = (jax.random.normal(keys[0], (3 * heads * dim, hidden)) * hidden**-0.5).astype(
        jnp.bfloat16
    )
    # Requests, their rows, and how many requests without the others a configuration serves.
    for batch, rows, part in ((3, 1, 1), (8, 4, 1), (33, 1, 33), (16, 4, 9), (32, 4, 9)):
        x = jax.random.normal(keys[1], (batch, rows, hidden)).astype(jnp.bfloat16)
        half = jax.random.uniform(keys[2], (batch, rows, dim // 2)) * 6
        angles = jnp.concatenate([half, half], axis=-1)
        turn = jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)
        table = pages - 1 - jnp.arange(batch, dtype=jnp.int32)[:, None]
        positions = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
        args = (x, *turn, table, positions, (positions % 3) < 2)

        @functools.partial(jax.jit, static_argnames="implementation")
        def run(x, cos, sin, table, *place, implementation):
            shape = (pages, heads, PAGE, dim)
            pools = jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16)
            out, *pools = project_qkv(
                x, weight, cos, sin, *pools, table, *place, implementation=implementation
            )
            return [out, *(p[table[:, 0]].swapaxes(1, 2) for p in pools)]

        out, want = (run(*args, implementation=name) for name in ("pallas", "xla"))
        gap = max(error(a, b) for a, b in zip(out, want, strict=True))
        name = f"project_qkv, {batch} x {rows}"
        report(name, gap < TOLERANCE["bfloat16"], f"error {gap:.1e}")
        for count, how in ((batch, "repeats"), (part, f"first {part} alone")):
            again = run(*(a[:count] for a in args), implementation="pallas")
            same = all(np.array_equal(a, b[:count]) for a, b in zip(again, out, strict=True))
            report(f"{name}: {how}", same)

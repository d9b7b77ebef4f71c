"""The one door to Pallas's Triton lowering.

That lowering is deprecated since JAX 0.11 (it still ships, and nothing else in Pallas can
gather on this hardware), so everything version-dependent about it is kept here: the import,
the compiler parameters, the interpreter and lowering without a GPU. Kernels import `call`,
`load`, `store` and `release_next` from this module and nothing else of it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend

# What `warnings` filters match, for callers that turn warnings into errors.
DEPRECATION = "The Pallas Triton backend is deprecated"

load = backend.load
store = backend.store

_interpret: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "sparse_loop_jax_interpret", default=None
)


@contextlib.contextmanager
def interpret(value: bool):
    """Within it, kernels traced anew are interpreted (True) or compiled (False).

    Without it they are interpreted where there is no GPU. A program that is already traced
    keeps what it was traced with.
    """
    token = _interpret.set(value)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpreting() -> bool:
    """Whether a kernel traced now runs in the interpreter."""
    value = _interpret.get()
    return jax.default_backend() != "gpu" if value is None else value


# Whether the kernel that is traced is compiled, so that `release_next` says anything.
_compiled: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "sparse_loop_jax_compiled", default=False
)


def release_next(index: jax.Array) -> jax.Array:
    """`index`, an int32 scalar, and a word to the device: the next kernel may be launched.

    Its programs then take their places while this kernel still runs, so that it begins at
    once when this one ends: a launch costs a decode step as much as a small kernel does.
    It reads nothing too early: XLA begins every kernel that it launches so (programmatic
    dependent launch) with a wait for the end of those that it depends on.

    The word is given where `index`, which has to be used, is computed. On an H200 a decode
    step is faster with it in products, norms and the merge of attention, and slower with it
    in the projection to queries, keys and values and in the pieces of attention.
    """
    if not (_compiled.get() and _programmatic_launches()):
        return index
    # A scalar is no operand of inline assembly.
    (same,) = backend.elementwise_inline_asm(
        "{ griddepcontrol.launch_dependents; mov.b32 $0, $1; }",
        args=[jax.lax.broadcast(index, (1,))],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), index.dtype)],
    )
    return jax.lax.reduce_max(same, (0,))


@functools.cache
def _programmatic_launches() -> bool:
    """Whether the device that is compiled for has them: Hopper and later."""
    if jax.default_backend() != "gpu":
        return True  # lowered for a device that is not there: a Hopper, as below
    return float(getattr(jax.local_devices()[0], "compute_capability", 9.0)) >= 9.0


def call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool,
    name: str,
) -> Callable[..., Any]:
    """`pl.pallas_call` whose refs are the whole arrays, indexed by the kernel itself.

    Args:
      kernel: takes the refs of the inputs, then of the outputs.
      grid: programs along each axis, all static; the first varies fastest.
      out_shape: `jax.ShapeDtypeStruct`s.
      num_warps, num_stages: warps per program, depth of the software pipeline.
      aliases: input number -> output number of arrays updated in place.
      interpret: run in the interpreter; callers pass `interpreting()` as a static argument
        of their own `jit`, so that both kinds have their own cache entries.
      name: of the kernel, for profiles.
    """

    def traced(*refs):
        token = _compiled.set(not interpret)
        try:
            kernel(*refs)
        finally:
            _compiled.reset(token)

    return pl.pallas_call(
        traced,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        compiler_params=backend.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )


def lower_for_cuda(function: Callable[..., Any], *args, device_kind: str = "NVIDIA H200"):
    """The program of `jax.jit(function)` for a CUDA device that need not be there.

    `function` must be traced for the first time here; arguments may be
    `jax.ShapeDtypeStruct`s. Returns what `jax.stages.Traced.lower` returns.
    """
    device = jax.sharding.AbstractDevice(device_kind, None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with interpret(False), jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))

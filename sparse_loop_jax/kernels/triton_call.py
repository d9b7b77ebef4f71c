"""The one door to kernels written in Triton itself.

They are launched by jax-triton, an optional part (extra `triton`) that cannot be
imported without a CUDA jaxlib; what differs between its versions is kept here. Modules that
hold kernels import `triton` and are imported only after `require`.

Where `TRITON_INTERPRET=1` is set, Triton makes interpreted functions of its kernels, and
`call` runs them on the host: the same kernel and the same arguments, without a GPU and
without jax-triton.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Compute capability, times ten, of a CUDA device that need not be there.
_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "sparse_loop_jax_capability", default=None
)


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Within it, kernels compile for a CUDA device of this capability (90: Hopper).

    For lowering where there is no GPU; jax-triton has to be there.
    """
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def require() -> None:
    """Returns where kernels can be called.

    Raises:
      NotImplementedError: they cannot; the message says what is missing.
    """
    if interpreting():
        _import("triton")
    elif jax.default_backend() != "gpu" and _capability.get() is None:
        raise NotImplementedError("Triton kernels need a GPU, or TRITON_INTERPRET=1")
    else:
        _import("jax_triton")


@functools.cache
def _import(name: str) -> ModuleType:
    cache = os.environ.get("TRITON_CACHE_DIR")
    try:
        return __import__(name)
    # A version that does not fit the Triton at hand fails in its own ways.
    except (ImportError, AttributeError, TypeError) as error:
        raise NotImplementedError(
            f"{name} cannot be imported ({type(error).__name__}: {error}); it comes with "
            "the extra: pip install -e '.[triton]'"
        ) from error
    finally:
        # jax-triton sets it, for everyone who compiles in this process or starts another.
        if cache is not None:
            os.environ["TRITON_CACHE_DIR"] = cache
        else:
            os.environ.pop("TRITON_CACHE_DIR", None)


def call(
    kernel: Any,
    *args: jax.Array,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int = 1,
    name: str,
    **constants: int,
) -> Any:
    """Launches a kernel on arrays.

    Args:
      kernel: a `triton.jit` function of pointers to the args, then to the outputs, all
        aligned to 16 bytes, and of the constants.
      grid: programs along each axis; the first varies fastest.
      out_shape: `jax.ShapeDtypeStruct`s, in any tree; nothing initialises the outputs.
      num_warps, num_stages: warps per program, depth of the software pipeline.
      name: of the kernel, for profiles.
      constants: its `tl.constexpr` parameters.

    Returns:
      Arrays in the tree of `out_shape`.
    """
    if math.prod(grid) == 0:
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), out_shape)
    if interpreting():
        run = functools.partial(_interpret, kernel, grid, out_shape, constants)
        return jax.pure_callback(run, out_shape, *args)
    jax_triton = _import("jax_triton")
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # since 0.4
        # Said aloud, because Triton warns of a default that is to change.
        options = {"out_type": out_shape, "backend_options": {"enable_fp_fusion": True}}
    else:
        options = {"out_shape": out_shape, "enable_fp_fusion": True}
    return jax_triton.triton_call(
        *args,
        kernel=kernel,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=_capability.get(),
        name=name,
        **options,
        **constants,
    )


# Interpretation ------------------------------------------------------------------------


class _HostArray:
    """Memory on the host, in the way that Triton's interpreter asks tensors for theirs.

    It copies what it is given to the host and the results back, which is nothing to do here.
    """

    def __init__(self, array: np.ndarray):
        self.array = array
        kind = {"u": "u", "i": "i"}.get(array.dtype.kind, "fp")
        self.dtype = "bf16" if array.dtype == jnp.bfloat16 else f"{kind}{array.itemsize * 8}"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _HostArray:
        return self

    def cpu(self) -> _HostArray:
        return self

    def new_empty(self, *args, **kwargs) -> _HostArray:
        return self

    def set_(self, *args) -> None:
        pass

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def copy_(self, other: _HostArray) -> None:
        pass


def _interpret(kernel: Any, grid, out_shape, constants, *args):
    """Runs an interpreted kernel; outputs begin as what no correct kernel leaves behind."""
    inputs = [np.ascontiguousarray(x) for x in args]
    outputs = jax.tree.map(lambda s: np.full(s.shape, _junk(s.dtype), s.dtype), out_shape)
    pointers = [_HostArray(x) for x in (*inputs, *jax.tree.leaves(outputs))]
    with np.errstate(all="ignore"):
        kernel[grid](*pointers, **constants)
    return outputs


def _junk(dtype) -> Any:
    return np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.nan

"""The door to Pallas's Mosaic GPU lowering: what it needs, and when it is there.

It writes for Hopper's own instructions (matrix products of a warpgroup, bulk copies into
shared memory), which the Triton lowering leaves to a compiler. It cannot gather, so it serves
where whole pages are read. Its import takes a quarter of a second: kernels import it when they
are first asked for.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

OLDEST_JAX = (0, 11)  # the first whose interpreter knows what the kernels use
# From the first to before the second, JAX's own `attention_mgpu` refuses to mask: a fault of
# CUDA's compiler.
BROKEN_CUDA = (12080, 12091)


def require_hopper() -> None:
    """Raises NotImplementedError unless kernels of this lowering run here.

    Where there is no GPU they are interpreted, or lowered for a Hopper that is not there.
    """
    if jax.__version_info__[:2] < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        raise NotImplementedError(f"kernels by Mosaic need JAX {oldest}: {jax.__version__}")
    capability = _capability()
    if not capability.startswith("9."):
        raise NotImplementedError(
            f"kernels by Mosaic are for Hopper, compute capability 9: {capability}"
        )
    version = _cuda_version()
    if BROKEN_CUDA[0] <= version < BROKEN_CUDA[1]:
        raise NotImplementedError(
            f"ptxas of CUDA {version // 1000}.{version % 1000 // 10} miscompiles masked "
            "attention by Mosaic: use CUDA 13 (jax[cuda13])"
        )


@functools.cache
def _capability() -> str:
    if jax.default_backend() != "gpu":
        return "9.0"
    return str(getattr(jax.local_devices()[0], "compute_capability", "unknown"))


@functools.cache
def _cuda_version() -> int:
    """1000 * major + 10 * minor of the CUDA runtime; 0 where none is known."""
    if jax.default_backend() != "gpu":
        return 0
    try:  # JAX has no public name for it
        from jax._src.lib import cuda_versions

        return int(cuda_versions.cuda_runtime_get_version())  # pyright: ignore
    except (ImportError, AttributeError):
        return 0


def interpreter(**options: Any) -> Any:
    """What `mosaic_gpu.kernel` takes as `interpret` to run a kernel without a GPU."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.InterpretGPUParams(**options)  # pyright: ignore[reportAttributeAccessIssue]


def load(ref: Any, layout: Any) -> jax.Array:
    """What `ref`, in either memory, holds, spread over a warpgroup's threads as `layout`."""
    from jax.experimental.pallas import mosaic_gpu

    # Before JAX 0.11 it took an index, which is deprecated now.
    return mosaic_gpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def accumulator(rows: int, columns: int) -> Any:
    """Registers for a float32 product, for `pl.run_scoped`; they begin as zeros."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.WGMMAAccumulatorRef((rows, columns), jax.numpy.float32)

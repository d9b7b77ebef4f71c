"""Fast inference for looped language models in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_loop_jax.checkpoint import convert, load
    from sparse_loop_jax.decoding import (
        DecodeState,
        SpeculativeConfig,
        decode_step,
        no_lease,
        prefill,
        speculative_step,
    )
    from sparse_loop_jax.engine import (
        CacheConfig,
        Engine,
        MemoryPlan,
        RequestOutput,
        SamplingParams,
        SchedulerConfig,
    )
    from sparse_loop_jax.generation import GenerateOutput, StreamChunk, generate, start, stream
    from sparse_loop_jax.models import Ouro, OuroConfig, forward
    from sparse_loop_jax.sparse import (
        SparseDecodeConfig,
        SparseSlowerWarning,
        StaleLeaseError,
    )

__all__ = [
    "CacheConfig",
    "DecodeState",
    "Engine",
    "GenerateOutput",
    "MemoryPlan",
    "Ouro",
    "OuroConfig",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SparseDecodeConfig",
    "SparseSlowerWarning",
    "SpeculativeConfig",
    "StaleLeaseError",
    "StreamChunk",
    "convert",
    "decode_step",
    "forward",
    "generate",
    "load",
    "no_lease",
    "prefill",
    "speculative_step",
    "start",
    "stream",
]

# Where each public name lives. Imported on first use: `sparse-loop --help` does not wait for
# JAX. A module of this package must not have the name of one of these.
_HOMES = {
    "CacheConfig": "engine",
    "DecodeState": "decoding",
    "Engine": "engine",
    "GenerateOutput": "generation",
    "MemoryPlan": "engine",
    "Ouro": "models",
    "OuroConfig": "models",
    "RequestOutput": "engine",
    "SamplingParams": "engine",
    "SchedulerConfig": "engine",
    "SparseDecodeConfig": "sparse",
    "SparseSlowerWarning": "sparse",
    "SpeculativeConfig": "decoding",
    "StaleLeaseError": "sparse",
    "StreamChunk": "generation",
    "convert": "checkpoint",
    "decode_step": "decoding",
    "forward": "models",
    "generate": "generation",
    "load": "checkpoint",
    "no_lease": "decoding",
    "prefill": "decoding",
    "speculative_step": "decoding",
    "start": "generation",
    "stream": "generation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

"""Fast inference for looped language models in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_loop_jax.checkpoint import convert, load
    from sparse_loop_jax.models import Ouro, OuroConfig, forward

__all__ = ["Ouro", "OuroConfig", "convert", "forward", "load"]

# Where each public name lives. Imported on first use: `sparse-loop --help` does not wait for
# JAX. A module of this package must not have the name of one of these.
_HOMES = {
    "Ouro": "models",
    "OuroConfig": "models",
    "convert": "checkpoint",
    "forward": "models",
    "load": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

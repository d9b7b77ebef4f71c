"""The keyword arguments of `generate` and `stream`, checked against the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from sparse_loop_jax.decoding.config import DecodeSpec, SpeculativeConfig
from sparse_loop_jax.kernels import paged_attention
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.sparse.config import SparseDecodeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """See `generate` for what each means; the defaults are its."""

    max_new_tokens: int | Sequence[int] = 64
    sparse: SparseDecodeConfig | None = None
    speculative: SpeculativeConfig | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    eos_token_id: int | Sequence[int] | None = None
    exit_threshold: float | None = None
    page_size: int = 16
    implementation: str | None = None

    def __post_init__(self):
        check_sampling(self.temperature, self.top_k, self.top_p, self.seed, self.exit_threshold)
        check_page_size(self.page_size)
        if self.implementation is not None:
            paged_attention.get(self.implementation)
        if self.sparse is not None and not isinstance(self.sparse, SparseDecodeConfig):
            raise ValueError(f"sparse must be a SparseDecodeConfig, got {self.sparse!r}")
        if self.speculative is not None and not isinstance(self.speculative, SpeculativeConfig):
            raise ValueError(
                f"speculative must be a SpeculativeConfig, got {self.speculative!r}"
            )

    def threshold_for(self, config: OuroConfig) -> float:
        """The exit threshold in force."""
        if self.exit_threshold is None:
            return config.early_exit_threshold
        return self.exit_threshold

    def spec_for(self, config: OuroConfig) -> DecodeSpec:
        """The static part of the steps; retention 1 is the dense path itself.

        Raises:
          ValueError: the model has too few loops, or early exit meets a fixed depth.
        """
        early_exit = self.threshold_for(config) < 1.0
        if self.speculative is not None:
            self.speculative.validate_for(config)
        sparse = None
        if self.sparse is not None and not self.sparse.is_dense:
            self.sparse.modes(config.total_ut_steps)
            sparse = self.sparse.compiled_part
        spec = DecodeSpec(
            config=config,
            sampled=self.temperature > 0,
            early_exit=early_exit,
            implementation=self.implementation,
            sparse=sparse,
            speculative=self.speculative,
        )
        check_depth(spec, self.threshold_for(config))
        return spec


def check_sampling(temperature, top_k, top_p, seed, exit_threshold) -> None:
    """Raises ValueError, naming the value and its range, for a request that cannot be."""
    if not is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a finite number >= 0, got {temperature!r}")
    if top_k is not None and (not is_int(top_k) or top_k < 1):
        raise ValueError(f"top_k must be an integer >= 1, got {top_k!r}; None keeps all")
    if not is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p!r}")
    if not is_int(seed) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer in [0, 2^63), got {seed!r}")
    if exit_threshold is not None and (
        not is_number(exit_threshold) or not 0 <= exit_threshold <= 1
    ):
        raise ValueError(f"exit_threshold must be in [0, 1], got {exit_threshold!r}")


def check_page_size(size) -> None:
    """Raises ValueError unless the size is a power of two."""
    if not is_int(size) or size < 1 or size & (size - 1):
        raise ValueError(f"page_size must be a power of two, got {size!r}")


def check_depth(spec: DecodeSpec, exit_threshold: float) -> None:
    """Raises ValueError if a request would leave early where every loop is run."""
    if exit_threshold < 1.0 and (spec.sparse is not None or spec.speculative is not None):
        raise ValueError(
            f"exit_threshold {exit_threshold} leaves early, but sparse and speculative "
            "decoding run every loop: pass exit_threshold=1.0"
        )


def is_int(value) -> bool:
    """An integer, NumPy's among them, but no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value) -> bool:
    """An integer or a float, NumPy's among them, but no bool."""
    return is_int(value) or isinstance(value, float | np.floating)

"""The keyword arguments of `generate` and `stream`, checked against the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from sparse_loop_jax.checks import is_int as is_int, is_number as is_number
from sparse_loop_jax.decoding.config import DecodeSpec, SpeculativeConfig
from sparse_loop_jax.kernels import Op, paged_attention
from sparse_loop_jax.kernels.capture_attention import capture_attention
from sparse_loop_jax.kernels.sparse_attention import sparse_attention
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
    min_loops: int = 1
    max_loops: int | None = None
    page_size: int = 16
    implementation: str | None = None

    def __post_init__(self):
        check_sampling(self.temperature, self.top_k, self.top_p, self.seed)
        check_exit(self.exit_threshold, self.min_loops, self.max_loops)
        check_page_size(self.page_size)
        check_implementation(self.implementation, paged_attention)
        if self.sparse is not None and not isinstance(self.sparse, SparseDecodeConfig):
            raise ValueError(f"sparse must be a SparseDecodeConfig, got {self.sparse!r}")
        if self.sparse is not None:
            named = self.sparse.implementation or self.implementation
            check_implementation(named, capture_attention, sparse_attention)
        if self.speculative is not None and not isinstance(self.speculative, SpeculativeConfig):
            raise ValueError(
                f"speculative must be a SpeculativeConfig, got {self.speculative!r}"
            )

    def exit_rule_for(self, config: OuroConfig) -> ExitRule:
        """The exit rule in force.

        Raises:
          ValueError: the model has fewer loops than a bound.
        """
        return ExitRule.resolve(config, self.exit_threshold, self.min_loops, self.max_loops)

    def spec_for(self, config: OuroConfig) -> DecodeSpec:
        """The static part of the steps; retention 1 is the dense path itself.

        Raises:
          ValueError: the model has too few loops, early exit meets a fixed depth, or a page
            or a round is longer than the context.
        """
        if self.page_size > config.max_position_embeddings:
            raise ValueError(
                f"page_size {self.page_size} is more than the model's context of "
                f"{config.max_position_embeddings} tokens: lower it"
            )
        if self.speculative is not None:
            self.speculative.validate_for(config)
        sparse = None
        if self.sparse is not None and not self.sparse.is_dense:
            self.sparse.modes(config.total_ut_steps)
            sparse = self.sparse.compiled_part
        exit_rule = self.exit_rule_for(config)
        exit_rule.check_depth(sparse=sparse, speculative=self.speculative)
        return DecodeSpec(
            config=config,
            sampled=self.temperature > 0,
            early_exit=exit_rule.leaves_early,
            implementation=self.implementation,
            sparse=sparse,
            speculative=self.speculative,
        )


@dataclasses.dataclass(frozen=True)
class ExitRule:
    """When a token leaves the loops: after the first loop, counted from 1, that is

    - number `max_loops`, or
    - number `min_loops` or later, and has brought the summed exit probability to
      `threshold` or more, if that is below 1.
    """

    threshold: float
    min_loops: int
    max_loops: int
    loops: int  # of the model

    @classmethod
    def resolve(
        cls, config: OuroConfig, threshold: float | None, min_loops: int, max_loops: int | None
    ) -> ExitRule:
        """The rule for a model, from values that `check_exit` has passed.

        Args:
          threshold: None: the checkpoint's.
          max_loops: None: all of the model's.

        Raises:
          ValueError: the model has fewer loops than a bound.
        """
        loops = config.total_ut_steps
        for name, bound in (("min_loops", min_loops), ("max_loops", max_loops)):
            if bound is not None and bound > loops:
                raise ValueError(
                    f"{name} must be at most the model's {loops} loops, got {bound}"
                )
        return cls(
            threshold=float(config.early_exit_threshold if threshold is None else threshold),
            min_loops=int(min_loops),
            max_loops=loops if max_loops is None else int(max_loops),
            loops=loops,
        )

    @property
    def leaves_early(self) -> bool:
        """Whether a token may leave before the last loop."""
        return bool(self._causes())

    def check_depth(self, *, sparse, speculative) -> None:
        """Raises ValueError if a token may leave early where every loop is run.

        Args:
          sparse, speculative: what decodes, None where it does not.
        """
        causes = self._causes()
        options = {"sparse=": sparse, "speculative=": speculative}
        fixed = " and ".join(name for name, value in options.items() if value is not None)
        if causes and fixed:
            raise ValueError(
                f"{' with '.join(causes)} leaves early, but {fixed} takes every loop: pass "
                f"{' and '.join(causes.values())}, or leave {fixed} out"
            )

    def _causes(self) -> dict[str, str]:
        """What makes tokens leave early, and what to pass instead."""
        causes = {}
        if self.threshold < 1.0 and self.min_loops < self.loops:
            causes[f"exit_threshold {self.threshold}"] = "exit_threshold=1.0"
        if self.max_loops < self.loops:
            causes[f"max_loops {self.max_loops}"] = "max_loops=None"
        return causes


def check_sampling(temperature, top_k, top_p, seed) -> None:
    """Raises ValueError, naming the value and its range, for a request that cannot be."""
    if not is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a finite number >= 0, got {temperature!r}")
    if top_k is not None and (not is_int(top_k) or top_k < 1):
        raise ValueError(f"top_k must be an integer >= 1, got {top_k!r}; None keeps all")
    if not is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p!r}")
    if not is_int(seed) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer in [0, 2^63), got {seed!r}")


def check_exit(threshold, min_loops, max_loops) -> None:
    """Raises ValueError, naming the value and its range, for a rule that no model has."""
    if threshold is not None and (not is_number(threshold) or not 0 <= threshold <= 1):
        raise ValueError(f"exit_threshold must be in [0, 1], got {threshold!r}")
    if not is_int(min_loops) or min_loops < 1:
        raise ValueError(f"min_loops must be an integer >= 1, got {min_loops!r}")
    if max_loops is not None and (not is_int(max_loops) or max_loops < 1):
        raise ValueError(f"max_loops must be an integer >= 1, got {max_loops!r}; None is all")
    if max_loops is not None and min_loops > max_loops:
        raise ValueError(f"min_loops {min_loops} is above max_loops {max_loops}: lower it")


def check_implementation(name, *ops: Op) -> None:
    """Raises ValueError unless the name is None, or each of the ops has such a one."""
    if name is None:
        return
    if not isinstance(name, str):
        raise ValueError(f"implementation must be a name or None, got {name!r}")
    for op in ops:
        op.get(name)


def check_page_size(size) -> None:
    """Raises ValueError unless the size is a power of two."""
    if not is_int(size) or size < 1 or size & (size - 1):
        raise ValueError(f"page_size must be a power of two, got {size!r}")

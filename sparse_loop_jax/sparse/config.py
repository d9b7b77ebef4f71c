"""What to keep, where to capture and where to consume."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sparse_loop_jax.checks import is_number, plain_float, plain_int
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.sparse.arithmetic import retained_count

DENSE, CAPTURE, CONSUME, CONSUME_AND_CAPTURE = "dense", "capture", "consume", "consume+capture"


@dataclasses.dataclass(frozen=True)
class SparseDecodeConfig:
    """Cross-loop sparse attention of decoded rows; prefill is always dense.

    The method is FlashLoop's (Yang and Liu, 2026, arXiv 2609.29812). Loops are counted from 0.

    Attributes:
      key_retention: share of a row's keys that a consuming loop reads, in (0, 1]. 1 is
        dense attention itself: no store, no capture.
      capture_loop: the loop whose attention is kept as the reference.
      consume_loops: the loops that read kept keys only; None: all after `capture_loop`.
      variant: "joint": all consuming loops use the one capture; "adjacent": each consuming
        loop but the last is captured again for the next. A recapture needs dense scores, so
        that "adjacent" saves little: it is there to measure against.
      mass_scaling: "cached", the method; "none" and "oracle" for research (see
        `sparse_loop_jax.sparse.arithmetic.consume`). "oracle" computes dense scores, so that
        its rows count as reading every key.
      implementation: which implementation of the sparse ops; None: their own order.
      sink_keys, recent_keys: keys at the start and at the end of the context that are kept
        whatever their score. They count inside k; where k is smaller than both together, it
        wins: first the sinks from position 0 on, then the newest keys.
      capacity: kept keys per head that the store has room for; None: what the longest
        context needs.

    NumPy's numbers become Python's; a float32 of 0.1 means 0.1.

    Raises:
      ValueError: a value is out of range.
    """

    key_retention: float = 0.1
    capture_loop: int = 1
    consume_loops: tuple[int, ...] | None = None
    variant: Literal["joint", "adjacent"] = "joint"
    mass_scaling: Literal["cached", "none", "oracle"] = "cached"
    implementation: str | None = None
    sink_keys: int = 0
    recent_keys: int = 0
    capacity: int | None = None

    def __post_init__(self):
        retention = self.key_retention
        if not is_number(retention) or not 0.0 < retention <= 1.0:
            raise ValueError(f"key_retention must be a number in (0, 1], got {retention!r}")
        self._set("key_retention", plain_float(retention))
        for name in ("capture_loop", "sink_keys", "recent_keys"):
            self._set(name, plain_int(name, getattr(self, name), 0))
        if self.capacity is not None:
            self._set("capacity", plain_int("capacity", self.capacity, 1))
        if self.variant not in ("joint", "adjacent"):
            raise ValueError(f"variant must be 'joint' or 'adjacent', got {self.variant!r}")
        if self.mass_scaling not in ("cached", "none", "oracle"):
            raise ValueError(
                f"mass_scaling must be 'cached', 'none' or 'oracle', got {self.mass_scaling!r}"
            )
        if self.implementation is not None and not isinstance(self.implementation, str):
            raise ValueError(f"implementation must be a name, got {self.implementation!r}")
        self._check_consume_loops()

    def _set(self, name: str, value):
        """Only while the config is made: NumPy's numbers become Python's."""
        object.__setattr__(self, name, value)

    def _check_consume_loops(self):
        loops = self.consume_loops
        if loops is None:
            return
        if not isinstance(loops, tuple) or not loops:
            raise ValueError(f"consume_loops must be a tuple of loops or None, got {loops!r}")
        loops = tuple(plain_int("consume_loops", loop, 0) for loop in loops)
        self._set("consume_loops", loops)
        previous = self.capture_loop
        for loop in loops:
            if loop <= previous:
                raise ValueError(
                    f"consume_loops must rise and come after capture_loop "
                    f"{self.capture_loop}, got {loops}"
                )
            previous = loop

    @property
    def is_dense(self) -> bool:
        """True where every key is kept: the dense path itself runs."""
        return self.key_retention == 1.0

    @property
    def compiled_part(self) -> SparseDecodeConfig:
        """This config as far as a compiled step depends on it.

        How many keys are kept is data (a table of k by N, a capacity in the store's shapes),
        so that other retentions do not recompile.
        """
        return dataclasses.replace(self, key_retention=0.5, capacity=None)

    def modes(self, loops: int) -> tuple[str, ...]:
        """What each depth of a model of `loops` loops does for a decoded row.

        Returns:
          One of "dense", "capture", "consume" and "consume+capture" for each depth.

        Raises:
          ValueError: the model has no such loops.
        """
        modes = [DENSE] * loops
        if self.is_dense:
            return tuple(modes)
        consume = self.consume_loops
        if consume is None:
            consume = tuple(range(self.capture_loop + 1, loops))
        if not consume or consume[-1] >= loops:
            raise ValueError(
                f"capture_loop {self.capture_loop} and consume_loops {self.consume_loops} need "
                f"more than the model's {loops} loops"
            )
        modes[self.capture_loop] = CAPTURE
        for loop in consume:
            modes[loop] = CONSUME if self.variant == "joint" else CONSUME_AND_CAPTURE
        modes[consume[-1]] = CONSUME
        return tuple(modes)

    def keys_kept(self, tokens: int) -> int:
        """k for a row that sees `tokens` keys."""
        return retained_count(self.key_retention, tokens)

    def capacity_for(self, max_context: int) -> int:
        """Kept keys per head that a store needs for contexts of up to `max_context` tokens.

        Raises:
          ValueError: `capacity` is set and too small.
        """
        needed = self.keys_kept(max_context)
        if self.capacity is not None and self.capacity < needed:
            raise ValueError(
                f"capacity {self.capacity} is below the {needed} keys that key_retention "
                f"{self.key_retention} keeps of {max_context} tokens"
            )
        return needed if self.capacity is None else self.capacity

    def validate_for(self, config: OuroConfig, max_context: int) -> None:
        """Checks that a model of this shape can be served up to `max_context` tokens.

        Raises:
          ValueError: a loop does not exist, the context is out of range, or the capacity is
            below what the longest context needs, or above the model's context.
        """
        plain_int("max_context", max_context, 1)
        if max_context > config.max_position_embeddings:
            raise ValueError(
                f"max_context {max_context} is beyond the model's "
                f"{config.max_position_embeddings} positions"
            )
        self.modes(config.total_ut_steps)
        if self.is_dense:
            return
        if self.capacity_for(max_context) > config.max_position_embeddings:
            raise ValueError(
                f"capacity {self.capacity} is more keys than the model's "
                f"{config.max_position_embeddings} positions: lower it, or leave it out"
            )

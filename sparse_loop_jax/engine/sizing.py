"""Sizes of an engine: what is fixed, and what grows with the longest request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sparse_loop_jax.cache import pages_for
from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.engine.config import SchedulerConfig
from sparse_loop_jax.engine.rows import Sizes
from sparse_loop_jax.generation.buckets import CHUNKS, power_of_two
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.sparse.arithmetic import retained_counts
from sparse_loop_jax.sparse.config import SparseDecodeConfig

# What a call for prompts costs besides its tokens, in tokens: reading the weights once a
# loop and starting the kernels. 4 to 5 ms on an H200, which runs 60 tokens a millisecond.
_CALL_TOKENS = 256
# Tokens that the narrowest page table holds. Each next one holds four times as many: a
# table that is too wide costs less than a compilation.
_FIRST_SPAN = 256


@dataclasses.dataclass(frozen=True)
class Sizing:
    """Where every static shape of an engine comes from."""

    model: OuroConfig
    sparse: SparseDecodeConfig | None  # None: dense, or a retention of 1
    max_num_seqs: int
    max_context: int
    max_stop_ids: int
    max_prefill_tokens: int
    page_size: int
    num_blocks: int
    slots: int

    @property
    def loops(self) -> int:
        return self.model.total_ut_steps

    @property
    def rows(self) -> int:
        return power_of_two(self.max_num_seqs)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return pages_for(tokens, self.page_size)

    def sizes_at(self, tokens: int) -> Sizes:
        """The bucket for requests of up to so many K/V tokens."""
        width = power_of_two(max(1, _FIRST_SPAN // self.page_size))
        while width * self.page_size < tokens:
            width *= 4
        width = min(width, power_of_two(self.blocks_for(self.max_context)))
        span = width * self.page_size
        capacity = 0
        if self.sparse is not None:
            capacity = self.sparse.capacity or power_of_two(self.sparse.keys_kept(span))
        return Sizes(
            rows=self.rows,
            num_blocks=self.num_blocks,
            page_size=self.page_size,
            stop_ids=power_of_two(self.max_stop_ids),
            slots=self.slots,
            width=width,
            capacity=capacity,
        )

    def key_counts(self, sizes: Sizes) -> np.ndarray | None:
        """k by N for a table of this width; None without sparse decode."""
        if self.sparse is None:
            return None
        return retained_counts(self.sparse.key_retention, sizes.width * self.page_size)

    def prefill_shapes(self) -> list[tuple[int, int]]:
        """Rows and chunk lengths of the prompts' programs, by length; all within the budget."""
        chunks = [c for c in CHUNKS if c <= self.max_prefill_tokens]
        shapes = []
        for chunk in chunks or [self.max_prefill_tokens]:
            many = min(self.rows, self.max_prefill_tokens // chunk)
            shapes += [(1, chunk)] if many == 1 else [(1, chunk), (many, chunk)]
        return shapes

    def prefill_shape(self, left: Sequence[int]) -> tuple[int, int]:
        """Rows and chunk length of the program that runs most of these prompts for its cost.

        Args:
          left: tokens that each prompt has still to run, at least one, first things first.
        """

        def rate(shape: tuple[int, int]) -> float:
            rows, chunk = shape
            tokens = sum(min(tokens, chunk) for tokens in left[:rows])
            return tokens / (rows * chunk + _CALL_TOKENS)

        return max(self.prefill_shapes(), key=rate)


def sizing_for(
    spec: DecodeSpec,
    sparse: SparseDecodeConfig | None,
    scheduler: SchedulerConfig,
    *,
    max_context: int,
    page_size: int,
    num_blocks: int,
    outstanding: int,
) -> Sizing:
    """The sizes of an engine with so many blocks and rounds outstanding."""
    rows = power_of_two(int(scheduler.max_num_seqs))
    return Sizing(
        model=spec.config,
        sparse=None if spec.sparse is None else sparse,
        max_num_seqs=int(scheduler.max_num_seqs),
        max_context=max_context,
        max_stop_ids=int(scheduler.max_stop_ids),
        max_prefill_tokens=int(scheduler.max_prefill_tokens),
        page_size=page_size,
        num_blocks=num_blocks,
        slots=0 if spec.sparse is None else outstanding * rows * spec.rows,
    )

"""What a compiled step depends on besides shapes."""

from __future__ import annotations

import dataclasses

from sparse_loop_jax.checks import plain_int
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.sparse.config import SparseDecodeConfig


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """Self-speculation: the first loops draft, the others verify.

    Attributes:
      num_speculative_tokens: K, tokens drafted in a round; with `adaptive`, at most so many.
        Below the model's context.
      draft_loops: loops of the draft, 1 to D - 1.
      max_outstanding_rounds: rounds submitted before the oldest is read (`stream` and the
        engine); 1 waits for each.
      adaptive: choose each request's number of drafted tokens from its own history.

    Raises:
      ValueError: a value is not an integer of its range.
    """

    num_speculative_tokens: int
    draft_loops: int = 2
    max_outstanding_rounds: int = 2
    adaptive: bool = False

    def __post_init__(self):
        for name in ("num_speculative_tokens", "draft_loops", "max_outstanding_rounds"):
            object.__setattr__(self, name, plain_int(name, getattr(self, name), 1))
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive must be True or False, got {self.adaptive!r}")

    def validate_for(self, config: OuroConfig) -> None:
        """Checks that a model of this shape can draft and verify so.

        Raises:
          ValueError: there is no loop left to verify with, or a round would be longer than
            the context.
        """
        if self.draft_loops >= config.total_ut_steps:
            raise ValueError(
                f"draft_loops must be below the model's {config.total_ut_steps} loops, "
                f"got {self.draft_loops}"
            )
        if self.rows > config.max_position_embeddings:
            raise ValueError(
                "num_speculative_tokens must be below the model's context of "
                f"{config.max_position_embeddings} tokens, got {self.num_speculative_tokens}"
            )

    @property
    def rows(self) -> int:
        """Rows that a request verifies in a round, at most."""
        return self.num_speculative_tokens + 1


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static part of a `DecodeState`; hashable.

    Attributes:
      config: the model.
      sampled: False compiles the greedy readout alone.
      early_exit: True lets rows leave by `RequestParams`; False runs every loop.
      implementation: of the attention ops, by name; None lets each choose. "xla" takes
        the reference for everything else as well.
      sparse: cross-loop sparse attention of decoded rows; None is dense.
      speculative: self-speculation; None decodes token by token.

    Raises:
      ValueError: rows may leave early where the depth is fixed.
    """

    config: OuroConfig
    sampled: bool = False
    early_exit: bool = False
    implementation: str | None = None
    sparse: SparseDecodeConfig | None = None
    speculative: SpeculativeConfig | None = None

    def __post_init__(self):
        if self.early_exit and (self.sparse is not None or self.speculative is not None):
            raise ValueError(
                "early_exit needs plain, dense decoding: leave sparse and speculative out"
            )

    @property
    def of_prompts(self) -> DecodeSpec:
        """What a prompt is run by, whatever decodes after it: dense, and not speculative."""
        return dataclasses.replace(self, sparse=None, speculative=None)

    @property
    def rows(self) -> int:
        """Rows that a request runs in a round, at most."""
        return 1 if self.speculative is None else self.speculative.rows

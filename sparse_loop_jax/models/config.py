"""The shape of an Ouro model, validated once."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuroConfig:
    """Architecture of a looped Transformer of the Ouro family.

    Hashable and immutable, so that it can be a static argument of a jitted function.
    Field names follow the published `config.json`.

    Attributes:
      vocab_size: number of token ids.
      hidden_size: width of the residual stream.
      intermediate_size: width of the SwiGLU MLP.
      num_hidden_layers: layers of the shared stack.
      num_attention_heads: query heads.
      num_key_value_heads: key/value heads; divides `num_attention_heads`.
      head_dim: size of a head; even, because RoPE rotates halves.
      max_position_embeddings: the context limit, in tokens.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: added to the mean square before the root.
      total_ut_steps: loops over the shared stack ("D" in the documentation).
      tie_word_embeddings: True when the LM head is the embedding table.
      early_exit_threshold: cumulative exit probability at which the readout takes an
        earlier loop; 1.0 means never.
      bos_token_id, eos_token_ids: special ids; `eos_token_ids` ends generation.
      initializer_range: standard deviation of randomly initialised weights.

    Raises:
      ValueError: a value is out of range or does not fit another one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 65536
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    total_ut_steps: int = 4
    tie_word_embeddings: bool = False
    early_exit_threshold: float = 1.0
    bos_token_id: int | None = 0
    eos_token_ids: tuple[int, ...] = (0,)
    initializer_range: float = 0.02

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "total_ut_steps",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary halves, got {self.head_dim}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        threshold = self.early_exit_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float):
            raise ValueError(f"early_exit_threshold must be a number, got {threshold!r}")
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"early_exit_threshold must be in [0, 1], got {threshold!r}")
        special = [("eos_token_ids", i) for i in self.eos_token_ids]
        if self.bos_token_id is not None:
            special.append(("bos_token_id", self.bos_token_id))
        for name, value in special:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be token ids, got {value!r}")
            if not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"{name} has {value}, which is outside the vocabulary of {self.vocab_size}"
                )

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query/key/value projection."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters, the embedding and (unless tied) the LM head included."""
        attention = (
            self.qkv_size + self.num_attention_heads * self.head_dim
        ) * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        layer = attention + mlp + 4 * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + tables + 2 * self.hidden_size + 1

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token occupies over all loops and layers."""
        planes = self.total_ut_steps * self.num_hidden_layers
        return planes * 2 * self.num_key_value_heads * self.head_dim * itemsize


OURO_1_4B = OuroConfig(
    vocab_size=49152,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
)
OURO_2_6B = dataclasses.replace(OURO_1_4B, num_hidden_layers=48)

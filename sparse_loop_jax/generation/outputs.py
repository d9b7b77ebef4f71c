"""What `generate` returns."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GenerateStats:
    """Counts, seconds and bytes of one call.

    Attributes:
      prompt_tokens, generated_tokens: over all requests.
      prefill_seconds, decode_seconds: wall time, compilation taken out.
      tokens_per_second: tokens of the decode loop over its seconds; 0 if it did not run.
      compile_seconds, compilations: what JAX compiled during the call.
      kv_cache_bytes: of the pools.
      peak_bytes: of the first device since the process began; None where it is not known.
      implementation: what served the ops.
    """

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    compile_seconds: float
    compilations: int
    kv_cache_bytes: int
    peak_bytes: int | None
    implementation: str


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """Results in the order of the prompts."""

    token_ids: list[list[int]]  # without the prompt; a stop token is kept
    texts: list[str] | None  # special tokens left out; None without a tokenizer
    finish_reasons: list[str]  # "stop" or "length"
    stats: GenerateStats

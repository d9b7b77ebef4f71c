"""What `generate` returns, and the counts that a stream ends with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.state import RoundCounters


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateStats:
    """Counts, seconds and bytes of one call.

    Attributes:
      prompt_tokens, generated_tokens: over all requests.
      prefill_seconds, decode_seconds: wall time, compilation taken out. A stream's hold
        what its reader did between two chunks, too.
      tokens_per_second: tokens of the decode loop over its seconds; 0 if it did not run.
      compile_seconds, compilations: what JAX compiled during the call.
      kv_cache_bytes, reference_store_bytes: as allocated.
      peak_bytes: of the first device since the process began; None where it is not known.
      implementations: what served each op of the decode loop, by the op's name, and
        `prefill_attention` in the program of prompts that was traced last.
      rounds: steps of the decode loop; one token each without speculation.
      discarded_rounds: of a stream, rounds that were submitted ahead and not read, because
        every request had finished before them; no other count has them.
      drafted, accepted: drafted tokens offered, and those that were emitted.
      acceptance_by_position: accepted / drafted at each place of a round; None where
        nothing was drafted.
      loops_run, loops_skipped: passes over the layers in plain rounds, and those left out
        because every row had left; together the model's loops times the rounds. With
        speculation both are 0.
      captured_rows, consumed_rows: (row, layer, loop) that captured or consumed references.
      keys_read, keys_dense: keys a head attended to, over decoded rows and all loops, and
        what dense attention would have read.
      retained_mass_mean, retained_mass_min: attention mass of the kept keys in the loop that
        chose them, per layer, over emitted rows and heads; empty when dense. The mass that
        the same keys have in later loops is what `sparse-loop evaluate` measures.
    """

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    compile_seconds: float
    compilations: int
    kv_cache_bytes: int
    reference_store_bytes: int
    peak_bytes: int | None
    implementations: dict[str, str]
    rounds: int
    discarded_rounds: int
    drafted: int
    accepted: int
    acceptance_by_position: list[float | None]
    loops_run: int
    loops_skipped: int
    captured_rows: int
    consumed_rows: int
    keys_read: float
    keys_dense: float
    retained_mass_mean: list[float]
    retained_mass_min: list[float]

    @classmethod
    def from_counters(
        cls,
        counters: RoundCounters,
        spec: DecodeSpec,
        *,
        discarded_rounds: int = 0,
        **measured: Any,
    ) -> GenerateStats:
        """The stats of rounds counted on the device (`counters` read to the host)."""
        loops_run, loops_skipped = counters.loops(spec)
        drafted, accepted = counters.drafted.tolist(), counters.accepted.tolist()
        sparse = counters.sparse
        mean, least = [], []
        if sparse is not None and (rows := int(sparse.mass_rows)):
            mean, least = (sparse.mass_sum / rows).tolist(), sparse.mass_min.tolist()
        return cls(
            rounds=int(counters.rounds),
            discarded_rounds=discarded_rounds,
            drafted=sum(drafted),
            accepted=sum(accepted),
            acceptance_by_position=[
                a / d if d else None for a, d in zip(accepted, drafted, strict=True)
            ],
            loops_run=loops_run,
            loops_skipped=loops_skipped,
            captured_rows=0 if sparse is None else int(sparse.captured),
            consumed_rows=0 if sparse is None else int(sparse.consumed),
            keys_read=0.0 if sparse is None else float(sparse.keys_read),
            keys_dense=0.0 if sparse is None else float(sparse.keys_dense),
            retained_mass_mean=mean,
            retained_mass_min=least,
            **measured,
        )


def sum_counters(rounds: Sequence[RoundCounters]) -> RoundCounters:
    """Rounds counted as one, on the host: `references.add_counters` without a device."""
    total = jax.tree.map(lambda *each: np.sum(each, axis=0), *rounds)
    sparse = [each.sparse for each in rounds if each.sparse is not None]
    if not sparse:
        return total
    least = np.min([each.mass_min for each in sparse], axis=0)
    return dataclasses.replace(total, sparse=dataclasses.replace(total.sparse, mass_min=least))


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """Results in the order of the prompts."""

    token_ids: list[list[int]]  # without the prompt; a stop token is kept
    texts: list[str] | None  # special tokens left out; None without a tokenizer
    finish_reasons: list[str]  # "stop" or "length"
    # Of each token: the loop that it was read from, counted from 1.
    exit_loops: list[list[int]]
    stats: GenerateStats

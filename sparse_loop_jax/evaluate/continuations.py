"""What a model writes by itself: where sparse decoding departs from dense, and what drafts
are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparse_loop_jax.decoding.config import SpeculativeConfig
from sparse_loop_jax.evaluate.forcing import Forced, force
from sparse_loop_jax.evaluate.inputs import at_retention
from sparse_loop_jax.evaluate.progress import Steps
from sparse_loop_jax.evaluate.report import Row
from sparse_loop_jax.generation.generate import generate
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse.config import SparseDecodeConfig


def measure_divergence(
    model: Ouro,
    prompts: Sequence[np.ndarray],
    retentions: Sequence[float],
    *,
    sparse: SparseDecodeConfig,
    new_tokens: int,
    implementation: str | None,
    steps: Steps,
) -> list[Row]:
    """Table "divergence"; see `evaluate` for its columns.

    The margins are those of dense decoding at the token where the texts part: how clear the
    choice was that sparse decoding made otherwise.
    """
    options: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "eos_token_id": [],
        "exit_threshold": 1.0,
        "implementation": implementation,
        "progress": False,
    }
    longest = max(len(p) for p in prompts) + new_tokens
    steps.begin("continuations, dense")
    dense = generate(model, [p.tolist() for p in prompts], **options).token_ids
    sequences = [
        Forced(np.concatenate([p, np.asarray(ids, np.int32)]), len(p))
        for p, ids in zip(prompts, dense, strict=True)
    ]
    margins = force(model, sequences, implementation=implementation).scores.margin
    steps.done()
    rows = []
    for retention in retentions:
        steps.begin(f"continuations, retention {retention:g}")
        config = at_retention(sparse, retention, longest, model.config)
        out = generate(model, [p.tolist() for p in prompts], sparse=config, **options).token_ids
        firsts = [first_difference(a, b) for a, b in zip(dense, out, strict=True)]
        parted = [(i, at) for i, at in enumerate(firsts) if at is not None]
        # The first new token comes from the prefill, which is dense; row 0 gives the second.
        lost = [float(margins[at - 1, i]) for i, at in parted]
        kept = [new_tokens if at is None else at for at in firsts]
        rows.append(
            {
                "retention": retention,
                "prompts": len(prompts),
                "new tokens": new_tokens,
                "equal": len(prompts) - len(parted),
                "first difference": float(np.median(kept)),
                "earliest": min(kept),
                "margin there": float(np.median(lost)) if lost else None,
                "largest margin": max(lost) if lost else None,
                "median margin": float(np.median(margins[: new_tokens - 1, : len(prompts)])),
            }
        )
        steps.done()
    return rows


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, None if one is the beginning of the other.

    >>> first_difference([5, 6, 7], [5, 9, 7]), first_difference([5, 6], [5, 6, 7])
    (1, None)
    """
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


def measure_acceptance(
    model: Ouro,
    prompts: Sequence[np.ndarray],
    retentions: Sequence[float],
    *,
    sparse: SparseDecodeConfig,
    new_tokens: int,
    speculative_tokens: int,
    draft_loops: Sequence[int],
    implementation: str | None,
    steps: Steps,
) -> list[Row]:
    """Table "acceptance"; see `evaluate` for its columns."""
    loops = model.config.total_ut_steps
    longest = max(len(p) for p in prompts) + new_tokens
    rows = []
    for drafting in draft_loops:
        for retention in retentions:
            steps.begin(f"acceptance, {drafting} draft loops, retention {retention:g}")
            stats = generate(
                model,
                [p.tolist() for p in prompts],
                max_new_tokens=new_tokens,
                sparse=at_retention(sparse, retention, longest, model.config),
                speculative=SpeculativeConfig(speculative_tokens, draft_loops=drafting),
                eos_token_id=[],
                exit_threshold=1.0,
                implementation=implementation,
                progress=False,
            ).stats
            by_position = stats.acceptance_by_position
            whole = [a for a in by_position if a is not None]
            # A round of every prompt emits its accepted tokens and one more.
            emitted = 1 + sum(whole)
            cost = 1 + speculative_tokens * drafting / loops
            rows.append(
                {
                    "draft loops": drafting,
                    "retention": retention,
                    "drafted": stats.drafted,
                    "accepted": stats.accepted,
                    "acceptance": stats.accepted / stats.drafted if stats.drafted else None,
                    **{f"token {i + 1}": a for i, a in enumerate(by_position)},
                    "tokens a round": emitted,
                    "yield": emitted / cost,
                }
            )
            steps.done()
    return rows

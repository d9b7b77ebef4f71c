"""What each loop predicts, and how well: shared by training logs and the evaluation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparse_loop_jax.models import OuroConfig, OuroParams
from sparse_loop_jax.models.layers import lm_logits

from .batches import Mixture, make_batch
from .corpus import Corpus
from .network import cast, loop_states
from .objective import Objective
from .papers import Paper
from .tasks import most_hops, recall, several_hops


@functools.partial(jax.jit, static_argnames=("config", "objective"))
def score(
    params: OuroParams, config: OuroConfig, objective: Objective, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Teacher-forced predictions of every loop.

    Args:
      ids: int32 `[B, T]`.

    Returns:
      Cross-entropy of the next token, float32 `[D, B, T - 1]` in nats, and the likeliest next
      token, int32 `[D, B, T]`.
    """
    states = loop_states(
        params,
        config,
        ids,
        dtype=objective.dtype,
        attention=objective.attention,
        remat=False,
    )
    rounded = cast(params, objective.dtype)
    following = jnp.concatenate([ids[:, 1:], jnp.zeros_like(ids[:, :1])], axis=1)

    def one(_, row):  # a row at a time: logits of all loops are large
        state, labels = row  # [D, T, hidden], [T]
        logits = lm_logits(rounded, state)
        labels = jnp.broadcast_to(labels[None], logits.shape[:2])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return None, (loss, jnp.argmax(logits, axis=-1).astype(jnp.int32))

    _, (loss, token) = jax.lax.scan(one, None, (jnp.moveaxis(states, 1, 0), following))
    return jnp.moveaxis(loss, 0, 1)[..., :-1], jnp.moveaxis(token, 0, 1)


def score_padded(
    params: OuroParams,
    config: OuroConfig,
    objective: Objective,
    sequences: list[list[int]],
    *,
    length: int,
    rows: int,
) -> list[np.ndarray]:
    """The likeliest next tokens `[D, tokens]` of sequences of different lengths.

    Args:
      length: what each is padded to, on the right, where causal attention does not look.
      rows: sequences at a time.
    """
    found: list[np.ndarray] = []
    for start in range(0, len(sequences), rows):
        group = sequences[start : start + rows]
        ids = np.zeros((rows, length), np.int32)
        for row, sequence in enumerate(group):
            ids[row, : len(sequence)] = sequence
        tokens = np.asarray(score(params, config, objective, jnp.asarray(ids))[1])
        found += [tokens[:, row, : len(s)] for row, s in enumerate(group)]
    return found


def answered(tokens: np.ndarray, ids: list[int], answers: list[int]) -> np.ndarray:
    """Whether each loop predicts every token of an answer, bool `[D]`.

    Args:
      tokens: `[D, T]` of `score`.
      answers: indices into `ids` of the answer's tokens.
    """
    at = np.asarray(answers)
    return np.all(tokens[:, at - 1] == np.asarray(ids)[None, at], axis=1)


def held_out_papers(corpus: Corpus, loops: int, length: int, count: int) -> dict[str, list]:
    """Papers no run trains on (seed 2**31), one question each: recall, and hops by steps."""
    rng = np.random.default_rng([2**31, length])
    lexicon = corpus.lexicon
    papers: dict[str, list[Paper]] = {
        "recall": [
            recall(rng, lexicon, length, prose=corpus.held if i % 2 else None, questions=1)
            for i in range(count)
        ]
    }
    longest = most_hops(lexicon, length)
    for steps in range(1, longest + 1):
        papers[f"hops {steps}"] = [
            several_hops(
                rng,
                lexicon,
                length,
                loops=loops,
                prose=corpus.held if i % 2 else None,
                questions=1,
                hops=np.array([steps]),
            )
            for i in range(count)
        ]
    return papers


def quick_look(
    params: OuroParams,
    config: OuroConfig,
    objective: Objective,
    corpus: Corpus,
    *,
    length: int,
    rows: int,
    papers: int = 16,
) -> dict:
    """Held-out numbers for a training log; one program a length.

    Returns:
      `cross_entropy` of each loop on held-out text, `recall` and `hops <n>`: the part of
      questions that each loop answers.
    """
    loops = config.total_ut_steps
    text = make_batch(
        corpus.held,
        corpus.lexicon,
        Mixture(),
        seed=2**31,
        step=0,
        rows=rows,
        length=length,
        synthetic=0.0,
        loops=loops,
        hops=1,
    )
    loss, _ = score(params, config, objective, jnp.asarray(text.ids))
    found: dict = {"cross_entropy": rounded_list(loss.mean(axis=(1, 2)), 4)}
    for name, group in held_out_papers(corpus, loops, length, papers).items():
        tokens = score_padded(
            params, config, objective, [p.ids for p in group], length=length, rows=rows
        )
        right = [answered(t, p.ids, p.answers) for t, p in zip(tokens, group, strict=True)]
        found[name] = rounded_list(np.mean(right, axis=0), 3)
    return found


def rounded_list(values, digits: int) -> list[float]:
    """Numbers for a log."""
    return [round(float(value), digits) for value in values]

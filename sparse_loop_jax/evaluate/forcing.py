"""Text fed token by token as decoded rows, and how well each row predicts the next token.

The steps are the public ones; what differs from generation is that the next token is
given. One jitted scan runs all rows of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.decoding import references
from sparse_loop_jax.decoding.state import DecodeState, RoundCounters
from sparse_loop_jax.decoding.steps import decode_step
from sparse_loop_jax.generation.buckets import quarter_octave
from sparse_loop_jax.generation.options import Options
from sparse_loop_jax.generation.prompts import run_prompts
from sparse_loop_jax.generation.setup import initial_state, plan_call
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse import store as reference_store
from sparse_loop_jax.sparse.config import SparseDecodeConfig

# (params, state, lease to retire) -> state, output, what was seen on the way.
Step = Callable[..., tuple[Any, Any, Any]]


@dataclasses.dataclass(frozen=True)
class Forced:
    """Token ids, of which the first `prefix` are prefilled and the others fed one by one.

    Row t feeds `ids[prefix + t]` and is judged by `ids[prefix + t + 1]`; the last id is
    never fed.

    Raises:
      ValueError: that leaves no row.
    """

    ids: np.ndarray  # int32 [n]
    prefix: int  # 0 decodes from the first token on

    def __post_init__(self):
        if not 0 <= self.prefix <= len(self.ids) - 2:
            raise ValueError(
                f"a sequence of {len(self.ids)} tokens leaves no decoded row to judge after a "
                f"prefix of {self.prefix}: it needs {max(self.prefix, 0) + 2}"
            )

    @property
    def rows(self) -> int:
        """Decoded rows."""
        return len(self.ids) - 1 - self.prefix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenScores:
    """What each row says of the token after it: `[T, B]`."""

    nll: jax.Array  # float32, nats; -log p(next token)
    margin: jax.Array  # float32; largest logit less the second
    predicted: jax.Array  # int32; the largest logit's token
    kl: jax.Array  # float32, nats; KL(reference || this), 0 without a reference


@dataclasses.dataclass(frozen=True)
class ForcedRun:
    """Results of one batch: `[T, B]` arrays, of which `live` says what counts."""

    scores: TokenScores  # NumPy arrays
    live: np.ndarray  # bool [T, B]
    lengths: np.ndarray  # int32 [T, B]; keys that the row saw
    inside: Any  # what the step saw, each leaf [T, ...]; None for the plain step
    logits: jax.Array | None  # float32 [T, B, vocab], on the device, where asked for
    counters: RoundCounters


def plain_step(params: OuroParams, state: DecodeState, retire):
    """`decode_step`, which nothing is seen of."""
    return (*decode_step(params, state, retire), None)


def force(
    model: Ouro,
    sequences: Sequence[Forced],
    *,
    sparse: SparseDecodeConfig | None = None,
    reference: jax.Array | None = None,
    keep_logits: bool = False,
    step: Step = plain_step,
    implementation: str | None = None,
) -> ForcedRun:
    """Feeds a batch of sequences and scores every row.

    Args:
      sequences: one batch; prefixes and lengths may differ.
      sparse: attention of the fed rows; None, or a retention of 1, is dense. The prefix is
        dense in any case.
      reference: float32 `[T, B, vocab]`, the `logits` of another run of these sequences, for
        the divergence from it.
      keep_logits: hand out the logits: T * B * vocab * 4 bytes.
      step: how a row is run.
      implementation: of the ops.

    Raises:
      ValueError: a sequence does not fit the model.
    """
    firsts = [max(s.prefix, 1) for s in sequences]
    options = Options(
        max_new_tokens=[len(s.ids) - n for s, n in zip(sequences, firsts, strict=True)],
        sparse=sparse,
        eos_token_id=[],
        exit_threshold=1.0,  # sparse decode runs every loop, and so does what it is held to
        implementation=implementation,
    )
    for index, s in enumerate(sequences):
        if len(s.ids) - 1 > model.config.max_position_embeddings:
            raise ValueError(
                f"sequence {index} feeds {len(s.ids) - 1} tokens, more than the context of "
                f"{model.config.max_position_embeddings}"
            )
    prompts = [s.ids[:n].tolist() for s, n in zip(sequences, firsts, strict=True)]
    plan = plan_call(model, prompts, options)
    requests = [
        dataclasses.replace(r, prompt=r.prompt[: s.prefix])
        for r, s in zip(plan.requests, sequences, strict=True)
    ]
    params = model.params
    state, _ = run_prompts(params, initial_state(plan, outstanding_rounds=1), requests)

    batch = plan.sizes.batch
    rows = np.zeros(batch, np.int32)
    rows[: len(sequences)] = [s.rows for s in sequences]
    steps = quarter_octave(int(rows.max()))
    fed = np.zeros((steps, batch), np.int32)
    targets = np.zeros((steps, batch), np.int32)
    starts = np.zeros(batch, np.int32)
    for column, s in enumerate(sequences):
        fed[: s.rows, column] = s.ids[s.prefix : -1]
        targets[: s.rows, column] = s.ids[s.prefix + 1 :]
        starts[column] = s.prefix
    state = dataclasses.replace(state, remaining=jnp.asarray(rows))
    _, scores, logits, inside, counters = _run(
        params,
        state,
        jnp.asarray(fed),
        jnp.asarray(targets),
        reference,
        step=step,
        keep_logits=keep_logits,
    )
    scores, inside, counters = jax.device_get((scores, inside, counters))
    reference_store.check(rounds=counters.refused)
    order = np.arange(steps, dtype=np.int32)[:, None]
    return ForcedRun(
        scores=scores,
        live=order < rows[None],
        lengths=starts[None] + order + 1,
        inside=inside,
        logits=logits,
        counters=counters,
    )


@functools.partial(jax.jit, static_argnames=("step", "keep_logits"), donate_argnames=("state",))
def _run(params, state: DecodeState, fed, targets, reference, *, step: Step, keep_logits):
    def body(carry, inputs):
        state, lease, counters = carry
        token, target, reference = inputs
        state = dataclasses.replace(state, token=token)
        state, output, seen = step(params, state, lease)
        logits = output.logits[:, 0]
        scores = token_scores(logits, target, reference)
        counters = references.add_counters(counters, output.counters)
        kept = logits if keep_logits else None
        return (state, output.lease, counters), (scores, kept, seen)

    carry = (state, references.no_lease(state), references.no_counters(state))
    (state, _, counters), (scores, logits, seen) = jax.lax.scan(
        body, carry, (fed, targets, reference)
    )
    # The state goes out so that its donation is of use: the pools are updated in place.
    return state, scores, logits, seen, counters


def token_scores(
    logits: jax.Array, target: jax.Array, reference: jax.Array | None
) -> TokenScores:
    """Scores of float32 logits `[B, vocab]` against targets int32 [B]."""
    logp = jax.nn.log_softmax(logits)
    top = jax.lax.top_k(logits, 2)[0]
    kl = jnp.zeros(target.shape, jnp.float32)
    if reference is not None:
        wanted = jax.nn.log_softmax(reference)
        kl = (jnp.exp(wanted) * (wanted - logp)).sum(axis=-1)
    return TokenScores(
        nll=-jnp.take_along_axis(logp, target[:, None], axis=-1)[:, 0],
        margin=top[:, 0] - top[:, 1],
        predicted=jnp.argmax(logits, axis=-1).astype(jnp.int32),
        kl=kl,
    )

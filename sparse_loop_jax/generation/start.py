"""A batch of prompts up to its first tokens: where the public steps take over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparse_loop_jax.checks import plain_int
from sparse_loop_jax.decoding.state import DecodeState
from sparse_loop_jax.generation.options import Options
from sparse_loop_jax.generation.prompts import run_prompts
from sparse_loop_jax.generation.setup import initial_state, plan_call
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.models.params import OuroParams


def start(
    model: Ouro,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    outstanding_rounds: int = 1,
    **options: Any,
) -> tuple[OuroParams, DecodeState, np.ndarray]:
    """Prefills a batch, for use with `decode_step` and `speculative_step`.

    Args:
      prompts: as for `generate`.
      outstanding_rounds: how many rounds' leases may be out at once; sizes the store.
      **options: the keyword arguments of `generate`, but for `progress`.

    Returns:
      The weights, the state, and each prompt's first token, int32 [batch bucket]; places
      beyond the prompts are dead and have 0.

    Raises:
      ValueError: as `generate`, or `outstanding_rounds` is no integer >= 1.
    """
    outstanding_rounds = plain_int("outstanding_rounds", outstanding_rounds, 1)
    plan = plan_call(model, prompts, Options(**options))
    params = model.params
    state = initial_state(plan, outstanding_rounds)
    state, emitted = run_prompts(params, state, plan.requests)
    first = np.zeros(plan.sizes.batch, np.int32)
    for tokens, count, _ in jax.device_get(emitted):
        first += np.where(count > 0, tokens[:, 0], 0)
    return params, state, first

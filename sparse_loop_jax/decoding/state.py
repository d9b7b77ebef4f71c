"""Everything a step carries: one frozen pytree, with what is static as its metadata."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_loop_jax.cache import PagedKVCache
from sparse_loop_jax.models.config import OuroConfig


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """What a compiled step depends on besides shapes; hashable.

    Attributes:
      config: the model.
      sampled: False compiles the greedy readout alone.
      early_exit: True lets `RequestParams.exit_threshold` choose the readout's loop.
      implementation: of the ops, by name; None lets each op choose.
    """

    config: OuroConfig
    sampled: bool = False
    early_exit: bool = False
    implementation: str | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestParams:
    """What each request asked for; arrays, so that other values do not recompile."""

    temperature: jax.Array  # float32 [B]; 0 is greedy
    top_k: jax.Array  # int32 [B]; the vocabulary's size keeps all
    top_p: jax.Array  # float32 [B]; 1 keeps all
    exit_threshold: jax.Array  # float32 [B]; 1 never leaves early
    stop_ids: jax.Array  # int32 [B, S], padded with -1, which is no token
    key: jax.Array  # PRNG key [B]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch of requests between two steps. Donate it: its pools are updated in place."""

    cache: PagedKVCache
    request: RequestParams
    token: jax.Array  # int32 [B], the next input
    position: jax.Array  # int32 [B], where it goes: the tokens that K/V hold already
    remaining: jax.Array  # int32 [B], tokens that may still be emitted
    stopped: jax.Array  # bool [B], a stop token was emitted
    spec: DecodeSpec = dataclasses.field(metadata={"static": True})

    @property
    def live(self) -> jax.Array:
        """Requests that still emit, bool [B]."""
        return ~self.stopped & (self.remaining > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Tokens that a step emitted; on the device until someone asks."""

    tokens: jax.Array  # int32 [B, n]
    count: jax.Array  # int32 [B], how many of them count
    logits: jax.Array  # float32 [B, vocab], what the first of them was chosen from


def emit(state: DecodeState, token: jax.Array, live: jax.Array) -> DecodeState:
    """Moves the live requests one emitted token on. `token` int32 [B], `live` bool [B]."""
    stops = (token[:, None] == state.request.stop_ids).any(axis=1)
    return dataclasses.replace(
        state,
        token=jnp.where(live, token, state.token),
        remaining=state.remaining - live,
        stopped=state.stopped | (live & stops),
    )

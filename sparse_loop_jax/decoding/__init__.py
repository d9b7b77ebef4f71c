"""Jitted steps over a decode state, and the rounds that a host drives with them."""

from sparse_loop_jax.decoding.config import DecodeSpec, SpeculativeConfig
from sparse_loop_jax.decoding.references import no_lease
from sparse_loop_jax.decoding.rounds import Round, RoundDriver
from sparse_loop_jax.decoding.speculative import speculative_step
from sparse_loop_jax.decoding.state import DecodeState, RequestParams, RoundOutput
from sparse_loop_jax.decoding.steps import decode_step, prefill

__all__ = [
    "DecodeSpec",
    "DecodeState",
    "RequestParams",
    "Round",
    "RoundDriver",
    "RoundOutput",
    "SpeculativeConfig",
    "decode_step",
    "no_lease",
    "prefill",
    "speculative_step",
]

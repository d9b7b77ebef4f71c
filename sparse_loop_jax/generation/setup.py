"""From checked requests to a decode state at bucketed sizes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.cache import allocate_pages, create_cache
from sparse_loop_jax.decoding.adaptive import new_history
from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.sampling import request_key, seed_words
from sparse_loop_jax.decoding.state import DecodeState, RequestParams
from sparse_loop_jax.generation.buckets import Sizes, power_of_two, sizes_for
from sparse_loop_jax.generation.inputs import Request, make_requests
from sparse_loop_jax.generation.options import Options
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse import break_even, store as reference_store
from sparse_loop_jax.sparse.arithmetic import retained_counts


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call will run, before anything is allocated."""

    model: Ouro
    options: Options
    requests: list[Request]
    sizes: Sizes
    spec: DecodeSpec

    @property
    def span(self) -> int:
        """Tokens that a request's page table has room for."""
        return self.sizes.max_pages * self.options.page_size

    @property
    def capacity(self) -> int:
        """Kept keys per head that the store has room for; 0 where there is no store."""
        sparse = self.options.sparse
        if self.spec.sparse is None or sparse is None:
            return 0
        # A bucket too: other retentions of a like size find the same program.
        return sparse.capacity or power_of_two(sparse.keys_kept(self.span))

    def bytes(self) -> tuple[int, int]:
        """Of the K/V pages, and of the references of one round."""
        config, sizes, sparse = self.model.config, self.sizes, self.options.sparse
        token = config.kv_bytes_per_token(self.model.dtype.itemsize) // config.total_ut_steps
        kv = sizes.num_pages * self.options.page_size * token
        if self.spec.sparse is None or sparse is None:
            return kv, 0
        slots = sizes.batch * self.spec.rows
        return kv, reference_store.nbytes_for(sparse, config, slots, self.capacity, self.span)


def plan_call(model: Ouro, prompts: str | Sequence, options: Options) -> Plan:
    """Checks everything that can be wrong with a call.

    Raises:
      ValueError: as documented at `generate`.
    """
    spec = options.spec_for(model.config)
    requests = make_requests(model, prompts, options.max_new_tokens, options.eos_token_id)
    sizes = sizes_for(requests, model.config.total_ut_steps, options.page_size)
    if spec.sparse is not None:
        assert options.sparse is not None
        options.sparse.validate_for(model.config, max(r.kv_tokens for r in requests))
    return Plan(model, options, requests, sizes, spec)


def warn_where_slower(plan: Plan) -> None:
    """Warns (`SparseSlowerWarning`) of sparse decode that dense decode would beat.

    Only where plain steps of this model's shape were measured on this device.
    """
    if plan.options.sparse is None or plan.spec.speculative is not None:
        return
    text = break_even.warning(
        plan.model.config,
        plan.model.dtype,
        plan.options.sparse,
        jax.devices()[0].device_kind,
        batch=len(plan.requests),
        context=max(r.kv_tokens for r in plan.requests),
    )
    if text is not None:
        # At the caller of `generate` or `stream`.
        warnings.warn(text, break_even.SparseSlowerWarning, stacklevel=3)


def initial_state(plan: Plan, outstanding_rounds: int) -> DecodeState:
    """Allocates the cache and, for sparse decode, the store of `outstanding_rounds`."""
    config, sizes, requests = plan.model.config, plan.sizes, plan.requests
    loops, page_size = config.total_ut_steps, plan.options.page_size
    table = np.full((sizes.batch, loops, sizes.max_pages), sizes.num_pages, np.int32)
    table[: len(requests)] = allocate_pages(
        [r.kv_tokens for r in requests], loops, page_size, sizes.max_pages, sizes.num_pages
    )
    remaining = np.zeros(sizes.batch, np.int32)
    remaining[: len(requests)] = [r.max_new_tokens for r in requests]
    zeros = np.zeros(sizes.batch, np.int32)
    speculative = plan.spec.speculative
    adaptive = speculative is not None and speculative.adaptive
    store, key_counts = _reference_store(plan, outstanding_rounds)
    return DecodeState(
        cache=create_cache(config, table, sizes.num_pages, page_size, plan.model.dtype),
        request=_request_params(plan),
        token=jnp.asarray(zeros),
        position=jnp.asarray(zeros),
        remaining=jnp.asarray(remaining),
        stopped=jnp.asarray(zeros.astype(bool)),
        store=store,
        key_counts=key_counts,
        history=new_history(sizes.batch) if adaptive else None,
        spec=plan.spec,
    )


def _reference_store(plan: Plan, outstanding_rounds: int):
    sparse = plan.options.sparse
    if plan.spec.sparse is None or sparse is None:
        return None, None
    counts = retained_counts(sparse.key_retention, plan.span)
    store = reference_store.create(
        plan.model.config,
        slots=outstanding_rounds * plan.sizes.batch * plan.spec.rows,
        capacity=plan.capacity,
        max_tokens=plan.span,
    )
    return store, jnp.asarray(counts)


def _request_params(plan: Plan) -> RequestParams:
    options, sizes, config = plan.options, plan.sizes, plan.model.config
    stop_ids = np.full((sizes.batch, sizes.stop_ids), -1, np.int32)
    occurrence = np.zeros(sizes.batch, np.uint32)
    for row, request in enumerate(plan.requests):
        stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        occurrence[row] = request.occurrence
    vocab, exit_rule = config.vocab_size, options.exit_rule_for(config)

    def each(value, dtype):
        return jnp.asarray(np.full(sizes.batch, value, dtype))

    return RequestParams(
        temperature=each(options.temperature, np.float32),
        top_k=each(vocab if options.top_k is None else min(options.top_k, vocab), np.int32),
        top_p=each(options.top_p, np.float32),
        exit_threshold=each(exit_rule.threshold, np.float32),
        min_loops=each(exit_rule.min_loops, np.int32),
        max_loops=each(exit_rule.max_loops, np.int32),
        stop_ids=jnp.asarray(stop_ids),
        key=_request_keys(np.asarray(seed_words(options.seed), np.uint32), occurrence),
    )


_request_keys = jax.jit(jax.vmap(request_key, in_axes=(None, 0)))

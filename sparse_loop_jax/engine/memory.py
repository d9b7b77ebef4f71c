"""What an engine will take on the device, before it takes anything."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.cache import pages_for
from sparse_loop_jax.decoding import references
from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.speculative import speculative_step
from sparse_loop_jax.decoding.steps import decode_step
from sparse_loop_jax.engine import device
from sparse_loop_jax.engine.config import CacheConfig, SchedulerConfig
from sparse_loop_jax.engine.rows import empty_rows
from sparse_loop_jax.engine.sizing import Sizing, sizing_for
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse.config import SparseDecodeConfig
from sparse_loop_jax.sparse.store import nbytes_for


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device.

    Attributes:
      weights: of the model; there already.
      kv_pool: of all pages.
      reference_store: at its largest, for requests of `max_context`.
      rows: page tables, k by N and what else rounds carry, at their largest.
      step_temporaries: the most that a compiled step takes besides its arguments, at the
        largest sizes, and the results of the rounds outstanding; None where there is no
        limit to hold it against.
      limit: what all but the weights may take; None: nobody knows.
      device_free: what the device reported free, None where it reports nothing.
      num_pages: pages of a layer, a multiple of the loops.
      page_size: tokens in a page.
      max_context: longest prompt and continuation that is served: what was asked for, and no
        more than the pool holds.
    """

    weights: int
    kv_pool: int
    reference_store: int
    rows: int
    step_temporaries: int | None
    limit: int | None
    device_free: int | None
    num_pages: int
    page_size: int
    max_context: int

    @property
    def total(self) -> int:
        """All but the weights."""
        return self.kv_pool + self.reference_store + self.rows + (self.step_temporaries or 0)

    def __str__(self) -> str:
        def text(value: int | None) -> str:
            return "unknown" if value is None else f"{value:,}"

        return (
            f"K/V pool {text(self.kv_pool)} bytes ({self.num_pages:,} pages), reference store "
            f"{text(self.reference_store)}, rows {text(self.rows)}, step temporaries "
            f"{text(self.step_temporaries)}, in all {text(self.total)} of {text(self.limit)}; "
            f"weights {text(self.weights)}, device free {text(self.device_free)}; "
            f"max_context {self.max_context:,}"
        )


def plan_memory(
    params: OuroParams,
    dtype,
    spec: DecodeSpec,
    sparse: SparseDecodeConfig | None,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    outstanding: int,
) -> tuple[MemoryPlan, Sizing]:
    """Sizes an engine. Allocates nothing; compiles steps where there is a limit.

    Raises:
      ValueError: the limits contradict each other or the model, or it does not fit; the
        message has all the numbers.
    """
    context = _max_context(spec, scheduler)
    free = _device_free(params)
    limit = cache.device_bytes
    if limit is None and free is not None:
        limit = int(free * cache.utilization)
    loops, size = spec.config.total_ut_steps, int(cache.page_size)
    block_bytes = spec.config.kv_bytes_per_token(jnp.dtype(dtype).itemsize) * size
    useful = pages_for(context, size) * int(scheduler.max_num_seqs)

    def sized(num_blocks: int) -> Sizing:
        most = context
        if scheduler.max_context is None:
            most = min(context, max(num_blocks, 1) * size)
        return sizing_for(
            spec, sparse, scheduler,
            max_context=most, page_size=size, num_blocks=num_blocks, outstanding=outstanding,
        )  # fmt: skip

    def planned(num_blocks: int, temporaries: int | None) -> tuple[MemoryPlan, Sizing]:
        sizing = sized(num_blocks)
        sizes = sizing.sizes_at(sizing.max_context)
        store = 0
        if sizing.sparse is not None:
            store = nbytes_for(
                sizing.sparse, spec.config, sizes.slots, sizes.capacity,
                sizes.width * sizes.page_size,
            )  # fmt: skip
        state = _abstract_state(spec, sizing, dtype)
        pool = num_blocks * block_bytes
        rows = _nbytes(dataclasses.replace(state, store=None)) - pool
        plan = MemoryPlan(
            weights=_nbytes(params),
            kv_pool=pool,
            reference_store=store,
            rows=rows,
            step_temporaries=temporaries,
            limit=limit,
            device_free=free,
            num_pages=num_blocks * loops,
            page_size=sizing.page_size,
            max_context=min(sizing.max_context, num_blocks * size),
        )
        return plan, sizing

    fixed = cache.num_pages is not None or cache.memory_bytes is not None
    if cache.num_pages is not None:
        num_blocks = int(cache.num_pages) // loops
    elif cache.memory_bytes is not None:
        num_blocks = int(cache.memory_bytes) // block_bytes
    else:
        num_blocks = useful
    if num_blocks < 1:
        given = "the device has no more"
        if cache.num_pages is not None:
            given = f"num_pages {cache.num_pages}"
        elif cache.memory_bytes is not None:
            given = f"memory_bytes {cache.memory_bytes:,}"
        raise ValueError(
            f"the pool has no room for one page in each of {loops} loops: {given}, and a page "
            f"of all loops takes {block_bytes:,} bytes; raise num_pages to {loops} or more"
        )
    temporaries = None
    if limit is not None:
        temporaries = _step_temporaries(params, spec, sized(num_blocks), dtype, outstanding)
        if not fixed:
            rest = limit - (
                planned(num_blocks, temporaries)[0].total - num_blocks * block_bytes
            )
            num_blocks = max(1, min(useful, rest // block_bytes))
    plan, sizing = planned(num_blocks, temporaries)
    if limit is not None and plan.total > limit:
        raise ValueError(
            f"the engine does not fit: {plan}. Lower num_pages or memory_bytes (CacheConfig), "
            "max_num_seqs or max_context (SchedulerConfig) or key_retention, or raise "
            "device_bytes (CacheConfig)"
        )
    return plan, sizing


def _max_context(spec: DecodeSpec, scheduler: SchedulerConfig) -> int:
    most = spec.config.max_position_embeddings
    if scheduler.max_context is None:
        return most
    if scheduler.max_context > most:
        raise ValueError(
            f"max_context {scheduler.max_context} is beyond the model's {most} positions"
        )
    return int(scheduler.max_context)


def _device_free(params: OuroParams) -> int | None:
    """Bytes that the device of the weights still has, None where it does not say."""
    stats = next(iter(params.embed.devices())).memory_stats()
    if not stats or not stats.get("bytes_limit"):
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _abstract_state(spec: DecodeSpec, sizing: Sizing, dtype):
    sizes = sizing.sizes_at(sizing.max_context)
    counts = sizing.key_counts(sizes)
    return jax.eval_shape(lambda: device.new_state(spec, sizes, dtype, counts))


def _step_temporaries(
    params: OuroParams, spec: DecodeSpec, sizing: Sizing, dtype, outstanding: int
) -> int:
    """The most that a round or a prompt's program takes, as compiled, and unread results.

    The programs are those that will run, so the compilations are not lost.
    """
    state = _abstract_state(spec, sizing, dtype)
    sizes = sizing.sizes_at(sizing.max_context)
    lease = jax.eval_shape(references.no_lease, state)
    step = decode_step if spec.speculative is None else speculative_step
    programs = [step.lower(params, state, lease)]
    rows, chunk = max(sizing.prefill_shapes(), key=lambda shape: shape[0] * shape[1])
    vector = np.zeros(rows, np.int32)
    programs.append(
        device.lower_prefill(
            params,
            state,
            empty_rows(rows, sizes),
            np.zeros((rows, chunk), np.int32),
            vector,
            vector.astype(bool),
        )
    )
    working = results = 0
    with concurrent.futures.ThreadPoolExecutor() as pool:  # on a GPU, many seconds each
        compiled = list(pool.map(lambda program: program.compile(), programs))
    for program in compiled:
        analysis = program.memory_analysis()
        if analysis is not None:
            new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            working = max(working, analysis.temp_size_in_bytes)
            results = max(results, new)
    return working + outstanding * results


def _nbytes(tree) -> int:
    # A key is two words; its abstract dtype has an itemsize as well.
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

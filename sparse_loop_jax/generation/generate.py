"""`generate`: prompts in, tokens out, through the paged cache and one device loop."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparse_loop_jax.decoding import references
from sparse_loop_jax.decoding.config import SpeculativeConfig
from sparse_loop_jax.decoding.device_loop import TokenBuffer, decode_tokens, empty_buffer
from sparse_loop_jax.decoding.loops import implementations
from sparse_loop_jax.generation.compilation import Clock, count_compilations
from sparse_loop_jax.generation.memory import explain_exhaustion, peak_bytes
from sparse_loop_jax.generation.options import Options
from sparse_loop_jax.generation.outputs import GenerateOutput, GenerateStats
from sparse_loop_jax.generation.progress import Progress, on_terminal
from sparse_loop_jax.generation.prompts import run_prompts
from sparse_loop_jax.generation.setup import initial_state, plan_call, warn_where_slower
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse import store as reference_store
from sparse_loop_jax.sparse.config import SparseDecodeConfig

# Rounds between two looks at the device when someone watches.
_WATCHED_ROUNDS = 16


def generate(
    model: Ouro,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 64,
    sparse: SparseDecodeConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    exit_threshold: float | None = None,
    min_loops: int = 1,
    max_loops: int | None = None,
    page_size: int = 16,
    implementation: str | None = None,
    progress: bool | None = None,
) -> GenerateOutput:
    """Continues each prompt.

    Prompts may differ in length; none is padded into the arithmetic, and each gets what it
    would get alone. Shapes come in buckets, so a second call of similar size compiles
    nothing.

    Args:
      model: from `sparse_loop_jax.load`, or an `Ouro`.
      prompts: strings where the model has a tokenizer, or lists of token ids.
      max_new_tokens: at most so many for each prompt (or one number per prompt); the
        context may end a request earlier.
      sparse: cross-loop sparse attention for decoded tokens; None, or a retention of 1,
        is dense.
      speculative: draft with the first loops and verify with the rest; None decodes token
        by token.
      temperature: 0 is greedy; otherwise logits are divided by it and drawn from.
      top_k: keep only the k most probable tokens; None keeps all.
      top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
      seed: of the draws. A prompt draws the same whatever else is in the batch; equal
        prompts in one call draw differently, the first as it would alone. A draw's noise is
        of the seed and its position, so that different prompts of one seed have the same
        noise at equal positions: for independent samples, call with other seeds.
      eos_token_id: stop token or tokens; None: the checkpoint's; [] never stops.
      exit_threshold: summed exit probability at which a token leaves the loops; None: the
        checkpoint's; 1.0 never. Later loops find its K/V of the last one it ran. Prompts run
        every loop; the first token is read from the loop at which the last of them leaves.
      min_loops: the gate decides from this loop on, counted from 1.
      max_loops: a token leaves after so many loops whatever the gate says; None: all.
      page_size: tokens in a page of the cache, a power of two, at most the context.
      implementation: of the attention ops, "xla" or "pallas": that one runs or the call
        fails. None chooses by platform. "xla" takes XLA's matrix products as well, which
        are otherwise chosen by dtype and number of rows.
      progress: show a progress bar on standard error; None: if it is a terminal.

    Raises:
      ValueError: an argument is out of range or does not fit the model; nothing has been
        allocated or compiled then.
      StaleLeaseError: a reference was refused, which a correct program never sees.

    Warns:
      SparseSlowerWarning: dense decode was measured faster on this device for such requests.
    """
    options = Options(
        max_new_tokens=max_new_tokens,
        sparse=sparse,
        speculative=speculative,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_token_id=eos_token_id,
        exit_threshold=exit_threshold,
        min_loops=min_loops,
        max_loops=max_loops,
        page_size=page_size,
        implementation=implementation,
    )
    plan = plan_call(model, prompts, options)
    warn_where_slower(plan)
    requests, sizes = plan.requests, plan.sizes
    watched = on_terminal() if progress is None else progress
    prompt_tokens = sum(len(r.prompt) for r in requests)
    new_tokens = sum(r.max_new_tokens for r in requests)

    with (
        count_compilations() as compiled,
        explain_exhaustion(plan),
        Progress(watched, prompt_tokens, new_tokens) as bar,
    ):
        params = model.params
        state = initial_state(plan, outstanding_rounds=1)
        kv_bytes = state.cache.nbytes
        store_bytes = 0 if state.store is None else state.store.nbytes
        buffer = empty_buffer(state, sizes.max_new_tokens)
        clock = Clock(compiled)
        state, firsts = run_prompts(params, state, requests, bar.prefilled)
        for emitted in firsts:
            buffer = _append(buffer, *emitted)
        jax.block_until_ready(buffer)
        prefill_seconds = clock.lap()
        counters = references.no_counters(state)
        lease = references.no_lease(state)
        stretch = _WATCHED_ROUNDS if watched else sizes.max_new_tokens
        for _ in range(0, sizes.max_new_tokens, stretch):
            state, buffer, lease, more = decode_tokens(
                params, state, buffer, lease, jnp.int32(stretch)
            )
            counters = _add(counters, more)
            if watched:
                bar.generated(int(buffer.count.sum()))
                if not bool(state.live.any()):
                    break
        emitted, stopped, counters = jax.device_get((buffer, state.stopped, counters))
        decode_seconds = clock.lap()
    reference_store.check(rounds=counters.refused)

    ids, exit_loops = emitted.lists(len(requests), model.config.total_ut_steps)
    generated = sum(map(len, ids))
    decoded = generated - len(requests)  # each first token comes from the prefill
    return GenerateOutput(
        token_ids=ids,
        texts=None if model.tokenizer is None else [model.tokenizer.decode(i) for i in ids],
        finish_reasons=["stop" if stopped[i] else "length" for i in range(len(requests))],
        exit_loops=exit_loops,
        stats=GenerateStats.from_counters(
            counters,
            plan.spec,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            tokens_per_second=decoded / decode_seconds if decoded and decode_seconds else 0.0,
            compile_seconds=compiled.seconds,
            compilations=compiled.programs,
            kv_cache_bytes=kv_bytes,
            reference_store_bytes=store_bytes,
            peak_bytes=peak_bytes(),
            implementations=implementations(plan.spec),
        ),
    )


_append = jax.jit(TokenBuffer.append)
_add = jax.jit(references.add_counters)

"""`generate`: prompts in, tokens out, through the paged cache and one device loop."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_loop_jax.cache import allocate_pages, create_cache
from sparse_loop_jax.decoding.device_loop import TokenBuffer, decode_tokens
from sparse_loop_jax.decoding.state import DecodeSpec, DecodeState, RequestParams
from sparse_loop_jax.decoding.steps import prefill
from sparse_loop_jax.generation.buckets import Sizes, chunk_length, sizes_for
from sparse_loop_jax.generation.compilation import count_compilations
from sparse_loop_jax.generation.inputs import Request, check_sampling, make_requests
from sparse_loop_jax.generation.outputs import GenerateOutput, GenerateStats
from sparse_loop_jax.generation.progress import Progress, on_terminal
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.models.params import OuroParams

# Steps between two looks at the device when someone watches.
_WATCHED_STEPS = 16


def generate(
    model: Ouro,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    exit_threshold: float | None = None,
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
      temperature: 0 is greedy; otherwise logits are divided by it and drawn from.
      top_k: keep only the k most probable tokens; None keeps all.
      top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
      seed: of the draws. A prompt draws the same whatever else is in the batch; equal
        prompts in one call draw differently, the first as it would alone.
      eos_token_id: stop token or tokens; None: the checkpoint's; [] never stops.
      exit_threshold: cumulative exit probability at which the readout takes an earlier
        loop, as published; None: the checkpoint's; 1.0 never. All loops are run.
      page_size: tokens in a page of the cache, a power of two.
      implementation: of the ops ("xla", "pallas"); None chooses by platform.
      progress: show a progress bar on standard error; None: if it is a terminal.

    Raises:
      ValueError: an argument is out of range or does not fit the model; nothing has been
        allocated or compiled then.
    """
    check_sampling(temperature, top_k, top_p, seed)
    threshold = model.config.early_exit_threshold if exit_threshold is None else exit_threshold
    if isinstance(threshold, bool) or not 0.0 <= threshold <= 1.0:
        raise ValueError(f"exit_threshold must be in [0, 1], got {threshold!r}")
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")
    requests = make_requests(model, prompts, max_new_tokens, eos_token_id)
    sizes = sizes_for(requests, model.config.total_ut_steps, page_size)
    spec = DecodeSpec(
        config=model.config,
        sampled=temperature > 0,
        early_exit=threshold < 1.0,
        implementation=implementation,
    )

    with (
        count_compilations() as compiled,
        Progress(
            on_terminal() if progress is None else progress,
            sum(len(r.prompt) for r in requests),
            sum(r.max_new_tokens for r in requests),
        ) as bar,
    ):
        params = model.params
        sampling = _request_params(
            model, requests, sizes, temperature, top_k, top_p, threshold, seed
        )
        state = _initial_state(model, requests, sizes, page_size, spec, sampling)
        kv_bytes = state.cache.nbytes
        buffer = TokenBuffer(
            tokens=jnp.zeros((sizes.batch, sizes.max_new_tokens), jnp.int32),
            count=jnp.zeros((sizes.batch,), jnp.int32),
        )
        clock = _Clock(compiled)
        state, buffer = _run_prompts(params, state, buffer, requests, sizes, bar)
        jax.block_until_ready(buffer)
        prefill_seconds = clock.lap()
        watched = progress or (progress is None and on_terminal())
        state, buffer = _run_decode(params, state, buffer, sizes, bar, bool(watched))
        tokens, counts, stopped = jax.device_get((buffer.tokens, buffer.count, state.stopped))
        decode_seconds = clock.lap()

    ids = [tokens[i, : counts[i]].tolist() for i in range(len(requests))]
    generated = int(counts.sum())
    decoded = generated - len(requests)  # each first token comes from the prefill
    stats = GenerateStats(
        prompt_tokens=sum(len(r.prompt) for r in requests),
        generated_tokens=generated,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        tokens_per_second=decoded / decode_seconds if decoded else 0.0,
        compile_seconds=compiled.seconds,
        compilations=compiled.programs,
        kv_cache_bytes=kv_bytes,
        peak_bytes=_peak_bytes(),
        implementation=implementation or "auto",
    )
    return GenerateOutput(
        token_ids=ids,
        texts=None if model.tokenizer is None else [model.tokenizer.decode(i) for i in ids],
        finish_reasons=["stop" if stopped[i] else "length" for i in range(len(requests))],
        stats=stats,
    )


def _initial_state(
    model: Ouro,
    requests: list[Request],
    sizes: Sizes,
    page_size: int,
    spec: DecodeSpec,
    sampling: RequestParams,
) -> DecodeState:
    loops = model.config.total_ut_steps
    table = np.full((sizes.batch, loops, sizes.max_pages), sizes.num_pages, np.int32)
    table[: len(requests)] = allocate_pages(
        [r.kv_tokens for r in requests], loops, page_size, sizes.max_pages, sizes.num_pages
    )
    remaining = np.zeros(sizes.batch, np.int32)
    remaining[: len(requests)] = [r.max_new_tokens for r in requests]
    return DecodeState(
        cache=create_cache(model.config, table, sizes.num_pages, page_size, model.dtype),
        request=sampling,
        token=jnp.zeros((sizes.batch,), jnp.int32),
        position=jnp.zeros((sizes.batch,), jnp.int32),
        remaining=jnp.asarray(remaining),
        stopped=jnp.zeros((sizes.batch,), bool),
        spec=spec,
    )


def _request_params(
    model: Ouro, requests, sizes: Sizes, temperature, top_k, top_p, threshold, seed
) -> RequestParams:
    vocab = model.config.vocab_size
    stop_ids = np.full((sizes.batch, sizes.stop_ids), -1, np.int32)
    occurrence = np.zeros(sizes.batch, np.uint32)
    for row, request in enumerate(requests):
        stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        occurrence[row] = request.occurrence
    words = np.asarray([seed & 0xFFFFFFFF, seed >> 32], np.uint32)

    def each(value, dtype):
        return jnp.asarray(np.full(sizes.batch, value, dtype))

    return RequestParams(
        temperature=each(temperature, np.float32),
        top_k=each(vocab if top_k is None else min(top_k, vocab), np.int32),
        top_p=each(top_p, np.float32),
        exit_threshold=each(threshold, np.float32),
        stop_ids=jnp.asarray(stop_ids),
        key=_request_keys(words, occurrence),
    )


@jax.jit
def _request_keys(words: jax.Array, occurrence: jax.Array) -> jax.Array:
    """Keys [B] of requests, from the two 32-bit words of the seed and their occurrence."""
    key = jax.random.fold_in(jax.random.key(words[0]), words[1])
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(occurrence)


def _run_prompts(params: OuroParams, state, buffer, requests, sizes: Sizes, bar: Progress):
    """Prefills every prompt in chunks; each emits its first token with its last chunk."""
    done = np.zeros(sizes.batch, np.int64)
    lengths = np.zeros(sizes.batch, np.int64)
    lengths[: len(requests)] = [len(r.prompt) for r in requests]
    while (done < lengths).any():
        chunk = chunk_length(int((lengths - done).max()), sizes.batch)
        valid = np.minimum(lengths - done, chunk)
        tokens = np.zeros((sizes.batch, chunk), np.int32)
        for row, request in enumerate(requests):
            tokens[row, : valid[row]] = request.prompt[done[row] : done[row] + valid[row]]
        ends = (valid > 0) & (done + valid == lengths)
        state, output = prefill(
            params, state, jnp.asarray(tokens), jnp.asarray(valid, jnp.int32), jnp.asarray(ends)
        )
        buffer = _append(buffer, output)
        done += valid
        bar.prefilled(int(valid.sum()))
    return state, buffer


_append = jax.jit(TokenBuffer.append, donate_argnums=(0,))


def _run_decode(params, state, buffer, sizes: Sizes, bar: Progress, watched: bool):
    """The device loop; in stretches where someone watches, in one go otherwise."""
    stretch = _WATCHED_STEPS if watched else sizes.max_new_tokens
    for _ in range(0, sizes.max_new_tokens, stretch):
        state, buffer = decode_tokens(params, state, buffer, jnp.int32(stretch))
        if watched:
            bar.generated(int(buffer.count.sum()))
            if not bool(state.live.any()):
                break
    return state, buffer


class _Clock:
    """Wall seconds between laps, less what JAX spent compiling."""

    def __init__(self, compiled):
        self._compiled = compiled
        self._at = time.perf_counter()
        self._compiling = compiled.seconds

    def lap(self) -> float:
        now, compiling = time.perf_counter(), self._compiled.seconds
        seconds = (now - self._at) - (compiling - self._compiling)
        self._at, self._compiling = now, compiling
        return max(seconds, 0.0)


def _peak_bytes() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")

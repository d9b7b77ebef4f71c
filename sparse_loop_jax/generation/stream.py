"""`stream`: tokens as rounds finish, while the next round already runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence

import jax
import numpy as np

from sparse_loop_jax.decoding.config import SpeculativeConfig
from sparse_loop_jax.decoding.loops import implementations
from sparse_loop_jax.decoding.references import no_counters
from sparse_loop_jax.decoding.rounds import RoundDriver
from sparse_loop_jax.decoding.state import DecodeState
from sparse_loop_jax.generation.compilation import Clock, Compilations, count_compilations
from sparse_loop_jax.generation.inputs import Request
from sparse_loop_jax.generation.memory import peak_bytes
from sparse_loop_jax.generation.options import Options
from sparse_loop_jax.generation.outputs import GenerateStats, sum_counters
from sparse_loop_jax.generation.prompts import run_prompts
from sparse_loop_jax.generation.setup import Plan, initial_state, plan_call, warn_where_slower
from sparse_loop_jax.generation.text import TextStream
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse.config import SparseDecodeConfig


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """New tokens of one request.

    Attributes:
      index: of the prompt.
      token_ids: the new tokens; a stop token is kept.
      text: the text they add, None without a tokenizer. A character whose bytes are spread
        over several tokens comes whole, with the last of them.
      finished: this is the request's last chunk.
      finish_reason: "stop" or "length" when finished, else None.
      exit_loops: of each new token, the loop that it was read from, counted from 1.
      stats: of the whole stream, with its last chunk; None with all others.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finished: bool
    finish_reason: str | None
    exit_loops: list[int]
    stats: GenerateStats | None = None


def stream(
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
) -> Generator[StreamChunk, None, None]:
    """Yields each request's tokens as they come; together they are what `generate` returns.

    Arguments and warnings are those of `generate`. Up to two rounds
    (`max_outstanding_rounds`) are submitted before the oldest is read, so the device does not
    wait for the reader. What is outstanding when the last request finishes is dropped unread,
    and counted in the last chunk's `stats`. Leaving the generator early (`close`) frees
    everything.

    Raises:
      ValueError: as `generate`, at the call and not at the first token.
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
    return _chunks(plan)


def _chunks(plan: Plan) -> Generator[StreamChunk, None, None]:
    speculative = plan.spec.speculative
    ahead = 2 if speculative is None else speculative.max_outstanding_rounds
    readers = [_Reader(i, r, plan.model.tokenizer) for i, r in enumerate(plan.requests)]
    params = plan.model.params
    with count_compilations() as compiled:
        state = initial_state(plan, ahead)
        tally = _Tally(plan, state, compiled)
        state, firsts = run_prompts(params, state, plan.requests)
        with RoundDriver(params, state, max_outstanding=ahead) as driver:
            del state  # donated to the driver's first round
            while True:
                # The prompts' own tokens are read once the first rounds are on their way.
                promised = driver.outstanding + (1 if firsts else 0)
                while driver.can_submit and any(r.remaining > promised for r in readers):
                    driver.submit()
                    promised += 1
                if firsts:
                    tokens, count, exit_loops = jax.device_get(firsts.pop(0))
                    if not firsts:
                        tally.prompts_are_done()
                else:
                    done = driver.collect()
                    tally.counters.append(done.counters)
                    tokens, count, exit_loops = done.tokens, done.count, done.exit_loops
                if exit_loops is None:
                    exit_loops = np.full_like(tokens, plan.spec.config.total_ut_steps)
                for reader in readers:
                    if (n := count[reader.index]) and reader.remaining:
                        i = reader.index
                        chunk = reader.take(tokens[i, :n].tolist(), exit_loops[i, :n].tolist())
                        tally.generated += len(chunk.token_ids)
                        if not any(r.remaining for r in readers):
                            yield dataclasses.replace(
                                chunk, stats=tally.stats(driver.outstanding)
                            )
                            return
                        yield chunk


class _Tally:
    """What a stream did so far, for the stats of its last chunk."""

    def __init__(self, plan: Plan, state: DecodeState, compiled: Compilations):
        self.counters = [jax.device_get(no_counters(state))]  # of each round read, after none
        self.generated = 0  # tokens
        self._plan = plan
        self._compiled = compiled
        self._kv_bytes = state.cache.nbytes
        self._store_bytes = 0 if state.store is None else state.store.nbytes
        self._clock = Clock(compiled)
        self._prefill_seconds = 0.0

    def prompts_are_done(self) -> None:
        self._prefill_seconds = self._clock.lap()

    def stats(self, discarded_rounds: int) -> GenerateStats:
        plan, seconds = self._plan, self._clock.lap()
        decoded = self.generated - len(plan.requests)  # first tokens come from the prefill
        return GenerateStats.from_counters(
            sum_counters(self.counters),
            plan.spec,
            discarded_rounds=discarded_rounds,
            prompt_tokens=sum(len(r.prompt) for r in plan.requests),
            generated_tokens=self.generated,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=seconds,
            tokens_per_second=decoded / seconds if decoded and seconds else 0.0,
            compile_seconds=self._compiled.seconds,
            compilations=self._compiled.programs,
            kv_cache_bytes=self._kv_bytes,
            reference_store_bytes=self._store_bytes,
            peak_bytes=peak_bytes(),
            implementations=implementations(plan.spec),
        )


class _Reader:
    """The host's view of one request: what it may still get, and its text so far."""

    def __init__(self, index: int, request: Request, tokenizer):
        self.index = index
        self.remaining = request.max_new_tokens  # 0 once it has finished
        self._stop_ids = request.stop_ids
        self._text = None if tokenizer is None else TextStream(tokenizer)

    def take(self, ids: list[int], exit_loops: list[int]) -> StreamChunk:
        """The chunk of `ids`, which the device emitted: nothing follows a stop token."""
        stopped = ids[-1] in self._stop_ids
        self.remaining = 0 if stopped else self.remaining - len(ids)
        finished = self.remaining == 0
        return StreamChunk(
            index=self.index,
            token_ids=ids,
            text=self._added_text(ids, finished),
            finished=finished,
            finish_reason=("stop" if stopped else "length") if finished else None,
            exit_loops=exit_loops,
        )

    def _added_text(self, ids: list[int], finished: bool) -> str | None:
        if self._text is None:
            return None
        shown = len(self._text.text(final=False))
        added = self._text.add(ids)
        return self._text.text(final=True)[shown:] if finished else added

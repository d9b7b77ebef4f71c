"""Rounds timed from an idle device to an idle device, the host one ahead of its results."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.model import state_at
from sparse_loop_jax.bench.report import Row, note
from sparse_loop_jax.decoding import DecodeSpec, RoundDriver, speculative_step
from sparse_loop_jax.decoding.speculative import RoundHooks
from sparse_loop_jax.decoding.state import RoundCounters
from sparse_loop_jax.generation.compilation import count_compilations
from sparse_loop_jax.generation.memory import peak_bytes
from sparse_loop_jax.models import OuroParams


@dataclasses.dataclass(frozen=True)
class TimedRounds:
    """Seconds of a round, and what its rounds counted."""

    timing: measure.Timing
    counters: list[RoundCounters]
    compile_seconds: float
    programs: int

    def columns(self) -> Row:
        """What every table of rounds ends with."""
        peak = peak_bytes()
        return {
            "spread": self.timing.spread,
            "compile s": self.compile_seconds,
            "programs": self.programs,
            "peak GB": None if peak is None else peak / 1e9,
        }


def accept_all(accepted: jax.Array, rows: jax.Array) -> jax.Array:
    """A judgement that finds every draft right: the most that speculation can give."""
    del accepted
    return jnp.maximum(rows - 1, 0)


def time_rounds(
    params: OuroParams,
    spec: DecodeSpec,
    batch: int,
    context: int,
    dtype: str,
    retention: float,
    *,
    rounds: int,
    repeats: int,
    accept_everything: bool = False,
) -> TimedRounds:
    """Times `rounds` rounds that begin at `context` tokens, `repeats` times.

    Random K/V in permuted pages. With `accept_everything` every drafted token stands.
    """
    kind = "decode"
    if spec.speculative is not None:
        kind = f"speculative, {spec.speculative.draft_loops} draft loops"
    note(f"{kind}: {batch}x{context}, retention {retention:g}")
    state = state_at(
        spec,
        batch,
        context,
        jnp.dtype(dtype),
        new_tokens=rounds * spec.rows,
        outstanding_rounds=2,
        retention=retention,
    )
    start = jax.device_get((state.position, state.remaining))
    step = None
    if accept_everything:
        step = functools.partial(speculative_step, hooks=RoundHooks(accepted=accept_all))
    counters = []

    def run():
        # Every repeat begins at the same context.
        nonlocal state
        position, remaining = map(jnp.asarray, start)
        state = dataclasses.replace(state, position=position, remaining=remaining)
        with RoundDriver(params, state, step=step) as driver:
            for _ in range(rounds):
                driver.submit()
                if not driver.can_submit:
                    counters.append(driver.collect().counters)
            counters.append(driver.collect().counters)
            state = driver.drain()
        return state.token

    with count_compilations() as compiled:
        timing = measure.time_calls(run, repeats=repeats, inner=rounds)
    return TimedRounds(timing, counters, compiled.seconds, compiled.programs)


def check_sparse(spec: DecodeSpec, batch: int, counters: list[RoundCounters]) -> None:
    """A sparse run that ran dense is no result.

    Raises:
      RuntimeError: a round did not capture and consume every row in every layer.
    """
    if spec.sparse is None:
        return
    modes = spec.sparse.modes(spec.config.total_ut_steps)
    rows = batch * spec.rows * spec.config.num_hidden_layers
    want = tuple(rows * sum(kind in mode for mode in modes) for kind in ("capture", "consume"))
    for counted in counters:
        assert counted.sparse is not None
        got = (int(counted.sparse.captured), int(counted.sparse.consumed))
        if got != want:
            raise RuntimeError(f"a round should capture and consume {want} rows, and did {got}")

"""Trains the small model within a budget of minutes, in one command or several.

    python -m examples.train_tiny.train --corpus out/corpus --out out/run --minutes 13 \\
        --command-minutes 9
    python -m examples.train_tiny.train ... --resume      # until it says that it is done

Everything is written below --out: `log.jsonl`, `settings.json`, and the newest checkpoint.
`export` makes a model of it, `recipe` runs this twice for the bundled model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sparse_loop_jax.models import OuroConfig

from . import corpus as corpora
from .batches import Mixture, make_batch
from .network import initial_params
from .objective import Batch, Objective, loss_and_metrics
from .options import add_options, config_of, schedule_of, settings_of
from .schedule import Schedule
from .scoring import quick_look, rounded_list
from .state import (
    Optimizer,
    TrainState,
    has_checkpoint,
    make_optimizer,
    optimizer_of,
    restore,
    restore_weights,
    save,
)


@functools.partial(
    jax.jit,
    static_argnames=("config", "objective", "rule"),
    donate_argnames=("params", "optimizer"),
)
def train_step(
    params, optimizer, batch: Batch, rate, *, config: OuroConfig, objective, rule: Optimizer
):
    """One update: new weights, new optimiser state, and metrics, loss and norm among them."""
    compute = jax.value_and_grad(loss_and_metrics, has_aux=True)
    (loss, metrics), gradient = compute(params, config, objective, batch)
    transform = make_optimizer(params, rule)
    updates, optimizer = transform.update(gradient, optimizer, params)
    params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)]
    return params, optimizer, metrics | {"loss": loss, "gradient_norm": jnp.sqrt(sum(squares))}


class Log:
    """JSON lines in a file, and short ones on standard output."""

    def __init__(self, path: Path):
        self._path = path

    def __call__(self, kind: str, **facts: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **facts}) + "\n")
        print(kind, *(f"{name}={value}" for name, value in facts.items()), flush=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same throughout a run."""

    config: OuroConfig
    objective: Objective
    mixture: Mixture
    schedule: Schedule
    corpus: corpora.Corpus
    rule: Optimizer
    seed: int
    every: int  # steps between lines of the log

    def batch(self, step: int, progress: float) -> Batch:
        """The batch of a step, as numpy arrays."""
        stage = self.schedule.stage(progress)
        return make_batch(
            self.corpus.train,
            self.corpus.lexicon,
            self.mixture,
            seed=self.seed,
            step=step,
            rows=stage.rows,
            length=stage.length,
            synthetic=stage.synthetic,
            loops=self.config.total_ut_steps,
            hops=self.schedule.hops(progress),
        )


def advance(
    run: Run,
    state: TrainState,
    log: Log,
    compiled: set[tuple[int, ...]],
    *,
    stop: Callable[[int], bool],
) -> TrainState:
    """Trains until the schedule ends or `stop(step)` says so.

    Batches are made one step ahead, in a thread. The clock of the schedule runs while steps
    run, not while a new shape compiles.

    Args:
      compiled: shapes of batches whose program exists; added to.
    """
    params, optimizer, step, seconds = state.params, state.optimizer, state.step, state.seconds
    trained = state.tokens
    pool = ThreadPoolExecutor(1)

    def submit(at: int):
        # In minutes, what is known now; a resumed run may draw the line elsewhere.
        progress = run.schedule.progress(at, seconds)
        return pool.submit(run.batch, at, progress)

    ahead, tokens, since = submit(step), 0, time.perf_counter()
    metrics: dict[str, jax.Array] = {}
    while not run.schedule.done(step, seconds) and not stop(step):
        batch, progress = ahead.result(), run.schedule.progress(step, seconds)
        ahead = submit(step + 1)
        start, length = time.perf_counter(), batch.ids.shape[1]
        trained += batch.ids.size
        rate = run.schedule.rate(step, progress)
        params, optimizer, metrics = train_step(
            params,
            optimizer,
            jax.tree.map(jnp.asarray, batch),
            jnp.float32(rate),
            config=run.config,
            objective=run.objective,
            rule=run.rule,
        )
        loss = float(metrics["loss"])  # waits for the step
        spent = time.perf_counter() - start
        step += 1
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} after step {step}: start again with a lower --peak"
            )
        if batch.ids.shape in compiled:
            seconds += spent
            tokens += batch.ids.size
        else:
            compiled.add(batch.ids.shape)
            log("compiled", length=length, rows=len(batch.ids), seconds=round(spent, 1))
            since = time.perf_counter()
        if step % run.every == 0:
            elapsed = time.perf_counter() - since
            log(
                "step",
                step=step,
                progress=round(run.schedule.progress(step, seconds), 4),
                seconds=round(seconds, 1),
                length=length,
                rate=round(rate, 6),
                loss=round(loss, 4),
                gradient_norm=round(float(metrics["gradient_norm"]), 3),
                cross_entropy=rounded_list(metrics["cross_entropy"], 4),
                exits=rounded_list(metrics["exits"], 3),
                tokens_per_second=round(tokens / max(elapsed, 1e-9)),
            )
            tokens, since = 0, time.perf_counter()
    pool.shutdown(cancel_futures=True)
    return TrainState(params, optimizer, step, seconds, trained)


def look(run: Run, state: TrainState, log: Log) -> None:
    """Writes held-out numbers to the log, at the length of the rows now trained on."""
    stage = run.schedule.stage(run.schedule.progress(state.step, state.seconds))
    found = quick_look(
        state.params,
        run.config,
        run.objective,
        run.corpus,
        length=stage.length,
        rows=min(16, stage.rows),
    )
    log("held_out", step=state.step, length=stage.length, **found)


def start_or_resume(args, settings: dict, config: OuroConfig) -> TrainState:
    """The state to go on from.

    Raises:
      ValueError: a new run meets an old one's folder, or a resumed one does not fit it.
    """
    folder = args.out / "checkpoints"
    if args.resume:
        return restore(folder, config, settings)
    if has_checkpoint(folder):
        raise ValueError(f"{args.out} has a run in it: resume it (--resume) or name another")
    params: Any
    if args.weights_of:
        params = restore_weights(args.weights_of / "checkpoints", config, settings)
    else:
        params = initial_params(config, jax.random.key(args.seed))
    transform = make_optimizer(params, optimizer_of(settings))
    return TrainState(params, transform.init(params), 0, 0.0, 0)


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs one command's share of the training; True when the run is done."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(prog="train", description="Trains the small model")
    add_options(parser)
    args = parser.parse_args(argv)
    corpus = corpora.read(args.corpus)
    settings = settings_of(args, corpus)
    config = config_of(settings)
    objective = Objective(**settings["objective"])
    schedule = schedule_of(settings)
    state = start_or_resume(args, settings, config)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "settings.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    log = Log(args.out / "log.jsonl")
    device = jax.devices()[0].device_kind
    log("start", step=state.step, device=device, parameters=config.num_parameters)
    run = Run(
        config,
        objective,
        Mixture(**settings["mixture"]),
        schedule,
        corpus,
        optimizer_of(settings),
        args.seed,
        args.log_every,
    )

    def out_of_time() -> bool:
        minutes = (time.perf_counter() - began) / 60
        return args.command_minutes is not None and minutes >= args.command_minutes

    compiled: set[tuple[int, ...]] = set()
    while True:
        pause = state.step + args.save_every
        state = advance(
            run, state, log, compiled, stop=lambda step, p=pause: step >= p or out_of_time()
        )
        save(state, args.out / "checkpoints", settings)
        done = schedule.done(state.step, state.seconds)
        if done or not out_of_time():
            look(run, state, log)
        if done or out_of_time():
            break
    if done:
        log("done", step=state.step, seconds=round(state.seconds, 1), tokens=state.tokens)
    else:
        log("paused", step=state.step, progress=schedule.progress(state.step, state.seconds))
    return done


if __name__ == "__main__":
    main()

"""The two runs that make the bundled model, in one command.

    python -m examples.train_tiny.recipe --corpus out/corpus --out out

The first run lasts until chains of pointers are followed: Muon, short rows. The second goes on
from its weights with AdamW, long rows and more text. They are in `first-SEED` and `run` below
--out. Given again, the command goes on where it was stopped; a run that is done is not made
again. Options that are not the recipe's own go to both runs, as `train` has them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from . import train
from .corpus import read
from .options import add_options, settings_of
from .record import lines_of, read_log, read_record
from .state import differences, has_checkpoint

FIRST = "--minutes 13 --until 0.33 --no-remat --save-every 1000"  # the rest as `train` has it

SECOND = """
    --minutes 6.6 --no-remat --save-every 800
    --optimizer adamw --weight-decay 0.6 --table-decay 0.6 --peak 3e-3 --entropy 0.3
    --hops-from 0 --hops-by 0.001
    --stages 0.6:2048:131072:0.55,1:8192:131072:0.55
"""

# It is chance when a run begins to follow pointers, if it does.
SEEDS = (1, 2, 3)
OWN = ("--seed", "--resume", "--weights-of")  # options of `train` that the recipe decides
LEARNT = 0.5  # part of the questions of one pointer that the last loop has to answer


def is_done(run: Path) -> bool:
    """Whether a run's log says so."""
    return bool(lines_of(read_log(run), "done"))


def follows_pointers(run: Path) -> bool:
    """Whether the last loop answered questions of one pointer when a run last looked."""
    return lines_of(read_log(run), "held_out")[-1]["hops 1"][-1] >= LEARNT


def check_settings(run: Path, options: Sequence[str]) -> None:
    """Fails unless the run in a folder is that of `train` with `options`.

    Raises:
      ValueError: it is another.
    """
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args(options)
    changed = differences(read_record(run).settings, settings_of(args, read(args.corpus)))
    if changed:
        raise ValueError(
            f"{run} has a run with other settings (then, now): {changed}; move it away, or "
            "name another --out"
        )


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs one command's share of the recipe; True when both runs are done.

    Raises:
      RuntimeError: no seed learnt to follow pointers.
      ValueError: an option that the recipe decides, or a folder with a run of other options.
    """
    began = time.perf_counter()
    parser = argparse.ArgumentParser(
        prog="recipe",
        description="Trains the bundled model in two runs; other options go to `train`",
        allow_abbrev=False,
    )
    parser.add_argument("--corpus", type=Path, default=Path("out/corpus"))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--command-minutes", type=float, help="wall clock of this command")
    args, more = parser.parse_known_args(argv)
    for option in more:
        if option.split("=")[0] in OWN:
            raise ValueError(f"{option}: the recipe decides it; leave it out, or use `train`")

    def carry_on(run: Path, options: Sequence[str]) -> bool:
        """Begins a run or goes on with it; True when it is done."""
        own = ["--corpus", str(args.corpus), "--out", str(run)]
        there = has_checkpoint(run / "checkpoints")
        if there and is_done(run):
            check_settings(run, [*options, *own])
            return True
        if args.command_minutes is not None:
            left = args.command_minutes - (time.perf_counter() - began) / 60
            if left <= 0:
                return False
            own += ["--command-minutes", str(left)]
        if there:
            own.append("--resume")
        print("train", *options, *own, flush=True)
        return train.main([*options, *own])

    for seed in SEEDS:
        # After `more`, since the folder's name is the seed.
        options, first = [*more, "--seed", str(seed)], args.out / f"first-{seed}"
        done = carry_on(first, [*FIRST.split(), *options])
        if done and not follows_pointers(first):
            print(f"{first} has not learnt to follow pointers: on to the next seed", flush=True)
            continue
        second = [*SECOND.split(), *options, "--weights-of", str(first)]
        done = done and carry_on(args.out / "run", second)
        print(f"done: {first}, then {args.out / 'run'}" if done else "paused: run this again")
        return done
    logs = ", ".join(str(args.out / f"first-{seed}" / "log.jsonl") for seed in SEEDS)
    raise RuntimeError(
        f"no seed of {SEEDS} learnt to follow pointers: see 'hops 1' in {logs}; a higher "
        "--until in recipe.FIRST gives it longer"
    )


if __name__ == "__main__":
    main()

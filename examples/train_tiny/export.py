"""Writes a run's newest weights as a Hugging Face checkpoint with its task files.

python -m examples.train_tiny.export --run out/run --corpus out/corpus --out out/tiny-ouro
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from importlib.resources import as_file
from pathlib import Path

import jax

from sparse_loop_jax.checkpoint import save_huggingface
from sparse_loop_jax.data import tiny_ouro
from sparse_loop_jax.models import Ouro

from . import corpus as corpora
from .corpus import Corpus
from .options import config_of
from .questions import draw_hops, draw_recall, write_questions
from .record import read_record
from .state import restore

LIMIT = 13 * 2**20  # bytes of bfloat16 weights: what a wheel can carry
SEED = 2**31 + 2  # of the task files' questions


def export(
    model: Ouro, corpus: Corpus, out: Path, *, lengths: Sequence[int], count: int
) -> Ouro:
    """Writes weights in bfloat16, tokenizer, configuration and task files.

    Args:
      model: with a tokenizer.
      lengths: tokens of the questions of the task files.
      count: recall questions of each length, and an eighth as many of each number of steps.

    Returns:
      The model as written, in bfloat16.

    Raises:
      ValueError: the weights are larger than `LIMIT`, or `out` has contents.
    """
    size = 2 * model.config.num_parameters
    if size > LIMIT:
        raise ValueError(
            f"{size / 2**20:.1f} MiB of weights are more than {LIMIT / 2**20:g}: make the "
            "model smaller"
        )
    rounded = Ouro(
        model.config, params=jax.tree.map(lambda x: x.astype("bfloat16"), model.params)
    )
    rounded.tokenizer = model.tokenizer
    save_huggingface(rounded, out)
    recall = [q for n in lengths for q in draw_recall(corpus, n, count, seed=SEED)]
    write_questions(recall, out / "recall.jsonl")
    each = max(1, count // 8)
    hops = [q for n in lengths for q in draw_hops(corpus, n, each, seed=SEED)]
    write_questions(hops, out / "hops.jsonl")
    return rounded


def trained(run: Path, corpus: Corpus) -> Ouro:
    """The model of a run's newest checkpoint, float32; of a run that is not done as well.

    Raises:
      ValueError: there is no run, or it has no checkpoint.
    """
    settings = read_record(run).settings
    config = config_of(settings)
    model = Ouro(config, params=restore(run / "checkpoints", config, settings).params)
    model.tokenizer = corpus.lexicon.tokenizer
    return model


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="export", description="Writes a checkpoint")
    parser.add_argument("--run", type=Path, default=Path("out/run"))
    parser.add_argument("--corpus", type=Path, default=Path("out/corpus"))
    parser.add_argument("--out", type=Path, default=Path("out/tiny-ouro"))
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--count", type=int, default=16)
    args = parser.parse_args(argv)
    corpus = corpora.read(args.corpus)
    export(
        trained(args.run, corpus),
        corpus,
        args.out,
        lengths=[int(n) for n in args.lengths.split(",")],
        count=args.count,
    )
    # The same text as ever, so that models are compared on what none of them has seen.
    with as_file(tiny_ouro() / "heldout.txt") as text:
        shutil.copyfile(text, args.out / "heldout.txt")
    print(f"{args.out}: {sum(f.stat().st_size for f in args.out.iterdir()) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()

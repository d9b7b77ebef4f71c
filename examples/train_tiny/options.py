"""Options of a training run, and the settings that a checkpoint remembers."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from pathlib import Path

from sparse_loop_jax.models import OuroConfig

from .batches import Mixture
from .corpus import Corpus
from .lexicon import END
from .network import default_attention
from .objective import Objective
from .schedule import STAGES, Schedule, Stage, parse_stages
from .state import RULES, Optimizer


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `train`."""
    files = parser.add_argument_group("files")
    files.add_argument("--corpus", type=Path, default=Path("out/corpus"))
    files.add_argument("--out", type=Path, default=Path("out/run"))
    files.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    files.add_argument(
        "--weights-of", type=Path, metavar="RUN",
        help="begin with the weights of another run, as they are now, not with random ones",
    )  # fmt: skip
    budget = parser.add_argument_group("budget").add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="of training steps, over all commands")
    budget.add_argument("--steps", type=int)
    time = parser.add_argument_group("time")
    time.add_argument(
        "--until", type=float, default=1.0, metavar="P",
        help="part of the budget after which the run is done; rate and stages stay those of "
        "the whole budget",
    )  # fmt: skip
    time.add_argument("--command-minutes", type=float, help="wall clock of this command")
    time.add_argument("--save-every", type=int, default=400, help="steps between checkpoints")
    time.add_argument("--log-every", type=int, default=20)
    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=int, default=256)
    model.add_argument("--intermediate", type=int, default=704)
    model.add_argument("--layers", type=int, default=5)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--loops", type=int, default=4)
    model.add_argument("--rope-theta", type=float, default=100_000.0)
    run = parser.add_argument_group("training")
    run.add_argument(
        "--stages", default=STAGES,
        help="UNTIL:LENGTH[:TOKENS[:SYNTHETIC]],...: up to which progress, tokens of a row, "
        "tokens of a step, share of rows with a task",
    )  # fmt: skip
    run.add_argument("--batch-tokens", type=int, default=131_072, help="where a stage has none")
    run.add_argument("--peak", type=float, default=3e-3)
    run.add_argument("--warmup", type=int, default=100)
    run.add_argument("--hops-from", type=float, default=0.06)
    run.add_argument("--hops-by", type=float, default=0.17)
    run.add_argument("--entropy", type=float, default=0.1)
    run.add_argument("--synthetic", type=float, default=0.5, help="where a stage has none")
    run.add_argument("--paper-weight", type=float, default=0.1)
    run.add_argument("--optimizer", choices=RULES, default=Optimizer.rule)
    run.add_argument("--weight-decay", type=float, default=Optimizer.decay, help="of matrices")
    run.add_argument(
        "--table-decay", type=float, default=Optimizer.table_decay,
        help="of the embedding and the head",
    )  # fmt: skip
    run.add_argument(
        "--hop-targets", choices=["staged", "final"], default="staged",
        help="what shallow loops are asked in several-hop questions: one step a loop, or what "
        "the last is asked",
    )  # fmt: skip
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    run.add_argument("--attention", choices=["cudnn", "chunked"], default=None)
    run.add_argument("--no-remat", action="store_true", help="faster, if memory allows it")
    run.add_argument("--rows", type=int, default=8192, help="positions of logits at a time")


def settings_of(args: argparse.Namespace, corpus: Corpus) -> dict:
    """What decides the result, as JSON; a run resumes under the same settings only.

    Raises:
      ValueError: values that do not fit each other.
    """
    if args.hidden % args.heads:
        raise ValueError(f"--hidden {args.hidden} is no multiple of --heads {args.heads}")
    if args.attention == "cudnn" and args.dtype == "float32":
        raise ValueError("--attention cudnn has no float32: use --attention chunked")
    if args.weights_of and args.weights_of.resolve() == args.out.resolve():
        raise ValueError(f"--weights-of and --out are both {args.out}: name another --out")
    stages = parse_stages(args.stages, tokens=args.batch_tokens, synthetic=args.synthetic)
    schedule = Schedule(
        steps=args.steps,
        minutes=args.minutes,
        stages=stages,
        peak=args.peak,
        warmup=args.warmup,
        hops_from=args.hops_from,
        hops_by=args.hops_by,
        until=args.until,
    )
    objective = Objective(
        entropy=args.entropy,
        dtype=args.dtype,
        attention=args.attention or default_attention(args.dtype),
        remat=not args.no_remat,
        rows=args.rows,
    )
    per_loop = 1 if args.hop_targets == "staged" else None
    model = {
        "vocab_size": corpus.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.heads,
        "head_dim": args.hidden // args.heads,
        "max_position_embeddings": max(stage.length for stage in stages),
        "rope_theta": args.rope_theta,
        "total_ut_steps": args.loops,
    }
    mixture = Mixture(per_loop=per_loop, paper_weight=args.paper_weight)
    return {
        "model": model,
        "objective": dataclasses.asdict(objective),
        "schedule": dataclasses.asdict(schedule)
        | {"stages": [dataclasses.asdict(stage) for stage in stages]},
        "mixture": dataclasses.asdict(mixture),
        "optimizer": dataclasses.asdict(
            Optimizer(args.optimizer, args.weight_decay, args.table_decay)
        ),
        "seed": args.seed,
        "tokenizer": hashlib.sha256(corpus.lexicon.tokenizer.to_str().encode()).hexdigest(),
        "weights_of": str(args.weights_of) if args.weights_of else None,
    }


def config_of(settings: dict) -> OuroConfig:
    """The model of a run's settings."""
    return OuroConfig(**settings["model"], eos_token_ids=(END,))


def schedule_of(settings: dict) -> Schedule:
    """The schedule of a run's settings."""
    plan = dict(settings["schedule"])
    plan["stages"] = tuple(Stage(**stage) for stage in plan["stages"])
    return Schedule(**plan)

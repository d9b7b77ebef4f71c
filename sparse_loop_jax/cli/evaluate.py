"""`sparse-loop evaluate`: what each retention costs."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from sparse_loop_jax.cli.notes import note_slow_dtype

HELP = "measure what sparse decoding and drafts cost in quality, at several retentions"

_RETENTIONS = "1,0.5,0.25,0.1,0.05,0.02"
_BUNDLED_TOKENS = 1024  # so that a CPU is done in minutes
# Columns of the tables on the terminal; the JSON file has them all.
_TEXT = (
    "retention", "tokens", "keys read", "perplexity", "nll change", "standard error", "KL",
    "agreement", "margin", "mass", "mass min",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="checkpoint directory or Hub id; default: bundled")
    parser.add_argument("--revision", help="commit of a Hub id, 40 hexadecimal digits")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--retentions", default=_RETENTIONS, help=f"default: {_RETENTIONS}")
    parser.add_argument("--implementation", help='of the ops: "xla" or "pallas"')
    parser.add_argument("--batch", type=int, default=32, help="sequences at once")
    text = parser.add_argument_group(
        "text", "without --text and --tasks, those that come with the bundled model are used"
    )
    text.add_argument("--text", metavar="FILE", help="UTF-8 text to predict")
    text.add_argument("--windows", type=int, default=16, metavar="N", help="of the text")
    text.add_argument("--window", type=int, default=512, metavar="TOKENS")
    text.add_argument("--prefix", type=int, default=128, metavar="TOKENS", help="prefilled")
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--tasks", metavar="FILE", help='lines {"prompt": ..., "answer": ...}')
    tasks.add_argument(
        "--question-tokens", type=int, metavar="N",
        help="leave out longer prompts; default: none, of the bundled tasks those over "
        f"{_BUNDLED_TOKENS}",
    )  # fmt: skip
    tasks.add_argument("--questions", type=int, metavar="N", help="evenly spaced; default: all")
    free = parser.add_argument_group("continuations of prompts out of the text")
    free.add_argument("--prompts", type=int, default=8, metavar="N", help="0: none")
    free.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    free.add_argument("--new-tokens", type=int, default=64, metavar="N")
    free.add_argument("--acceptance", action="store_true", help="of drafts, by draft loops")
    free.add_argument("--speculative-tokens", type=int, default=3, metavar="K")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="write all tables here")
    out.add_argument("--plot", metavar="FILE.png", help="draw quality against retention here")


def run(args: argparse.Namespace) -> int:
    retentions = parse_retentions(args.retentions)
    check_directory("json", args.json)
    check_directory("plot", args.plot)
    for option in ("questions", "question_tokens"):
        value = getattr(args, option)
        if value is not None and value < 1:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} must be at least 1, got {value}")
    text, tasks, names = _read_inputs(args)

    import sparse_loop_jax as slj
    from sparse_loop_jax.bench.report import note
    from sparse_loop_jax.evaluate import evaluate, read_questions
    from sparse_loop_jax.evaluate.inputs import evenly, within

    if args.plot is not None:
        from sparse_loop_jax.evaluate.drawing import check_picture

        check_picture(args.plot)
    questions = None if tasks is None else read_questions(tasks, names["tasks"])
    limit = args.question_tokens
    if limit is None and args.text is None and args.tasks is None:
        limit = _BUNDLED_TOKENS
    model = slj.load(args.model, dtype=args.dtype, revision=args.revision)
    if questions is not None:
        questions = evenly(within(model, questions, limit), args.questions)
    note_slow_dtype(model, args.dtype)
    result = evaluate(
        model,
        retentions=retentions,
        text=text,
        questions=questions,
        prompts=args.prompts if text is not None else 0,
        acceptance=args.acceptance,
        window=args.window,
        prefix=args.prefix,
        windows=args.windows,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        speculative_tokens=args.speculative_tokens,
        batch=args.batch,
        implementation=args.implementation,
        progress=True if sys.stderr.isatty() else note,
    )
    if questions is not None and limit is not None:
        result.setup["question tokens"] = limit
    result.setup.update({"model": args.model or "bundled", **names})
    _print(result)
    if args.json is not None:
        result.write_json(args.json)
    if args.plot is not None:
        from sparse_loop_jax.evaluate.plots import plot_quality

        plot_quality(result, args.plot)
    return 0


def check_directory(option: str, path: str | None) -> None:
    """Raises ValueError if a file that is to be written has no directory to be in."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--{option} {path}: no such directory")


def parse_retentions(text: str) -> list[float]:
    """ "1,0.5" to [1.0, 0.5]; ranges are `evaluate`'s to check.

    Raises:
      ValueError: a part is no number.
    """
    values = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*\d*\.?\d+(e-?\d+)?\s*", part):
            raise ValueError(f"--retentions are numbers like 1,0.5,0.1, got {part!r}")
        values.append(float(part))
    return values


def _read_inputs(args: argparse.Namespace) -> tuple[str | None, str | None, dict[str, str]]:
    """The text, the task lines, and their names."""
    sources = {"text": args.text, "tasks": args.tasks}
    if args.text is None and args.tasks is None:
        from sparse_loop_jax.data import tiny_ouro

        files = {"text": tiny_ouro() / "heldout.txt", "tasks": tiny_ouro() / "hops.jsonl"}
    else:
        files = {key: Path(path) for key, path in sources.items() if path is not None}
    contents: dict[str, str] = {}
    for key, file in files.items():
        try:
            contents[key] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: is no UTF-8 text: {error}") from None
    names = {key: file.name for key, file in files.items()}
    return contents.get("text"), contents.get("tasks"), names


def _print(result) -> None:
    from sparse_loop_jax.bench.report import print_table

    titles = {
        "text": "text, predicted token by token",
        "answers": "answers, greedy",
        "divergence": "continuations against dense ones",
        "acceptance": "drafted tokens that stood",
    }
    for name, title in titles.items():
        rows = result.tables.get(name)
        if rows is None:
            continue
        if name == "text":
            rows = [{key: row.get(key) for key in _TEXT} for row in rows]
        print_table(title, rows, {})
    print("\n  " + ", ".join(f"{key} {value}" for key, value in result.setup.items()))

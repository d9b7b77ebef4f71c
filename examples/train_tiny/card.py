"""The model card: what was trained on what, and what it can do, beside its predecessor.

    python -m examples.train_tiny.card --new out/new.json --old out/old.json \\
        --run out/first-1 out/run --corpus out/corpus --out out/tiny-ouro/README.md
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from .history import training
from .record import Record, read_record
from .tables import comparison, table

WIDTH = 96
GOOD = 0.9  # part of the questions answered from which on a kind of them counts as learnt

HEAD = """---
license: apache-2.0
language: en
library_name: sparse-loop-jax
pipeline_tag: text-generation
---
# tiny-ouro

A looped Transformer of the Ouro architecture with {millions:.1f} million parameters, trained
from scratch for this project by `examples/train_tiny`, so that every example, test and
benchmark has a real model that fits in a wheel. It writes English that looks like its
sources and means little. It is no assistant, knows no facts, and was not filtered or aligned in
any way.
"""

FILES = """
## Files

- `config.json`, `model.safetensors`, `tokenizer.json`: the checkpoint.
- `heldout.txt`: text of Austen, addresses and Bible that training did not see; no paragraph
  that shares 13 words in a row with it was trained on.
- `recall.jsonl`, `hops.jsonl`: questions for a code among records, and questions that follow 1
  to 8 pointers, up to {context} tokens (`prompt`, `answer`, `tokens`, `hops`, `filler`).
"""


def longest(rows: Mapping[str, Sequence[float]], loop: int) -> int:
    """The largest key up to which a loop answers nearly all questions, 0 if there is none."""
    best = 0
    for key in sorted(rows, key=int):
        if rows[key][loop] < GOOD:
            break
        best = int(key)
    return best


def abilities(measured: dict) -> str:
    """A paragraph on what a model is good for, by what `evaluate` measured."""
    loss = measured["text"]["cross_entropy"]
    chains = [longest(measured["hops_by_steps"], loop) for loop in range(len(loss))]
    recalled = longest(measured["recall_by_length"], -1)
    said = "It does not reliably find a code among records"
    if recalled:
        said = (
            "What it can do is look things up in what it reads. It finds a code among records "
            f"in up to {recalled} tokens"
        )
    if not chains[-1]:
        said += ", and does not follow pointers from record to record."
    else:
        count = f"1 to {chains[-1]} pointers" if chains[-1] > 1 else "1 pointer"
        said += f", and follows {count} from record to record."
        if len(chains) > 1 and max(chains[:-1]) < chains[-1]:
            earlier = ", ".join(
                f"{'none' if not n else f'1 to {n}' if n > 1 else '1'} after loop {loop}"
                for loop, n in enumerate(chains[:-1], start=1)
            )
            said += (
                f" It needs all {len(chains)} loops for that: it follows {earlier} (loops are "
                "counted from 1 here, and from 0 in the library). What "
                "leaves its later loops out, or spoils them, therefore shows in long chains."
            )
    settled = next(loop for loop, nats in enumerate(loss, start=1) if nats <= 1.01 * loss[-1])
    if settled < len(loss):
        said += f" In plain text loop {settled} is within 1 % of the last or better."
    return textwrap.fill(said, WIDTH)


def how_asked(models: Mapping[str, dict]) -> str:
    """What the comparison's numbers are of."""
    first, *others = models.values()
    text = (
        f"{first['questions']} questions of each kind, length and number of pointers; an "
        "answer is right if every token of it is the likeliest one. An answer to a chain of "
        "more than 4 pointers names the fourth node as well as the last, so that no token "
        "stands for more than 4 steps. Nats per byte can be compared between tokenizers, nats "
        "per token cannot."
    )
    if any(other["context"] != first["context"] for other in others):
        contexts = ", ".join(f"{name} {model['context']}" for name, model in models.items())
        text += (
            f" The contexts differ ({contexts} tokens), and a model is asked only the "
            "questions that fit its own: a dash is a length that does not, and the rows by "
            "number of pointers are over fewer and shorter questions where the context is "
            "shorter. Lengths are in this model's tokens; another tokenizer may need more for "
            "the same text."
        )
    return textwrap.fill(text, WIDTH) + "\n"


def card(models: Mapping[str, dict], records: Sequence[Record], manifest: dict) -> str:
    """The whole README.

    Args:
      models: name -> what `evaluate` measured; the first is the one described.
      records: of the runs that made it, in order.

    Raises:
      ValueError: the last run is not done, or the runs do not follow on each other.
    """
    history = training(records, manifest)
    model = records[-1].settings["model"]
    shape = (
        f"{model['num_hidden_layers']} layers run {model['total_ut_steps']} times, hidden "
        f"{model['hidden_size']}, {model['num_attention_heads']} heads of {model['head_dim']}, "
        f"MLP {model['intermediate_size']}, rope theta {model['rope_theta']:,.0f}, untied head"
    )
    context = model["max_position_embeddings"]
    about = [
        ("Architecture", shape),
        ("Context", f"{context} tokens"),
        ("Tokenizer", f"byte-level BPE of {model['vocab_size']} tokens; every digit is a token "
         "of its own; id 0 ends a text"),
        ("Weights", "bfloat16, official tensor names and configuration keys"),
    ]  # fmt: skip
    first = next(iter(models.values()))
    return "\n".join(
        [
            HEAD.format(millions=first["parameters"] / 1e6),
            abilities(first) + "\n",
            table(about),
            "## Training\n",
            history,
            "## What it can do\n",
            how_asked(models),
            comparison(models),
        ]
    ) + FILES.format(context=context)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="card", description="Writes the model card")
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--old", type=Path)
    parser.add_argument(
        "--run", type=Path, nargs="+", default=[Path("out/run")],
        help="the runs that led to the model, in order",
    )  # fmt: skip
    parser.add_argument("--corpus", type=Path, default=Path("out/corpus"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    models = {"this model": json.loads(args.new.read_text("utf-8"))}
    if args.old:
        models["its predecessor"] = json.loads(args.old.read_text("utf-8"))
    manifest = json.loads((args.corpus / "manifest.json").read_text("utf-8"))
    text = card(models, [read_record(run) for run in args.run], manifest)
    args.out.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

"""The model card: what was trained on what, and what it can do, beside its predecessor.

    python -m examples.train_tiny.card --new out/new.json --old out/old.json \\
        --run out/run --corpus out/corpus --out out/tiny-ouro/README.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Markdown of two columns without a heading."""
    return "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]) + "\n"


def numbers(values: Sequence[float] | None, digits: int = 3) -> str:
    """Numbers of loop 1, 2, ..., or a dash where nothing was measured."""
    return ", ".join(f"{value:.{digits}f}" for value in values) if values else "-"


def comparison(models: Mapping[str, dict]) -> str:
    """One column a model, one row a measurement; cells hold one number a loop."""
    names = list(models)
    lines = [
        "| after loop 1, 2, ... | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]

    def row(label: str, pick) -> None:
        cells = [numbers(pick(models[name])) for name in names]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    row("held-out cross-entropy, nats per token", lambda m: m["text"]["cross_entropy"])
    row("held-out cross-entropy, nats per byte", lambda m: m["text"]["nats_per_byte"])
    row(
        "greedy tokens equal to the last loop's, held-out text",
        lambda m: m["text"]["agreement"],
    )
    row("the same, on text of its own", lambda m: m["own_text"])
    tables = (
        ("recall_by_length", "recall of a code in {} tokens"),
        ("hops_by_steps", "{} pointers followed"),
        ("hops_by_length", "1 to 8 pointers in {} tokens"),
    )
    for name, label in tables:
        keys = sorted({key for model in models.values() for key in model[name]}, key=int)
        for key in keys:
            row(label.format(key), lambda m, n=name, k=key: m[n].get(k))
    return "\n".join(lines) + "\n"


def training(settings: dict, log: Sequence[dict], manifest: dict) -> str:
    """What the run was, from its own files."""
    done = [line for line in log if line["kind"] == "done"]
    if not done:
        raise ValueError("the run is not done: resume it until its log says so")
    device = next(line["device"] for line in log if line["kind"] == "start")
    schedule, mixture = settings["schedule"], settings["mixture"]
    sources = "; ".join(
        f"{e['name']} ({e['train_tokens']:,} tokens, {e.get('licence', 'local text')})"
        for e in manifest["sources"]
    )
    steps, seconds, tokens = (done[-1][name] for name in ("step", "seconds", "tokens"))
    staged = mixture["per_loop"]
    rule = {"adamw": "AdamW", "muon": "Muon and AdamW"}[settings["optimizer"]["rule"]]
    objective = (
        "Ouro's: the cross-entropy expected over the exit distribution of the gate, minus "
        f"{settings['objective']['entropy']:g} of that distribution's entropy"
    )
    if staged:
        objective += (
            "; in several-hop questions a loop is asked for the node that is "
            f"{'a step' if staged == 1 else f'{staged} steps'} further on than the loop before"
            " it, the last loop for what the answer names next"
        )
    stages = "; ".join(
        f"up to {stage['until']:.0%} {stage['length']} tokens, {stage['tokens']:,} a step, "
        f"{stage['synthetic']:.0%} of the rows with a task"
        for stage in schedule["stages"]
    )
    return table(
        [
            ("Text", sources),
            ("Tasks", "recall, several hops, copying, stories"),
            ("Objective", objective),
            ("Rows", stages),
            ("Run", f"{steps:,} steps, {tokens / 1e6:.0f} million tokens, {rule}, peak rate "
             f"{schedule['peak']:g}, {seconds / 60:.1f} minutes of training steps on {device}"),
        ]
    )  # fmt: skip


def progress(log: Sequence[dict]) -> str:
    """The held-out numbers of the log, thinned to at most 12 rows."""
    looks = [line for line in log if line["kind"] == "held_out"]
    keep = looks[:: max(1, -(-len(looks) // 12))]
    if looks and keep[-1] is not looks[-1]:
        keep.append(looks[-1])
    lines = [
        "| step | tokens a row | cross-entropy | recall | longest chain |",
        "|---" * 5 + "|",
    ]
    for look in keep:
        hops = max((k for k in look if k.startswith("hops ")), key=lambda k: int(k[5:]))
        lines.append(
            f"| {look['step']} | {look['length']} | {numbers(look['cross_entropy'])} | "
            f"{numbers(look['recall'], 2)} | {hops[5:]}: {numbers(look[hops], 2)} |"
        )
    return "\n".join(lines) + "\n"


def card(
    models: Mapping[str, dict], settings: dict, log: Sequence[dict], manifest: dict
) -> str:
    """The whole README.

    Args:
      models: name -> what `evaluate` measured; the first is the one described.

    Raises:
      ValueError: the run is not done.
    """
    model = settings["model"]
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
            table(about),
            "## Training\n",
            training(settings, log, manifest),
            "Held-out numbers on the way, one for each loop:\n",
            progress(log),
            "## What it can do\n",
            f"{first['questions']} questions of each kind, length and number of pointers; an "
            "answer is right if every token of it is the likeliest one.\n",
            comparison(models),
        ]
    ) + FILES.format(context=context)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="card", description="Writes the model card")
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--run", type=Path, default=Path("out/run"))
    parser.add_argument("--corpus", type=Path, default=Path("out/corpus"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    models = {"this model": json.loads(args.new.read_text("utf-8"))}
    if args.old:
        models["its predecessor"] = json.loads(args.old.read_text("utf-8"))
    log = [
        json.loads(line) for line in (args.run / "log.jsonl").read_text("utf-8").splitlines()
    ]
    text = card(
        models,
        json.loads((args.run / "settings.json").read_text("utf-8")),
        log,
        json.loads((args.corpus / "manifest.json").read_text("utf-8")),
    )
    args.out.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

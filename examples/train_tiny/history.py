"""The part of the model card that says how the model was trained, run after run."""

from __future__ import annotations

from collections.abc import Sequence

from .record import Record, lines_of
from .tables import numbers, table

RULES = {"adamw": "AdamW", "muon": "Muon for matrices and AdamW for the rest"}


def data(manifest: dict) -> str:
    """What was trained on."""
    sources = "; ".join(
        f"{e['name']} ({e['train_tokens']:,} tokens, {e.get('licence', 'local text')})"
        for e in manifest["sources"]
    )
    return table([("Text", sources), ("Tasks", "recall, several hops, copying, stories")])


def objective(settings: dict, before: dict | None) -> str:
    """What was minimised; of a later run, how that differs from the run before."""
    entropy, staged = settings["objective"]["entropy"], settings["mixture"]["per_loop"]
    if before is not None and before["mixture"]["per_loop"] == staged:
        return f"the same, minus {entropy:g} of the exit distribution's entropy"
    text = (
        "Ouro's: the cross-entropy expected over the exit distribution of the gate, minus "
        f"{entropy:g} of that distribution's entropy"
    )
    if staged:
        text += (
            "; in several-hop questions a loop is asked for the node that is "
            f"{'a step' if staged == 1 else f'{staged} steps'} further on than the loop before"
            " it, the last loop for what the answer names next"
        )
    return text


def rows(settings: dict, reached: float) -> str:
    """The stages that a run came to, by the part of its budget."""
    begins = [0.0, *(stage["until"] for stage in settings["schedule"]["stages"])]
    return "; ".join(
        f"until {min(stage['until'], reached):.0%} of the plan rows of {stage['length']} "
        f"tokens, {stage['tokens']:,} a step, {stage['synthetic']:.0%} of the rows with a task"
        for begin, stage in zip(begins, settings["schedule"]["stages"], strict=False)
        if begin < reached
    )


def facts(record: Record, before: Record | None) -> str:
    """A run's table."""
    end, settings = record.end(), record.settings
    schedule, optimizer = settings["schedule"], settings["optimizer"]
    parts = [f"{end.step:,} steps"]
    if end.tokens is not None:
        parts.append(f"{end.tokens / 1e6:.0f} million tokens")
    device = lines_of(record.log, "start")[0]["device"]
    parts += [
        f"{end.seconds / 60:.1f} minutes of training steps on one {device}",
        RULES[optimizer["rule"]],
        f"peak rate {schedule['peak']:g}",
        f"weight decay {optimizer['decay']:g} of matrices and "
        f"{optimizer['table_decay']:g} of the embedding and the head",
        f"seed {settings['seed']}",
    ]
    if round(end.reached, 2) < 1:
        minutes = schedule["minutes"]
        whole = f"{schedule['steps']:,} steps" if minutes is None else f"{minutes:g} minutes"
        parts.append(f"ended after {end.reached:.0%} of a schedule of {whole}")
    return table(
        [
            ("Objective", objective(settings, before.settings if before else None)),
            ("Rows", rows(settings, end.reached)),
            ("Run", ", ".join(parts)),
        ]
    )


def progress(log: Sequence[dict]) -> str:
    """The held-out numbers of the log, thinned to at most 12 rows."""
    looks = lines_of(log, "held_out")
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


def training(records: Sequence[Record], manifest: dict) -> str:
    """What the runs were, in order, from their own files.

    Raises:
      ValueError: the last run is not done, an earlier one neither done nor paused, or a run
        does not begin where the one before it ended.
    """
    if not records or not lines_of(records[-1].log, "done"):
        raise ValueError("the run is not done: resume it until its log says so")
    parts = [data(manifest)]
    for index, record in enumerate(records):
        origin = record.settings.get("weights_of")
        if bool(origin) != (index > 0):
            wrong = f"the weights of {origin}" if origin else "random weights"
            raise ValueError(
                f"run {index + 1} of {len(records)} began with {wrong}: name all runs that led "
                "to the model, in order"
            )
        first = "First run" if len(records) > 1 else "One run"
        parts.append(
            "Then, from its weights, with a new optimiser:\n"
            if index
            else f"{first}, from random weights:\n"
        )
        parts.append(facts(record, records[index - 1] if index else None))
        if index == 0:
            parts.append(
                "On the way, one number for each loop: nats per token of held-out text, the "
                "part of 16\nquestions for a code answered, and of 16 questions with the "
                "longest chain of pointers:\n"
            )
        parts.append(progress(record.log))
    return "\n".join(parts)

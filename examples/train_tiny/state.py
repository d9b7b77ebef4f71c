"""Everything a run needs to go on, on disk: complete or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

from sparse_loop_jax.checkpoint.atomic import new_directory
from sparse_loop_jax.models import OuroConfig, OuroParams
from sparse_loop_jax.models.params import param_shapes

NEWEST = "newest"
FREE = ("max_position_embeddings",)  # what may differ in a model that begins with weights


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Weights, optimiser, and how far the run is.

    `step` is the position in the data as well: a batch is a function of its step.
    """

    params: OuroParams  # float32
    optimizer: Any  # state of `make_optimizer`
    step: int
    seconds: float  # of training, the schedule's clock
    tokens: int  # trained on


RULES = ("adamw", "muon")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How weights follow gradients.

    Attributes:
      rule: "adamw" (0.9, 0.95), or "muon" (Jordan et al. 2024): matrices move along their
        momentum with its singular values made equal, scaled to the root mean square of an Adam
        step (Liu et al. 2025, arXiv 2502.16982); tables and vectors are Adam's, with Nesterov
        momentum.
      decay, table_decay: of matrices, and of the embedding and the head, as parts of the
        learning rate. Vectors are not decayed.

    Raises:
      ValueError: another rule, or a decay below 0.
    """

    rule: str = "muon"
    decay: float = 0.1
    table_decay: float = 0.0

    def __post_init__(self):
        if self.rule not in RULES:
            raise ValueError(f"the optimizer is one of {RULES}, got {self.rule!r}")
        for name, value in (
            ("--weight-decay", self.decay),
            ("--table-decay", self.table_decay),
        ):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value}")


def optimizer_of(settings: dict) -> Optimizer:
    """The optimizer of a run's settings."""
    return Optimizer(**settings["optimizer"])


def make_optimizer(params: OuroParams, optimizer: Optimizer) -> optax.GradientTransformation:
    """Clipping of gradients to a norm of 1, and `optimizer`.

    The learning rate is left to the step: updates are subtracted times it.
    """

    def is_table(path, leaf):
        return path[-1].name in ("embed", "head")

    def is_matrix(path, leaf):
        return leaf.ndim == 2 and not is_table(path, leaf) and path[-1].name != "exit_gate"

    tables, matrices = (
        jax.tree_util.tree_map_with_path(kind, params) for kind in (is_table, is_matrix)
    )
    move = optax.scale_by_adam(b1=0.9, b2=0.95)
    if optimizer.rule == "muon":
        numbers = optax.contrib.MuonDimensionNumbers()
        move = optax.contrib.muon(
            -1.0,  # it turns the sign as well
            adam_b1=0.9,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=jax.tree.map(
                lambda matrix: numbers if matrix else None, matrices
            ),
        )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        move,
        optax.add_decayed_weights(optimizer.decay, matrices),
        optax.add_decayed_weights(optimizer.table_decay, tables),
    )


def save(state: TrainState, directory: Path, settings: dict) -> None:
    """Writes a checkpoint, then points `newest` at it, then removes older ones.

    One file an array, all of them small. A run that is stopped at any time leaves a complete
    checkpoint behind.

    Args:
      settings: of the run, JSON; `restore` compares them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name = f"step-{state.step:07d}"
    if not (directory / name).exists():
        with new_directory(directory / name) as target:
            for index, leaf in enumerate(jax.tree.leaves((state.params, state.optimizer))):
                np.save(target / f"{index:03d}.npy", np.asarray(leaf))
            facts = {
                "step": state.step,
                "seconds": state.seconds,
                "tokens": state.tokens,
                "settings": settings,
            }
            (target / "state.json").write_text(json.dumps(facts, indent=1), "utf-8")
    pointer = directory / f".{NEWEST}.tmp"
    pointer.write_text(name, "utf-8")
    os.replace(pointer, directory / NEWEST)
    for old in directory.glob("step-*"):
        if old.name != name:
            shutil.rmtree(old)


def restore(directory: Path, config: OuroConfig, settings: dict) -> TrainState:
    """The newest checkpoint.

    Raises:
      ValueError: there is none, it is of other settings, or its arrays are of another model.
    """
    source, facts = _newest(directory, "leave --resume out")
    changed = differences(facts["settings"], settings)
    if changed:
        raise ValueError(
            f"{source} is of a run with other settings (then, now): {changed}; resume with the "
            "same ones, or start in another folder"
        )
    shapes = param_shapes(config, "float32")
    expected = jax.eval_shape(
        lambda p: (p, make_optimizer(p, optimizer_of(settings)).init(p)), shapes
    )
    params, optimizer = _arrays(source, expected)
    return TrainState(params, optimizer, facts["step"], facts["seconds"], facts["tokens"])


def restore_weights(directory: Path, config: OuroConfig, settings: dict) -> OuroParams:
    """The weights alone of the newest checkpoint, whatever trained them and on what lengths.

    Raises:
      ValueError: there is none, or it is of another model.
    """
    source, facts = _newest(directory, "name the --out of a training")

    def model(of: dict) -> dict:
        kept = of["model"] | {"tokenizer": of.get("tokenizer")}
        return {name: value for name, value in kept.items() if name not in FREE}

    changed = differences(model(facts["settings"]), model(settings))
    if changed:
        raise ValueError(f"{source} is of another model (then, now): {changed}")
    return _arrays(source, param_shapes(config, "float32"))  # they come first


def differences(then: dict, now: dict) -> dict[str, tuple]:
    """What differs between two settings, but for where the weights began: a checkpoint has
    its own."""
    names = sorted({*then, *now} - {"weights_of"})
    pairs = {name: (then.get(name), now.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def has_checkpoint(directory: Path) -> bool:
    """Whether there is a complete one to go on from."""
    return (directory / NEWEST).is_file()


def _newest(directory: Path, mend: str) -> tuple[Path, dict]:
    """The newest checkpoint's folder, and its facts."""
    if not has_checkpoint(directory):
        raise ValueError(f"{directory} has no checkpoint: {mend}")
    source = directory / (directory / NEWEST).read_text("utf-8")
    return source, json.loads((source / "state.json").read_text("utf-8"))


def _arrays(source: Path, expected: Any) -> Any:
    """The first arrays of a checkpoint in the structure of `expected`, shapes of arrays."""
    wanted, structure = jax.tree.flatten(expected)
    leaves = [np.load(source / f"{index:03d}.npy") for index in range(len(wanted))]
    for index, (leaf, want) in enumerate(zip(leaves, wanted, strict=True)):
        if leaf.shape != want.shape or leaf.dtype != want.dtype:
            raise ValueError(
                f"{source}: array {index} is {leaf.dtype}{list(leaf.shape)}, the model has "
                f"{want.dtype}{list(want.shape)}"
            )
    return jax.tree.unflatten(structure, [jax.numpy.asarray(x) for x in leaves])

"""What a run would cost, before there is a machine for it: operations and memory by stage.

    python -m examples.train_tiny.plan --corpus out/corpus --minutes 13 --no-remat

Operations are counted from the shapes. Memory is what XLA's compiler plans for the backend
here, nothing being run; on a CPU attention is the chunked one, which needs more than cuDNN's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax

from sparse_loop_jax.models import OuroConfig
from sparse_loop_jax.models.params import param_shapes

from . import corpus as corpora
from .objective import Batch, Objective
from .options import add_options, config_of, schedule_of, settings_of
from .state import Optimizer, make_optimizer, optimizer_of
from .train import train_step


def operations(config: OuroConfig, length: int, *, remat: bool) -> float:
    """Floating-point operations of training on one token of rows of `length`.

    Two a weight and token, the head in every loop as well; attention over half the row on
    average. The gradient costs twice the forward pass, and one more with `remat`.
    """
    heads = config.num_attention_heads * config.head_dim
    matrices = config.qkv_size + heads + 3 * config.intermediate_size
    layer = 2 * config.hidden_size * matrices + 2 * heads * length
    loop = config.num_hidden_layers * layer
    head = 2 * config.hidden_size * config.vocab_size
    return config.total_ut_steps * ((4 if remat else 3) * loop + 4 * head)


def memory(
    config: OuroConfig, objective: Objective, rule: Optimizer, rows: int, length: int
) -> dict[str, int]:
    """Bytes of one step: `arguments` (weights, optimiser, batch) and `temporary`."""
    leaf = jax.ShapeDtypeStruct
    params = param_shapes(config, "float32")
    optimizer = jax.eval_shape(lambda p: make_optimizer(p, rule).init(p), params)
    batch = Batch(
        ids=leaf((rows, length), "int32"),  # type: ignore[arg-type]
        targets=leaf((config.total_ut_steps, rows, length), "int32"),  # type: ignore[arg-type]
        weights=leaf((rows, length), "float32"),  # type: ignore[arg-type]
    )
    lowered = train_step.lower(
        params,
        optimizer,
        batch,
        leaf((), "float32"),
        config=config,
        objective=objective,
        rule=rule,
    )
    planned = lowered.compile().memory_analysis()
    assert planned is not None
    return {
        "arguments": planned.argument_size_in_bytes,
        "temporary": planned.temp_size_in_bytes,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="plan", description="What a run would cost")
    add_options(parser)
    parser.add_argument("--no-memory", action="store_true", help="compile nothing")
    args = parser.parse_args(argv)
    settings = settings_of(args, corpora.read(args.corpus))
    config = config_of(settings)
    objective = Objective(**settings["objective"])
    print(f"{config.num_parameters:,} parameters, {2 * config.num_parameters / 2**20:.1f} MiB")
    for stage in schedule_of(settings).stages:
        rows, length = stage.rows, stage.length
        each = operations(config, length, remat=objective.remat)
        line = f"until {stage.until:.0%}: {rows} x {length}, {each / 1e6:.0f} MFLOP a token, "
        line += f"{each * rows * length / 1e12:.1f} TFLOP a step"
        if not args.no_memory:
            planned = memory(config, objective, optimizer_of(settings), rows, length)
            line += "".join(
                f", {name} {size / 2**30:.2f} GiB" for name, size in planned.items()
            )
        print(line, flush=True)


if __name__ == "__main__":
    main()

"""`sparse-loop convert`: between the Hugging Face and the native format."""

from __future__ import annotations

import argparse

HELP = "convert a Hugging Face checkpoint to the native (Orbax) format, or back"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="directory of either format")
    parser.add_argument(
        "dst", metavar="DST", help="directory of the other format; must not exist, or be empty"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="round the weights; by default they keep their bits",
    )


def run(args: argparse.Namespace) -> int:
    import jax

    # Files go through host memory only. Left alone, Orbax would start every backend, and a
    # GPU backend takes most of the GPU's memory.
    jax.config.update("jax_platforms", "cpu")

    from sparse_loop_jax.checkpoint import convert

    convert(args.src, args.dst, dtype=args.dtype)
    print(f"wrote {args.dst}")
    return 0

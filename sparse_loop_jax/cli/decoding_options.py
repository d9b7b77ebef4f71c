"""Options of how tokens are decoded, which `generate` and `serve` have alike."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparse_loop_jax import SparseDecodeConfig, SpeculativeConfig


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    sparse = parser.add_argument_group("cross-loop sparse decode attention")
    sparse.add_argument(
        "--retention",
        type=float,
        help="share of the keys that loops after the second read; 1 is dense",
    )
    speculative = parser.add_argument_group("self-speculation")
    speculative.add_argument(
        "--speculative-tokens", type=int, metavar="K", help="drafted a round; default: none"
    )
    speculative.add_argument("--draft-loops", type=int, metavar="d", help="default: 2")
    speculative.add_argument("--adaptive", action="store_true", help="K is an upper bound")


def decoding_configs(
    args: argparse.Namespace,
) -> tuple[SparseDecodeConfig | None, SpeculativeConfig | None]:
    """What these options ask for; None where they were left out.

    Raises:
      ValueError: a value is out of range, or options of speculation without it.
    """
    speculative = speculative_config(args)
    if args.retention is None:
        return None, speculative

    import sparse_loop_jax as slj

    return slj.SparseDecodeConfig(key_retention=args.retention), speculative


def speculative_config(args: argparse.Namespace) -> SpeculativeConfig | None:
    """The part of `decoding_configs` that speculates, also for a command without --adaptive."""
    adaptive = getattr(args, "adaptive", False)
    if args.speculative_tokens is None:
        if args.draft_loops is not None or adaptive:
            names = (
                "--draft-loops and --adaptive need"
                if "adaptive" in args
                else "--draft-loops needs"
            )
            raise ValueError(f"{names} --speculative-tokens")
        return None

    import sparse_loop_jax as slj

    return slj.SpeculativeConfig(
        num_speculative_tokens=args.speculative_tokens,
        draft_loops=2 if args.draft_loops is None else args.draft_loops,
        adaptive=adaptive,
    )

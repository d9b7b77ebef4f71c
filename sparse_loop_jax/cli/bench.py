"""`sparse-loop bench`: measure on this machine."""

from __future__ import annotations

import argparse
import re

HELP = "measure decoding on this machine, against the bytes it must move"

_DEFAULT_CASES = {
    "decode": "1x1024,8x1024",
    "prefill": "1x8192",
    "speculative": "1x1024,8x1024",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", choices=sorted(_DEFAULT_CASES))
    parser.add_argument("--shape", default="ouro-1.4b", help="ouro-1.4b, ouro-2.6b or tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--cases", help="BATCHxTOKENS, comma separated")
    parser.add_argument("--retentions", default="", help="sparse runs too, e.g. 0.1,0.05")
    parser.add_argument("--steps", type=int, default=32, help="steps or rounds in one timing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--implementation", help='of the ops: "xla" or "pallas"')
    parser.add_argument("--no-peer", action="store_true", help="leave PyTorch out")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")


def run(args: argparse.Namespace) -> int:
    cases = parse_cases(args.cases or _DEFAULT_CASES[args.benchmark])
    retentions = [float(r) for r in args.retentions.split(",") if r]
    if args.steps < 1 or args.repeats < 1:
        raise ValueError(f"steps and repeats must be >= 1, got {args.steps}, {args.repeats}")

    from sparse_loop_jax.bench import (
        decode,
        measure,
        model,
        prefill,
        report,
        speculative,
        torch_peer,
    )

    if args.shape not in model.SHAPES:
        raise ValueError(f"shape must be one of {sorted(model.SHAPES)}, got {args.shape!r}")
    config = model.SHAPES[args.shape]
    options = {"dtype": args.dtype, "repeats": args.repeats}
    options["implementation"] = args.implementation
    if args.benchmark == "decode":
        # Before this process takes the device.
        peer = None if args.no_peer else torch_peer.peer_seconds(config, cases)
        rows = decode.bench_decode(
            config, cases, retentions=retentions, steps=args.steps, peer=peer, **options
        )
    elif args.benchmark == "speculative":
        rows = speculative.bench_speculative(
            config, cases, retentions=retentions, steps=args.steps, **options
        )
    else:
        rows = prefill.bench_prefill(config, cases, **options)
    setup = measure.setup_info() | {"shape": args.shape, "dtype": args.dtype}
    report.print_table(f"bench {args.benchmark}", rows, setup)
    if args.json:
        report.write_json(args.json, args.benchmark, rows, setup)
    return 0


def parse_cases(text: str) -> list[tuple[int, int]]:
    """ "1x1024,8x1024" to [(1, 1024), (8, 1024)].

    Raises:
      ValueError: a part is not of that form.
    """
    cases = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)\s*", part)
        if match is None:
            raise ValueError(f"cases are BATCHxTOKENS like 8x1024, got {part!r}")
        cases.append((int(match[1]), int(match[2])))
    return cases

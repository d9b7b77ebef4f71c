"""`sparse-loop generate`: continue a prompt."""

from __future__ import annotations

import argparse
import json
import sys

from sparse_loop_jax.cli.decoding_options import add_decoding_options, decoding_configs
from sparse_loop_jax.cli.notes import note_context_ends, note_slow_dtype

HELP = "continue prompts with a checkpoint, or with the bundled model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="+", help="text to continue; several make one batch")
    parser.add_argument("--model", help="checkpoint directory or Hub id; default: bundled")
    parser.add_argument("--revision", help="commit of a Hub id, 40 hexadecimal digits")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-eos", action="store_true", help="do not stop at stop tokens")
    parser.add_argument("--exit-threshold", type=float, help="leave earlier loops; 1 never")
    parser.add_argument("--min-loops", type=int, default=1, metavar="N")
    parser.add_argument("--max-loops", type=int, metavar="N", help="default: all")
    add_decoding_options(parser)
    parser.add_argument("--implementation", help='of the attention ops: "xla" or "pallas"')
    parser.add_argument("--stats", action="store_true", help="print all statistics as JSON")
    parser.add_argument("--stream", action="store_true", help="print text as it comes")


def run(args: argparse.Namespace) -> int:
    import sparse_loop_jax as slj

    if args.stream and len(args.prompt) > 1:
        raise ValueError(f"--stream prints one text at a time, got {len(args.prompt)} prompts")
    sparse, speculative = decoding_configs(args)
    model = slj.load(args.model, dtype=args.dtype, revision=args.revision)
    note_slow_dtype(model, args.dtype)
    context = model.config.max_position_embeddings
    options = {
        "max_new_tokens": args.max_new_tokens,
        "sparse": sparse,
        "speculative": speculative,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
        "eos_token_id": [] if args.no_eos else None,
        "exit_threshold": args.exit_threshold,
        "min_loops": args.min_loops,
        "max_loops": args.max_loops,
        "implementation": args.implementation,
    }
    if args.stream:
        return _stream(slj.stream(model, args.prompt, **options), args, context)
    out = slj.generate(model, args.prompt, **options)
    for prompt, text, ids in zip(
        args.prompt, out.texts or [None] * len(out.token_ids), out.token_ids, strict=True
    ):
        print(f"{prompt}{text if text is not None else f' {ids}'}\n")
    counts = list(map(len, out.token_ids))
    note_context_ends(counts, out.finish_reasons, args.max_new_tokens, context)
    _tell(out.stats, args)
    return 0


def summary(stats) -> str:
    """One line that says what was run and how it went."""
    parts = [
        f"{stats.generated_tokens} tokens",
        f"{stats.tokens_per_second:.0f} tokens/s",
        f"compiled {stats.compilations} programs in {stats.compile_seconds:.1f} s",
    ]
    if stats.implementations:
        parts.append("ops: " + ", ".join(sorted(set(stats.implementations.values()))))
    if stats.drafted:
        parts.append(
            f"{stats.rounds} rounds, {stats.accepted} of {stats.drafted} drafts accepted"
        )
    if stats.keys_dense:
        parts.append(
            f"read {stats.keys_read / stats.keys_dense:.0%} of the keys, "
            f"with {min(stats.retained_mass_mean):.2f} of the attention mass in the worst "
            f"layer on average, {min(stats.retained_mass_min):.2f} at least"
        )
    return "[" + "; ".join(parts) + "]"


def _stream(chunks, args: argparse.Namespace, context: int) -> int:
    print(args.prompt[0], end="", flush=True)
    count = 0
    for chunk in chunks:
        text = chunk.text if chunk.text is not None else f" {chunk.token_ids}"
        print(text, end="", flush=True)
        count += len(chunk.token_ids)
        if chunk.stats is not None:
            print()
            note_context_ends([count], [chunk.finish_reason], args.max_new_tokens, context)
            _tell(chunk.stats, args)
    return 0


def _tell(stats, args: argparse.Namespace) -> None:
    print(summary(stats), file=sys.stderr)
    if args.stats:
        print(json.dumps(vars(stats), indent=2))

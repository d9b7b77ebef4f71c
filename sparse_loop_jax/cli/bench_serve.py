"""The part of `sparse-loop bench` that replays requests: `bench serve`."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload", nargs="?", metavar="WORKLOAD",
        help='serve: lines {"arrival": seconds, "prompt_tokens": N or "prompt": text or ids, '
        '"max_tokens": N, "priority": N}',
    )  # fmt: skip
    serve = parser.add_argument_group(
        "serve", "without a WORKLOAD, random requests; with --model, no random weights"
    )
    serve.add_argument("--model", help="checkpoint directory or Hub id")
    serve.add_argument("--revision", help="commit of a Hub id")
    serve.add_argument("--requests", type=int, default=64, metavar="N")
    serve.add_argument(
        "--rate", type=float, default=float("inf"), metavar="R",
        help="requests a second on average; default: all at once",
    )  # fmt: skip
    serve.add_argument("--prompt-tokens", default="32:256", metavar="A:B")
    serve.add_argument("--output-tokens", default="16:64", metavar="A:B")
    serve.add_argument("--seed", type=int, default=0)
    serve.add_argument("--max-num-seqs", type=int, default=8, metavar="N", help="at once")
    serve.add_argument("--max-context", type=int, help="default: what the workload needs")
    serve.add_argument("--max-prefill-tokens", type=int, default=2048, metavar="N")
    serve.add_argument("--num-pages", type=int, help="of K/V, over all loops")
    serve.add_argument("--prefix-caching", action="store_true")
    serve.add_argument("--policy", choices=("fcfs", "priority"), default="fcfs")
    serve.add_argument("--speculative-tokens", type=int, metavar="K")
    serve.add_argument("--draft-loops", type=int, default=2, metavar="d")
    serve.add_argument("--no-warm-up", action="store_true", help="compile while measuring")


def run(args: argparse.Namespace, config, retentions: list[float]) -> list[dict[str, Any]]:
    """Replays the workload dense and with each retention, prints, and gives the rows."""
    import sparse_loop_jax as slj
    from sparse_loop_jax.bench import report, serve, serve_workload

    if args.workload is None:
        arrivals = serve_workload.make_workload(
            args.requests,
            rate=args.rate,
            prompt_tokens=serve_workload.parse_range("prompt-tokens", args.prompt_tokens),
            output_tokens=serve_workload.parse_range("output-tokens", args.output_tokens),
            seed=args.seed,
        )
    else:
        arrivals = serve_workload.read_workload(args.workload)
    speculative = None
    if args.speculative_tokens is not None:
        speculative = slj.SpeculativeConfig(args.speculative_tokens, args.draft_loops)
    if args.model is None:
        model = slj.Ouro(config, rngs=0, dtype=args.dtype)
    else:
        model = slj.load(args.model, dtype=args.dtype, revision=args.revision)
    workload = serve_workload.with_tokens(model, arrivals, args.seed)
    context = args.max_context or max(request.kv_tokens for request in workload)
    scheduler = slj.SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_context=context,
        max_prefill_tokens=args.max_prefill_tokens,
        policy=args.policy,
    )
    cache = slj.CacheConfig(num_pages=args.num_pages, enable_prefix_caching=args.prefix_caching)
    rows = []
    for retention in [1.0, *retentions]:
        sparse = slj.SparseDecodeConfig(key_retention=retention)
        with slj.Engine(
            model,
            cache=cache,
            scheduler=scheduler,
            sparse=None if sparse.is_dense else sparse,
            speculative=speculative,
            implementation=args.implementation,
        ) as engine:
            if not args.no_warm_up:
                serve.warm_up(engine, workload, model.config.vocab_size)
            done = serve.replay(engine, workload)
        row = {"retention": retention, **done.row()}
        times = done.time_rows()
        report.print_table(f"retention {retention:g}", times, {})
        rows.append(row | {"ms": times, "counters": done.counters})
    return rows

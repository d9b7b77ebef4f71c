"""The part of `sparse-loop bench` that replays requests: `bench serve`."""

from __future__ import annotations

import argparse
from typing import Any

from sparse_loop_jax.cli.decoding_options import speculative_config


def run(args: argparse.Namespace, config, retentions: list[float]) -> list[dict[str, Any]]:
    """Replays the workload dense and with each retention, prints, and gives the rows."""
    import sparse_loop_jax as slj
    from sparse_loop_jax.bench import report, serve, serve_workload

    if args.seed < 0:
        raise ValueError(f"--seed must be >= 0, got {args.seed}")
    if args.workload is None:
        arrivals = serve_workload.make_workload(
            args.requests,
            rate=args.rate,
            prompt_tokens=serve_workload.parse_range("--prompt-tokens", args.prompt_tokens),
            output_tokens=serve_workload.parse_range("--output-tokens", args.output_tokens),
            seed=args.seed,
        )
    else:
        arrivals = serve_workload.read_workload(args.workload)
    speculative = speculative_config(args)
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
            report.note(f"serve: {len(workload)} requests, retention {retention:g}")
            if not args.no_warm_up:
                serve.warm_up(engine, workload, model.config.vocab_size)
            done = serve.replay(engine, workload)
        row = {"retention": retention, **done.row()}
        times = done.time_rows()
        report.print_table(f"retention {retention:g}", times, {})
        rows.append(row | {"ms": times, "counters": done.counters})
    return rows

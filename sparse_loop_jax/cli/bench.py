"""`sparse-loop bench`: measure on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from pathlib import Path

from sparse_loop_jax.cli import bench_options, bench_serve, notes
from sparse_loop_jax.cli.bench_options import add_arguments as add_arguments
from sparse_loop_jax.cli.evaluate import check_directory, parse_retentions

HELP = "measure decoding and its attention, against the bytes they must move; tune kernels"

_DEFAULT_CASES = {
    "attention": "1x1024,8x1024,32x2048,4x8192,8x8192,8x16384,1x32768,32x32768",
    "break-even": ",".join(
        f"{batch}x{context}" for batch in (1, 4, 8, 32) for context in (1024, 4096, 16384)
    ),
    "decode": "1x1024,8x1024",
    "prefill": "1x8192",
    "speculative": "1x1024,8x1024",
}


def run(args: argparse.Namespace) -> int:
    bench_options.complete(args)
    text = _DEFAULT_CASES.get(args.benchmark) if args.cases is None else args.cases
    cases = [] if text is None else parse_cases(text)
    retentions = parse_retentions(args.retentions) if args.retentions else []
    for retention in retentions:
        if not 0 < retention <= 1:
            raise ValueError(f"--retentions must be in (0, 1], got {retention:g}")
    check_directory("json", args.json)
    check_directory("device-file", args.device_file)
    if args.steps < 1 or args.repeats < 1:
        raise ValueError(
            f"--steps and --repeats must be >= 1, got {args.steps}, {args.repeats}"
        )

    from sparse_loop_jax.bench import model, report

    if args.shape not in model.SHAPES:
        raise ValueError(f"--shape must be one of {sorted(model.SHAPES)}, got {args.shape!r}")
    _check_implementation(args)
    if args.benchmark == "tune":
        return _tune(args, cases)
    if args.benchmark == "serve":
        return _serve(args, model.SHAPES[args.shape], retentions)
    if args.shape != "tiny" and platform() == "cpu":
        notes.note(f"no GPU here: {args.shape} may take hours; --shape tiny is quick")
    rows = _BENCHMARKS[args.benchmark](args, model.SHAPES[args.shape], cases, retentions)
    report.print_table(f"bench {args.benchmark}", rows, _setup(args))
    _save(args, rows)
    return 0


def _check_implementation(args: argparse.Namespace) -> None:
    from sparse_loop_jax.kernels.paged_attention import paged_attention
    from sparse_loop_jax.kernels.sparse_attention import sparse_attention

    known = set(paged_attention.implementations)
    if args.benchmark == "attention":
        known |= set(sparse_attention.implementations)
    if args.implementation is not None and args.implementation not in known:
        raise ValueError(
            f"--implementation of bench {args.benchmark} is one of {sorted(known)}, got "
            f"{args.implementation!r}"
        )


def platform() -> str:
    """Of the default device: "gpu" or "cpu"."""
    import jax

    return jax.default_backend()


def _setup(args: argparse.Namespace) -> dict[str, str]:
    from sparse_loop_jax.bench import measure

    return measure.setup_info() | {"shape": args.shape, "dtype": args.dtype}


def _save(args: argparse.Namespace, rows: list) -> None:
    from sparse_loop_jax.bench import report

    if args.json:
        report.write_json(args.json, args.benchmark, rows, _setup(args))


def _options(args: argparse.Namespace) -> dict:
    names = ("dtype", "repeats", "implementation")
    return {name: getattr(args, name) for name in names}


def _decode(args, config, cases, retentions):
    from sparse_loop_jax.bench import decode, torch_peer

    # Before this process takes the device.
    peer = None if args.no_peer else torch_peer.peer_seconds(config, cases)
    return decode.bench_decode(
        config, cases, retentions=retentions, steps=args.steps, peer=peer, **_options(args)
    )


def _break_even(args, config, cases, retentions):
    from sparse_loop_jax.bench import break_even, decode
    from sparse_loop_jax.sparse import break_even as break_even_files

    retentions = retentions or [0.1, 0.25, 0.5]
    if 1 in retentions:
        raise ValueError(
            "bench break-even compares sparse steps with dense ones: leave 1 out of "
            "--retentions"
        )
    if args.device_file is not None and Path(args.device_file).exists():
        break_even_files.read(Path(args.device_file))  # before minutes are spent
    rows = decode.bench_decode(
        config, cases, retentions=retentions, steps=args.steps, **_options(args)
    )
    listed = ",".join(f"{r:g}" for r in retentions)
    command = f"sparse-loop bench break-even --shape {args.shape} --retentions {listed}"
    found = break_even.entries(config, args.dtype, rows)
    print(f"wrote {break_even.write(args.device_file, found, command)}")
    return rows


def _speculative(args, config, cases, retentions):
    from sparse_loop_jax.bench import speculative

    return speculative.bench_speculative(
        config, cases, retentions=retentions, steps=args.steps, **_options(args)
    )


def _prefill(args, config, cases, _retentions):
    from sparse_loop_jax.bench import prefill, torch_peer

    workload = _workloads(args, config, cases)[0]
    peer = None if args.no_peer else torch_peer.prefill_seconds(workload, cases)
    return prefill.bench_prefill(config, cases, peer=peer, **_options(args))


def _attention(args, config, cases, retentions):
    from sparse_loop_jax.bench import attention, torch_peer

    workloads = [
        dataclasses.replace(w, rows=rows)
        for w in _workloads(args, config, cases)
        for rows in parse_rows(args.rows)
    ]
    peer = None if args.no_peer else torch_peer.attention_seconds(workloads[0], cases)
    options = attention.Options(args.implementation, repeats=args.repeats)
    return attention.bench_attention(
        workloads,
        retentions=retentions,
        options=options,
        peer=peer,
        progress=functools.partial(_save, args),  # a run cut short leaves what it has
    )


def _tune(args, cases) -> int:
    from sparse_loop_jax.bench import model, tune

    if platform() != "gpu":
        raise ValueError(
            f"bench tune times kernels on a GPU, and on {platform()} they would be "
            "interpreted: run it where JAX has a GPU, with jax[cuda13] installed"
        )
    config = model.SHAPES[args.shape]
    workloads = _workloads(args, config, cases) if cases else tune.default_workloads()
    command = f"sparse-loop bench tune --seconds {args.seconds:g}"
    path = tune.write(
        workloads, config, args.device_file, seconds=args.seconds, command=command
    )
    print(f"wrote {path}")
    return 0


def _serve(args, config, retentions) -> int:
    from sparse_loop_jax.bench import report

    rows = bench_serve.run(args, config, retentions)
    setup = _setup(args) | {"max_num_seqs": str(args.max_num_seqs)}
    if args.model is not None:
        setup["shape"] = args.model
    table = [{k: v for k, v in row.items() if k not in ("ms", "counters")} for row in rows]
    report.print_table("bench serve", table, setup)
    if args.json:
        report.write_json(args.json, "serve", rows, setup)
    return 0


_BENCHMARKS = {
    "attention": _attention,
    "break-even": _break_even,
    "decode": _decode,
    "prefill": _prefill,
    "speculative": _speculative,
}


def _workloads(args, config, cases):
    """Attention of a model's shape, one row."""
    from sparse_loop_jax.kernels.workloads import AttentionWorkload

    return [
        AttentionWorkload(
            batch=batch,
            context=context,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=args.dtype,
        )
        for batch, context in cases
    ]


def parse_rows(text: str) -> list[int]:
    """ "1,4" to [1, 4], in ascending order.

    Raises:
      ValueError: a part is no positive integer.
    """
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        raise ValueError(f"--rows are positive integers like 1,4, got {text!r}")
    return sorted(int(part) for part in text.split(","))


def parse_cases(text: str) -> list[tuple[int, int]]:
    """ "1x1024,8x1024" to [(1, 1024), (8, 1024)].

    Raises:
      ValueError: a part is not of that form.
    """
    cases = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)\s*", part)
        if match is None:
            raise ValueError(f"--cases are BATCHxTOKENS like 8x1024, got {part!r}")
        cases.append((int(match[1]), int(match[2])))
    return cases

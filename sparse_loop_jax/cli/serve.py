"""`sparse-loop serve`: an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from sparse_loop_jax.cli.decoding_options import add_decoding_options, decoding_configs
from sparse_loop_jax.cli.inspect import memory_size
from sparse_loop_jax.cli.notes import note_slow_dtype

HELP = "serve a checkpoint over HTTP, as OpenAI's API does"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="checkpoint directory or Hub id; default: bundled"
    )
    parser.add_argument("--revision", help="commit of a Hub id, 40 hexadecimal digits")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--served-name", metavar="NAME", help="default: that of the directory")
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    http.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    http.add_argument(
        "--max-waiting", type=int, default=256, metavar="N", help="prompts; more get 429"
    )
    http.add_argument("--max-body", default="1MiB", metavar="SIZE", help="larger ones get 413")
    http.add_argument(
        "--shutdown-seconds", type=float, default=30, metavar="S", help="to let requests end"
    )
    http.add_argument("--access-log", action="store_true", help="a line for each request")
    add_decoding_options(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-num-seqs", type=int, default=8, metavar="N", help="at once")
    engine.add_argument("--max-context", type=int, metavar="TOKENS", help="default: model's")
    engine.add_argument("--max-prefill-tokens", type=int, default=2048, metavar="N")
    engine.add_argument("--num-pages", type=int, help="of K/V, over all loops")
    engine.add_argument("--kv-memory", metavar="SIZE", help="of K/V, instead of --num-pages")
    engine.add_argument("--page-size", type=int, default=16, metavar="TOKENS")
    engine.add_argument("--prefix-caching", action="store_true", help="share prompts' pages")
    engine.add_argument("--policy", choices=("fcfs", "priority"), default="fcfs")
    engine.add_argument("--implementation", help='of the attention ops: "xla" or "pallas"')
    engine.add_argument(
        "--no-warm-up", action="store_true", help="compile with the first requests instead"
    )


def run(args: argparse.Namespace) -> int:
    sparse, speculative = decoding_configs(args)
    kv_bytes = None if args.kv_memory is None else memory_size(args.kv_memory, "--kv-memory")
    try:
        from sparse_loop_jax.serve.server import Server, bind, url_of
    except ImportError as error:
        raise ValueError(f"serve needs {error.name}: pip install -e '.[serve]'") from None

    import sparse_loop_jax as slj
    from sparse_loop_jax.serve.build import load_with_template, make_service
    from sparse_loop_jax.serve.config import ServeConfig

    config = ServeConfig(
        model_name=args.served_name or _name(args.model),
        host=args.host,
        port=args.port,
        max_waiting=args.max_waiting,
        max_body_bytes=memory_size(args.max_body, "--max-body"),
        shutdown_seconds=args.shutdown_seconds,
    )
    options = {
        "cache": slj.CacheConfig(
            num_pages=args.num_pages,
            memory_bytes=kv_bytes,
            page_size=args.page_size,
            enable_prefix_caching=args.prefix_caching,
        ),
        "scheduler": slj.SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_context=args.max_context,
            max_prefill_tokens=args.max_prefill_tokens,
            policy=args.policy,
        ),
        "sparse": sparse,
        "speculative": speculative,
        "implementation": args.implementation,
    }
    # A port that is taken should not be found out after the weights were read.
    listener = bind(config.host, config.port)
    try:
        model, template = load_with_template(
            args.model, dtype=args.dtype, revision=args.revision
        )
        service = make_service(model, config, template=template, **options)
    except BaseException:
        listener.close()
        raise
    note_slow_dtype(model, args.dtype)
    where = url_of(listener)
    ready = f"serving {config.model_name} on {where}, context {service.tokens.max_context}"
    server = Server(
        service, started=lambda: print(ready, flush=True), access_log=args.access_log
    )
    if not args.no_warm_up:
        told = "compiling, for a minute or so; --no-warm-up leaves it to the first requests"
        print(told, file=sys.stderr)
    try:
        server.serve_on(listener, warm_up=not args.no_warm_up)
    except BaseException as error:
        if service.worker.running:
            _leave_now(error)
        raise
    return 0


def _leave_now(error: BaseException) -> NoReturn:
    """Ends the process although a thread compiles: the interpreter's own end would abort it."""
    interrupted = isinstance(error, KeyboardInterrupt)
    if not interrupted:
        print(f"sparse-loop: error: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if interrupted else 1)


def _name(path: str | None) -> str:
    """What clients call a checkpoint: a Hub id as it is, a directory by its last part."""
    if path is None:
        return "tiny-ouro"
    return Path(path).resolve().name if Path(path).exists() else path

"""`sparse-loop inspect`: what a checkpoint is, and what fits beside it in memory."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparse_loop_jax.checkpoint.loading import Summary

HELP = "describe a checkpoint, its memory and the tokens that fit beside it"

GIB = 2**30
_UNITS = {
    "": 1,
    **{f"{p}B": 1000**i for i, p in enumerate(("", "K", "M", "G", "T"))},
    **{f"{p}iB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), 1)},
}
_COMMON_SIZES = (16 * GIB, 24 * GIB, 48 * GIB, 80 * GIB, 140 * GIB)


def memory_size(text: str, option: str = "--memory") -> int:
    """Bytes of "80GiB", "141GB" or "1000000", the value of an option.

    Raises:
      ValueError: it is no such size, or it is zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2]) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise ValueError(f"{option} must be a size like 80GiB or 141GB, got {text!r}")
    return size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="directory of either format, or a Hub id; by default the bundled model",
    )
    parser.add_argument("--revision", help="full commit hash of a Hub id")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of the accelerator, such as 80GiB, or `device`: what the default device "
        "reports; by default a few common sizes",
    )
    parser.add_argument(
        "--page-size", type=int, default=16, metavar="TOKENS", help="tokens in a page of KV"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the KV cache; by default that of the weights",
    )


def run(args: argparse.Namespace) -> int:
    if args.page_size < 1 or args.page_size & (args.page_size - 1):
        raise ValueError(f"--page-size must be a power of two, got {args.page_size}")
    if args.memory is None:
        sizes = _COMMON_SIZES
    else:
        sizes = (_device_memory() if args.memory == "device" else memory_size(args.memory),)

    from sparse_loop_jax.checkpoint.dtypes import weight_dtype
    from sparse_loop_jax.checkpoint.loading import local_directory, summarize
    from sparse_loop_jax.sparse import break_even

    with local_directory(args.path, args.revision) as directory:
        name = directory.resolve().name
        summary = summarize(directory)
    if args.kv_dtype is None and len(summary.dtypes) > 1:
        raise ValueError(
            "the tensors are of several dtypes; choose the cache's with --kv-dtype"
        )
    kv_dtype = weight_dtype(args.kv_dtype or next(iter(summary.dtypes)))
    kv_bytes = summary.config.kv_bytes_per_token(kv_dtype.itemsize)

    for line in _describe(name, summary):
        print(line)
    print(f"KV cache       {kv_bytes:,} bytes per token in {kv_dtype}")
    print(f"\nTokens that fit beside the weights, in pages of {args.page_size}:")
    for size in sizes:
        tokens = tokens_that_fit(size - summary.nbytes, kv_bytes, args.page_size)
        contexts = tokens / summary.config.max_position_embeddings
        fits = f"{tokens:>13,}  ({contexts:.1f} x the context)" if tokens else "         none"
        print(f"  {size / GIB:7.1f} GiB  {fits}")
    for device, entries in break_even.measured(summary.config, kv_dtype):
        print(f"\nSparse decode is as fast as dense or faster, measured on {device}:")
        for entry in entries:
            print(f"  {entry.batch:4} x  r = {entry.retention:<5g} {entry}")
    return 0


def tokens_that_fit(memory: int, kv_bytes: int, page_size: int) -> int:
    """Tokens of KV, in whole pages, that `memory` bytes hold; 0 where memory is negative."""
    return max(0, memory) // (kv_bytes * page_size) * page_size


def _describe(name: str, summary: Summary) -> Iterator[str]:
    config = summary.config
    dtypes = ", ".join(sorted(map(str, summary.dtypes)))
    yield f"model          {name} (Ouro, {summary.format} format)"
    yield (
        f"layers         {config.num_hidden_layers}, run {config.total_ut_steps} times; "
        f"hidden {config.hidden_size}, MLP {config.intermediate_size}"
    )
    yield (
        f"attention      {config.num_attention_heads} query and {config.num_key_value_heads} "
        f"key/value heads of {config.head_dim}; rope theta {config.rope_theta:g}"
    )
    yield f"context        {config.max_position_embeddings:,} tokens"
    head = "tied to the embedding" if config.tie_word_embeddings else "separate LM head"
    yield f"vocabulary     {config.vocab_size:,} tokens, {head}"
    yield f"stop ids       {', '.join(map(str, config.eos_token_ids)) or 'none'}"
    yield f"parameters     {config.num_parameters:,}"
    gib = summary.nbytes / GIB
    yield f"weights        {summary.nbytes:,} bytes ({gib:.2f} GiB) in {dtypes}"


def _device_memory() -> int:
    """Bytes that JAX may use on the default device."""
    import jax

    device = jax.devices()[0]
    stats = device.memory_stats()
    if not stats or not stats.get("bytes_limit"):
        raise ValueError(f"{device.device_kind} reports no memory; give --memory SIZE")
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)

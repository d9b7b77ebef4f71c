"""The options of `sparse-loop bench`, and which benchmarks each belongs to."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

BENCHMARKS = ("attention", "break-even", "decode", "prefill", "serve", "speculative", "tune")

_OPS = ("attention", "break-even", "decode", "prefill", "speculative")


@dataclasses.dataclass(frozen=True)
class _Option:
    name: str  # "--steps", or the name of a positional argument
    benchmarks: tuple[str, ...]
    default: Any = None
    help: str = ""
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def text(self) -> str:
        """Its help, with the benchmarks that have it and its default."""
        parts = [self.help] if self.help else []
        if self.default not in (None, False, "") and "default" not in self.help:
            parts.append(f"default: {self.default}")
        listed = "" if self.benchmarks == BENCHMARKS else ", ".join(self.benchmarks)
        return ": ".join(filter(None, (listed, "; ".join(parts))))


def _serve(name: str, default: Any = None, help: str = "", **more: Any) -> _Option:
    return _Option(name, ("serve",), default, help, more)


_FLAG = {"action": "store_true"}
_NUMBER = {"type": int, "metavar": "N"}
OPTIONS = (
    _Option("--shape", BENCHMARKS, "ouro-1.4b", "ouro-1.4b, ouro-2.6b or tiny"),
    _Option(
        "--dtype", BENCHMARKS, "bfloat16", more={"choices": ("bfloat16", "float32")}
    ),
    _Option("--cases", (*_OPS, "tune"), None, "BATCHxTOKENS, comma separated"),
    _Option(
        "--retentions",
        ("attention", "break-even", "decode", "serve", "speculative"),
        "",
        "sparse runs too, e.g. 0.1,0.05",
    ),
    _Option("--rows", ("attention",), "1,4", "rows that share pages"),
    _Option(
        "--steps", ("break-even", "decode", "speculative"), 32,
        "steps or rounds in one timing", _NUMBER,
    ),
    _Option("--repeats", _OPS, 5, "timings", _NUMBER),
    _Option(
        "--implementation", (*_OPS, "serve"), None,
        'of the ops: "xla" or "pallas"; attention: or "triton"',
    ),
    _Option("--no-peer", ("attention", "decode", "prefill"), False, "leave PyTorch out", _FLAG),
    _Option(
        "--device-file", ("break-even", "tune"), None, "default: DEVICE.json",
        {"metavar": "FILE"},
    ),
    _Option("--seconds", ("tune",), 120.0, "begin nothing after", {"type": float}),
    _Option(
        "--json", tuple(b for b in BENCHMARKS if b != "tune"), None,
        "write the rows here as well", {"metavar": "FILE"},
    ),
    _serve(
        "workload", None,
        'lines {"arrival": seconds, "prompt_tokens": N or "prompt": text or ids, '
        '"max_tokens": N, "priority": N}; without it, random requests',
        nargs="?", metavar="WORKLOAD",
    ),
    _serve("--model", None, "checkpoint directory or Hub id; default: random weights"),
    _serve("--revision", None, "commit of a Hub id"),
    _serve("--requests", 64, **_NUMBER),
    _serve(
        "--rate", float("inf"), "requests a second on average; default: all at once",
        type=float, metavar="R",
    ),
    _serve("--prompt-tokens", "32:256", metavar="A:B"),
    _serve("--output-tokens", "16:64", metavar="A:B"),
    _serve("--seed", 0, type=int),
    _serve("--max-num-seqs", 8, "requests at once", **_NUMBER),
    _serve("--max-context", None, "default: what the workload needs", **_NUMBER),
    _serve("--max-prefill-tokens", 2048, **_NUMBER),
    _serve("--num-pages", None, "of K/V, over all loops", **_NUMBER),
    _serve("--prefix-caching", False, **_FLAG),
    _serve("--policy", "fcfs", choices=("fcfs", "priority")),
    _serve("--speculative-tokens", None, type=int, metavar="K"),
    _serve("--draft-loops", None, "default: 2", type=int, metavar="d"),
    _serve("--no-warm-up", False, "compile while measuring", **_FLAG),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", choices=BENCHMARKS)
    for option in OPTIONS:
        # Without a value in the namespace, so that it is seen which were given.
        parser.add_argument(
            option.name, default=argparse.SUPPRESS, help=option.text, **option.more
        )


def complete(args: argparse.Namespace) -> None:
    """Fills defaults in.

    Raises:
      ValueError: an option was given that the benchmark does not have.
    """
    for option in OPTIONS:
        if not hasattr(args, option.dest):
            setattr(args, option.dest, option.default)
        elif args.benchmark not in option.benchmarks:
            raise ValueError(
                f"{option.name} is for bench {', '.join(option.benchmarks)}, and bench "
                f"{args.benchmark} would not use it: leave it out"
            )

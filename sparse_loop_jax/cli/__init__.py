"""The command line: `sparse-loop COMMAND ...`.

Each command is a module of this package with `HELP`, `add_arguments(parser)` and
`run(args) -> int`. Such a module imports nothing heavy before `run`, so that help and
complaints about arguments come at once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from sparse_loop_jax.cli import naming

COMMANDS = ("generate", "convert", "inspect", "evaluate", "bench", "serve")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `args.run` is the function to call."""
    parser = argparse.ArgumentParser(
        prog="sparse-loop", description="Fast inference for looped language models in JAX."
    )
    try:
        version = importlib.metadata.version("sparse-loop-jax")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed: run from a source tree)"
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        naming.show_defaults(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments; None: those of the process.

    Returns:
      The exit status: 0, or 2 after a complaint about files, values or the device's memory,
      on one line of standard error; 130 after an interrupt, 141 where nobody reads the
      output any more. Anything else is a bug, and keeps its traceback.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130  # as a shell has it of a program that the interrupt ended
    except BrokenPipeError:
        # Who read the output has gone, as `head` does; nor can the rest be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        return _complain(naming.with_options(str(error), args))
    except (RuntimeError, MemoryError) as error:
        from sparse_loop_jax.checks import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        return _complain(_out_of_memory(error))


def _complain(message: str) -> int:
    print(f"sparse-loop: error: {message}", file=sys.stderr)
    return 2


def _out_of_memory(error: BaseException) -> str:
    """One line of what JAX said, and of what the library had planned where it knows."""
    said = next(iter(str(error).splitlines()), "") or "the host has no more"
    plans = getattr(error, "__notes__", [])
    return "; ".join(["out of memory: " + said.removeprefix("RESOURCE_EXHAUSTED: "), *plans])

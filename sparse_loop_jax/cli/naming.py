"""Options as their users know them: by their own names in errors, with defaults in help."""

from __future__ import annotations

import argparse
import re

# Parameters of the library whose options have another name; the first one that the command
# has is meant.
_RENAMED = {
    "key_retention": ("retention", "retentions"),
    "num_speculative_tokens": ("speculative_tokens",),
    "memory_bytes": ("kv_memory",),
    "sparse=": ("retention", "retentions"),
    "speculative=": ("speculative_tokens",),
}
# What fields of a workload's lines are called too.
_AMBIGUOUS = {"prompt_tokens"}


def with_options(message: str, args: argparse.Namespace) -> str:
    """An error of the library with the command's options in place of its parameters.

    Names of several words are replaced anywhere, and one that is a plain word at the
    beginning, before "must be".
    """
    options = {name: name for name in vars(args) if "_" in name and name not in _AMBIGUOUS}
    for parameter, names in _RENAMED.items():
        options.update((parameter, name) for name in reversed(names) if name in args)
    for parameter, name in options.items():
        flag = "--" + name.replace("_", "-")
        message = re.sub(rf"(?<![\w/.-]){parameter}=None\b", f"no {flag}", message)
        message = re.sub(rf"(?<![\w/.-]){parameter}(?![\w/.-])", flag, message)
    begins = re.match(r"(\w+) must be ", message)
    return f"--{message}" if begins and begins[1] in args else message


def show_defaults(parser: argparse.ArgumentParser) -> None:
    """Adds defaults to the help of the options that do not say theirs."""
    for action in parser._actions:
        default = action.default
        if default is None or default is False or default == argparse.SUPPRESS:
            continue
        if action.option_strings and "default" not in (action.help or ""):
            action.help = f"{action.help}; default: %(default)s".removeprefix("None; ")

"""A progress line on a terminal while programs compile and tokens come."""

from __future__ import annotations

import sys
import types
from typing import Self


class TerminalBar:
    """A line on standard error while the context is open; none where `enabled` is False."""

    def __init__(self, enabled: bool):
        self._bar = None
        if not enabled:
            return
        from rich import console, progress

        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console.Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: types.TracebackType | type | BaseException | None) -> None:
        if self._bar is not None:
            self._bar.stop()


class Progress(TerminalBar):
    """Shows prompt tokens, then generated tokens.

    `generated` is told the total so far, after each stretch of the device loop.
    """

    def __init__(self, enabled: bool, prompt_tokens: int, new_tokens: int):
        super().__init__(enabled)
        if self._bar is not None:
            self._prompt = self._bar.add_task("compile and prefill", total=prompt_tokens)
            self._new = self._bar.add_task("generate", total=new_tokens, start=False)

    def prefilled(self, tokens: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._prompt, tokens)

    def generated(self, tokens: int) -> None:
        if self._bar is not None:
            self._bar.start_task(self._new)
            self._bar.update(self._new, completed=tokens)


def on_terminal() -> bool:
    """Whether a person is likely to watch: standard error is a terminal."""
    return sys.stderr.isatty()

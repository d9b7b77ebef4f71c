"""One progress line for an evaluation of many parts."""

from __future__ import annotations

import types

from sparse_loop_jax.generation.progress import on_terminal


class Steps:
    """Counts finished parts on a terminal's standard error; silent elsewhere.

    Args:
      total: parts in all.
      enabled: None: if standard error is a terminal.
    """

    def __init__(self, total: int, enabled: bool | None = None):
        self._bar = None
        if not (on_terminal() if enabled is None else enabled):
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
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: types.TracebackType | type | BaseException | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """Names the part that runs now."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def done(self) -> None:
        """One part is finished."""
        if self._bar is not None:
            self._bar.advance(self._task)

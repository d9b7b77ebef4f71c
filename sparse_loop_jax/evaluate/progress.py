"""How far an evaluation of many parts is."""

from __future__ import annotations

from collections.abc import Callable

from sparse_loop_jax.generation.progress import TerminalBar, on_terminal


class Steps(TerminalBar):
    """Counts finished parts: a bar on a terminal's standard error, or a line for each.

    Args:
      total: parts in all.
      shown: whether there is a bar; None: if standard error is a terminal. Or a function,
        which gets a line for each part when it begins.
    """

    def __init__(self, total: int, shown: bool | Callable[[str], None] | None = None):
        self._note = shown if callable(shown) else None
        bar = on_terminal() if shown is None else shown is True
        super().__init__(bar)
        self._total, self._finished = total, 0
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total)

    def begin(self, what: str) -> None:
        """Names the part that runs now."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)
        if self._note is not None:
            self._note(f"{self._finished + 1}/{self._total} {what}")

    def done(self) -> None:
        """One part is finished."""
        self._finished += 1
        if self._bar is not None:
            self._bar.advance(self._task)

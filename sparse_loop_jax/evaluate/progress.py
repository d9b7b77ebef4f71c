"""One progress line for an evaluation of many parts."""

from __future__ import annotations

from sparse_loop_jax.generation.progress import TerminalBar, on_terminal


class Steps(TerminalBar):
    """Counts finished parts on a terminal's standard error; silent elsewhere.

    Args:
      total: parts in all.
      enabled: None: if standard error is a terminal.
    """

    def __init__(self, total: int, enabled: bool | None = None):
        super().__init__(on_terminal() if enabled is None else enabled)
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total)

    def begin(self, what: str) -> None:
        """Names the part that runs now."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def done(self) -> None:
        """One part is finished."""
        if self._bar is not None:
            self._bar.advance(self._task)

"""What a run wrote about itself: its settings and its log."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from .options import schedule_of


def read_log(run: Path) -> list[dict]:
    """The lines of a run's log but for what a kill has torn; none where there is no log."""
    path = run / "log.jsonl"
    lines = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def lines_of(log: Sequence[dict], kind: str) -> list[dict]:
    """The lines of one kind."""
    return [line for line in log if line["kind"] == kind]


@dataclasses.dataclass(frozen=True)
class End:
    """Where a run stands.

    Attributes:
      step, seconds: of training.
      tokens: trained on; None where the log does not say.
      reached: part of the budget that was spent, at most 1.
    """

    step: int
    seconds: float
    tokens: int | None
    reached: float


@dataclasses.dataclass(frozen=True)
class Record:
    """A run's `settings.json` and the lines of its `log.jsonl`."""

    settings: dict
    log: Sequence[dict]

    def end(self) -> End:
        """Where it stands.

        Raises:
          ValueError: its log says neither that it is done nor that it was paused.
        """
        marks = [line for line in self.log if line["kind"] in ("start", "paused", "done")]
        if not marks or marks[-1]["kind"] == "start":
            raise ValueError("the run is neither done nor paused: resume it (--resume)")
        last = marks[-1]
        if last["kind"] == "done":
            step, seconds = last["step"], last["seconds"]
            reached = schedule_of(self.settings).progress(step, seconds)
            return End(step, seconds, last["tokens"], min(1.0, reached))
        steps = lines_of(self.log, "step")
        seconds = steps[-1]["seconds"] if steps else 0.0
        return End(last["step"], seconds, None, last["progress"])


def read_record(run: Path) -> Record:
    """The record in a run's folder.

    Raises:
      ValueError: there is none.
    """
    path = run / "settings.json"
    if not path.is_file():
        raise ValueError(f"{run} has no run in it: name the --out of a training")
    return Record(json.loads(path.read_text("utf-8")), read_log(run))

"""How a run spends its budget: stages of rows, chains, and the learning rate."""

from __future__ import annotations

import dataclasses
import math

from .hops import MAX_HOPS


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a run.

    Attributes:
      until: progress at which it ends.
      length: tokens of a row.
      tokens: of a step, a multiple of `length`.
      synthetic: share of rows that hold a paper of a task.

    Raises:
      ValueError: rows that do not fill the step.
    """

    until: float
    length: int
    tokens: int
    synthetic: float

    def __post_init__(self):
        if self.length < 1 or self.tokens < 1 or self.tokens % self.length:
            raise ValueError(
                f"the tokens of a step ({self.tokens}) must be a multiple of those of a row "
                f"({self.length})"
            )
        if not 0 <= self.synthetic <= 1:
            raise ValueError(f"a share of rows must be in [0, 1], got {self.synthetic}")

    @property
    def rows(self) -> int:
        """Of a step."""
        return self.tokens // self.length


# Retrieval has to be found before there is anything to follow: many small steps on short rows,
# most of them tasks. Then text, and length; less text than tasks, because there is so
# little of it that it would be learnt by heart.
STAGES = "0.22:256:32768:0.85,0.34:512:65536:0.6,0.72:2048:131072:0.75,1:8192:131072:0.75"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A plan over progress, the part of the budget that is spent, in [0, 1].

    Attributes:
      steps, minutes: the budget; exactly one of them. Minutes are those of training steps,
        compilation and evaluation left out.
      stages: in rising order; the last ends at 1.
      peak: learning rate.
      warmup: steps of linear rise.
      floor: of the cosine, as a part of the peak.
      hops_from, hops_by: progress up to which chains have one step, and at which they have
        their full length.
      until: progress at which the run ends. All else is planned for the whole budget, so that
        a run can end while its rate is high, for another one to go on from its weights.

    Raises:
      ValueError: no budget or two, stages that do not end at 1, chains that do not grow, or an
        end outside of (0, 1].
    """

    steps: int | None = None
    minutes: float | None = None
    stages: tuple[Stage, ...]
    peak: float = 3e-3
    warmup: int = 100
    floor: float = 0.02
    hops_from: float = 0.06
    hops_by: float = 0.17
    until: float = 1.0

    def __post_init__(self):
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give a budget either in steps or in minutes")
        budget = self.steps if self.minutes is None else self.minutes
        if not budget or budget <= 0:
            raise ValueError(f"the budget must be positive, got {budget}")
        ends = [stage.until for stage in self.stages]
        if not ends or ends != sorted(ends) or ends[-1] != 1.0:
            raise ValueError(f"stages must rise to an end of 1, got {self.stages}")
        if not 0 <= self.hops_from < self.hops_by:
            raise ValueError(
                f"chains must begin to grow before they end to: hops_from={self.hops_from}, "
                f"hops_by={self.hops_by}"
            )
        if not 0 < self.until <= 1:
            raise ValueError(f"a run ends at a progress in (0, 1]: --until got {self.until}")

    def progress(self, step: int, seconds: float) -> float:
        """Part of the budget spent after `step` steps and so many seconds of training."""
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None
        return seconds / (60 * self.minutes)

    def done(self, step: int, seconds: float) -> bool:
        """Whether the run ends after `step` steps and so many seconds of training."""
        return self.progress(step, seconds) >= self.until

    def stage(self, progress: float) -> Stage:
        """The stage at some progress."""
        return next((s for s in self.stages if progress < s.until), self.stages[-1])

    def hops(self, progress: float) -> int:
        """Most steps of a several-hop question."""
        share = (progress - self.hops_from) / (self.hops_by - self.hops_from)
        share = min(1.0, max(0.0, share))
        return max(1, min(MAX_HOPS, 1 + int(share * (MAX_HOPS - 1))))

    def rate(self, step: int, progress: float) -> float:
        """Learning rate: linear warm-up, then a cosine to `floor` of the peak."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        return self.peak * rise * (self.floor + (1 - self.floor) * cosine)


def parse_stages(text: str, *, tokens: int, synthetic: float) -> tuple[Stage, ...]:
    """Stages such as "0.5:512,1:2048:65536:0.3": until which progress, tokens of a row, and
    where they differ from the arguments tokens of a step and the share of tasks.

    Raises:
      ValueError: anything else.
    """
    stages = []
    for part in text.split(","):
        fields = part.split(":")
        try:
            until, length, per_step, share = fields + [tokens, synthetic][len(fields) - 2 :]
            stages.append(Stage(float(until), int(length), int(per_step), float(share)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                "stages look like 0.5:512,1:2048:65536:0.3 (until which progress, tokens of a "
                f"row, tokens of a step, share of tasks), got {part!r}: {error}"
            ) from error
    return tuple(stages)

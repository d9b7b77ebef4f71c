"""How a run spends its budget: length of rows, chains, and the learning rate."""

from __future__ import annotations

import dataclasses
import math

from .hops import MAX_HOPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A plan over progress, the part of the budget that is spent, in [0, 1].

    Attributes:
      steps, minutes: the budget; exactly one of them. Minutes are those of training steps,
        compilation and evaluation left out.
      lengths: (progress up to which, tokens of a row), in rising order; the last ends at 1.
      peak: learning rate.
      warmup: steps of linear rise.
      floor: of the cosine, as a part of the peak.
      hops_by: progress at which chains have their full length; they start at 1.

    Raises:
      ValueError: no budget or two, or lengths that do not end at 1.
    """

    steps: int | None = None
    minutes: float | None = None
    lengths: tuple[tuple[float, int], ...] = ((0.35, 512), (0.75, 2048), (1.0, 8192))
    peak: float = 3e-3
    warmup: int = 100
    floor: float = 0.02
    hops_by: float = 0.4

    def __post_init__(self):
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give a budget either in steps or in minutes")
        budget = self.steps if self.minutes is None else self.minutes
        if not budget or budget <= 0:
            raise ValueError(f"the budget must be positive, got {budget}")
        ends = [end for end, _ in self.lengths]
        if not ends or ends != sorted(ends) or ends[-1] != 1.0:
            raise ValueError(f"lengths must rise to an end of 1, got {self.lengths}")

    def progress(self, step: int, seconds: float) -> float:
        """Part of the budget spent after `step` steps and so many seconds of training."""
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None
        return seconds / (60 * self.minutes)

    def length(self, progress: float) -> int:
        """Tokens of a row."""
        return next((size for end, size in self.lengths if progress < end), self.lengths[-1][1])

    def hops(self, progress: float) -> int:
        """Most steps of a several-hop question."""
        share = min(1.0, progress / self.hops_by)
        return max(1, min(MAX_HOPS, 1 + int(share * (MAX_HOPS - 1))))

    def rate(self, step: int, progress: float) -> float:
        """Learning rate: linear warm-up, then a cosine to `floor` of the peak."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        return self.peak * rise * (self.floor + (1 - self.floor) * cosine)


def parse_lengths(text: str) -> tuple[tuple[float, int], ...]:
    """Stages such as "0.35:512,0.75:2048,1:8192".

    Raises:
      ValueError: anything else.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((float(end), int(size)) for end, size in pairs)
    except ValueError:
        raise ValueError(
            f"lengths look like 0.35:512,0.75:2048,1:8192 (until which progress: tokens), got "
            f"{text!r}"
        ) from None

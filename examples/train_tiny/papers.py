"""A document of a synthetic task, as tokens with marks on what is to be answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

# Of so many tokens, a passage of prose to put between what matters.
Prose = Callable[[np.random.Generator, int], np.ndarray]


@dataclasses.dataclass
class Paper:
    """Tokens, which of them answer a question, and what shallow loops should say there.

    Attributes:
      ids: the tokens.
      answers: index of each token of an answer.
      staged: index of an answer's token -> what loop 0, 1, ... should predict there.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    answers: list[int] = dataclasses.field(default_factory=list)
    staged: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, *pieces: Iterable[int]) -> None:
        """Appends tokens that are only read."""
        for piece in pieces:
            self.ids.extend(piece)

    def answer(self, ids: Iterable[int], staged: tuple[int, ...] | None = None) -> None:
        """Appends tokens that answer; `staged` is for one token."""
        for token in ids:
            self.answers.append(len(self.ids))
            if staged is not None:
                self.staged[len(self.ids)] = staged
            self.ids.append(token)


def spread(rng: np.random.Generator, total: int, parts: int) -> np.ndarray:
    """Cuts `total` tokens of prose into `parts` gaps of random sizes, some of them empty."""
    if parts == 0 or total <= 0:
        return np.zeros(parts, int)
    cuts = np.sort(rng.integers(0, total + 1, parts - 1))
    return np.diff(np.concatenate([[0], cuts, [total]]))

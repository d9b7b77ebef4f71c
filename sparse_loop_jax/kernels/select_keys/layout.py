"""How a row of scores lies in the program that selects from it."""

from __future__ import annotations

import dataclasses

GROUP = 128  # scores of one warp in one group: 32 threads times 4
# The keys of a row that its program holds in registers: 64 for each of 512 threads.
RESIDENT = 1 << 15
# What a row may have beyond them and still need no second reading: a context of a power of
# two and the tokens that follow it.
TAIL = 1 << 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """How a row is laid out; powers of two.

    Attributes:
      num_warps: warps of a program.
      groups: groups of `num_warps * GROUP` scores that stay in registers.
      tail: further groups that do, or 0.
      short: groups in place of `groups` for rows that fit into so many and the tail, or 0.
    """

    num_warps: int
    groups: int
    tail: int = 0
    short: int = 0

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name in ("tail", "short") else 1
            if value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")

    @property
    def resident(self) -> int:
        """Scores in registers, but for the tail."""
        return self.groups * self.num_warps * GROUP

    @property
    def reach(self) -> int:
        """Scores in registers, the tail among them."""
        return self.resident + self.tail * self.num_warps * GROUP


def choose_config(span: int, num_warps: int | None = None) -> SelectConfig:
    """A layout for rows of `span` scores; None: as many warps as were good on an H200."""
    keys = min(span, RESIDENT)
    # A table that has just become too narrow is doubled: most rows then fill half of it.
    halved = RESIDENT // 4 < span <= RESIDENT // 2
    if num_warps is None:
        each = 4 if span <= RESIDENT // 16 else 16 if halved else 8  # groups
        num_warps = min(max(_power_of_two(keys) // (each * GROUP), 1), 16)
    groups = _power_of_two(-(-keys // (num_warps * GROUP)))
    beyond = max(TAIL // (num_warps * GROUP), 1)
    return SelectConfig(
        num_warps=num_warps,
        groups=groups,
        tail=1 if halved else beyond if span > RESIDENT else 0,
        short=groups // 2 if halved else 0,
    )


def _power_of_two(count: int) -> int:
    """The smallest that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()

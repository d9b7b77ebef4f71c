"""Several-hop questions: follow a chain of pointers through records.

    From rose go to lantern.
    From wagon go to rose.
    ...
    From wagon take 2 steps to lantern.
    From wagon take 6 steps to harbor bell.

The pointers form one cycle, so that every record is the start of a chain of any length and
nothing but following it gives the answer. An answer names the node after every fourth step and
the last one: a token of it stands for up to four steps, with no room to write those in between
down. They have to be taken in the loops.
"""

from __future__ import annotations

import dataclasses

import numpy as np

MAX_HOPS = 8
STRIDE = 4  # steps from one named node to the next


@dataclasses.dataclass(frozen=True)
class Chain:
    """A cycle of pointers and questions about it."""

    nodes: np.ndarray  # indices of names in the order of the cycle, [N]
    order: np.ndarray  # positions in the cycle in the order of the records, [N]
    starts: np.ndarray  # position in the cycle where each question starts, [Q]
    hops: np.ndarray  # steps of each question, [Q], 1 to MAX_HOPS

    def after(self, question: int, steps: int) -> int:
        """The name reached from a question's start after so many steps."""
        return int(self.nodes[(self.starts[question] + steps) % len(self.nodes)])

    def records(self) -> list[tuple[int, int]]:
        """Pairs of names (from, to), as the records list them."""
        following = np.roll(self.nodes, -1)
        return [(int(self.nodes[i]), int(following[i])) for i in self.order]


def draw_chain(
    rng: np.random.Generator,
    *,
    names: int,
    nodes: int,
    questions: int,
    hops: int | np.ndarray = MAX_HOPS,
) -> Chain:
    """A random cycle of `nodes` of the `names`, and questions.

    Args:
      hops: the most steps of a question (drawn uniformly from 1), or the steps of each.

    Raises:
      ValueError: fewer nodes than steps and one more, or fewer names than nodes.
    """
    steps = rng.integers(1, hops + 1, questions) if isinstance(hops, int) else hops
    if not int(np.max(steps)) < nodes <= names:
        raise ValueError(
            f"a cycle of {nodes} of {names} names does not fit chains of {np.max(steps)} steps:"
            " nodes must be more than the steps and not more than the names"
        )
    return Chain(
        nodes=rng.choice(names, nodes, replace=False),
        order=rng.permutation(nodes),
        starts=rng.integers(0, nodes, questions),
        hops=np.asarray(steps),
    )


def waypoints(hops: int) -> list[int]:
    """After how many steps a node is named in an answer.

    >>> waypoints(3), waypoints(6), waypoints(8)
    ([3], [4, 6], [4, 8])
    """
    return [*range(STRIDE, hops, STRIDE), hops]


def loop_hops(hops: int, loop: int, loops: int, per_loop: int | None) -> int:
    """Steps that loop `loop` (from 0) is asked to have taken of the `hops` to the next name.

    >>> [loop_hops(3, d, 4, 1) for d in range(4)], [loop_hops(3, d, 4, None) for d in range(4)]
    ([1, 2, 3, 3], [3, 3, 3, 3])

    The last loop is always asked for the answer.
    """
    if per_loop is None or loop == loops - 1:
        return hops
    return min(hops, per_loop * (loop + 1))

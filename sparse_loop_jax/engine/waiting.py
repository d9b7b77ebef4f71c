"""Who is next: requests that wait, in order, with a bound on being passed over."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from sparse_loop_jax.engine.request import Request


class WaitingQueue:
    """Waiting requests by rank: those passed over too often, then by policy.

    The rank of a running request decides whose pages are taken last, so that the first in
    rank always makes progress.
    """

    def __init__(self, policy: str, max_bypasses: int):
        self._by_priority = policy == "priority"
        self._max_bypasses = max_bypasses
        self._requests: list[Request] = []  # sorted by rank

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def rank(self, request: Request) -> tuple[bool, int, int]:
        """Sorts first what is to be served first."""
        protected = self.is_protected(request)
        priority = request.priority if self._by_priority and not protected else 0
        return not protected, priority, request.arrival

    def is_protected(self, request: Request) -> bool:
        """Whether it was passed over as often as it may be: nobody goes before it now."""
        return request.bypasses >= self._max_bypasses

    def add(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=self.rank)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def first(self, count: int) -> list[Request]:
        return self._requests[:count]

    def admit(self, request: Request) -> None:
        """Takes a request out, and counts it against those that came before it."""
        self._requests.remove(request)
        passed = [r for r in self._requests if r.arrival < request.arrival]
        for other in passed:
            other.bypasses += 1
        if passed:
            self._requests.sort(key=self.rank)

    def clear(self) -> None:
        self._requests.clear()

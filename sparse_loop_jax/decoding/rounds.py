"""The host's side of decoding: rounds submitted ahead of their results."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

from sparse_loop_jax.decoding import references
from sparse_loop_jax.decoding.speculative import speculative_step
from sparse_loop_jax.decoding.state import DecodeState, RoundCounters, RoundOutput
from sparse_loop_jax.decoding.steps import decode_step
from sparse_loop_jax.models.params import OuroParams
from sparse_loop_jax.sparse import store as reference_store

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Round:
    """A round's results on the host."""

    tokens: np.ndarray  # int32 [B, n]
    count: np.ndarray  # int32 [B]; the first so many were emitted
    exit_loops: np.ndarray | None  # int32 [B, n]; see `RoundOutput`
    counters: RoundCounters


class RoundDriver:
    """Runs rounds on a state, at most `max_outstanding` of them ahead of their results.

    `submit` never reads from the device: the next round's inputs are device state.
    `collect` reads the oldest round, and the next submission retires its lease. A failure
    of either drops the state, which was donated, and everything outstanding; the driver is
    closed then and the error goes on.

    Use as a context manager, or call `close`.

    Args:
      params: the weights.
      state: where to begin; belongs to the driver from now on.
      max_outstanding: rounds submitted and not collected, at most.
      step: what a round runs; None: `decode_step` or `speculative_step`, by the spec.
    """

    def __init__(
        self,
        params: OuroParams,
        state: DecodeState,
        *,
        max_outstanding: int = 2,
        step: Callable[..., tuple[DecodeState, RoundOutput]] | None = None,
    ):
        if max_outstanding < 1:
            raise ValueError(f"max_outstanding must be at least 1, got {max_outstanding}")
        plain = state.spec.speculative is None
        self._step = step or (decode_step if plain else speculative_step)
        self._params = params
        self._state: DecodeState | None = state
        self._none = references.no_lease(state)
        self._max_outstanding = max_outstanding
        self._outputs: collections.deque[RoundOutput] = collections.deque()
        self._retired: collections.deque = collections.deque()

    def __enter__(self) -> RoundDriver:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def outstanding(self) -> int:
        """Rounds submitted and not collected."""
        return len(self._outputs)

    @property
    def can_submit(self) -> bool:
        return self._state is not None and self.outstanding < self._max_outstanding

    @property
    def state(self) -> DecodeState:
        """The state after the rounds submitted so far.

        Raises:
          RuntimeError: the driver is closed.
        """
        if self._state is None:
            raise RuntimeError("the driver of these rounds is closed")
        return self._state

    def edit(self, change: Callable[[DecodeState], tuple[DecodeState, _T]]) -> _T:
        """Changes the state between two rounds; it may be donated, and nothing is awaited.

        Args:
          change: from the state to the next one and a result, which is returned. Batch,
            rows of a round and slots stay; slots keep their versions.

        Raises:
          RuntimeError: the driver is closed.
        """
        try:
            self._state, result = change(self.state)
        except BaseException:
            self.close()
            raise
        return result

    def submit(self) -> None:
        """Submits the next round.

        Raises:
          RuntimeError: too many are outstanding, or the driver is closed.
        """
        state = self.state
        if not self.can_submit:
            raise RuntimeError(f"{self.outstanding} rounds are outstanding: collect one first")
        retire = self._retired.popleft() if self._retired else self._none
        try:
            self._state, output = self._step(self._params, state, retire)
            # Begun, not waited for: allowed also where a guard forbids reads.
            with jax.transfer_guard_device_to_host("allow"):
                for array in jax.tree.leaves(_read(output)):
                    array.copy_to_host_async()
        except BaseException:
            self.close()
            raise
        self._outputs.append(output)

    def collect(self) -> Round:
        """Waits for the oldest round and returns what it emitted.

        Raises:
          RuntimeError: none is outstanding.
          StaleLeaseError: the round was refused a reference.
        """
        if not self._outputs:
            raise RuntimeError("no round is outstanding: submit one first")
        output = self._outputs.popleft()
        try:
            done = Round(*jax.device_get(_read(output)))
            reference_store.check(round=done.counters.refused)
        except BaseException:
            self.close()
            raise
        self._retired.append(output.lease)
        return done

    def retire(self) -> None:
        """Frees the slots of the collected rounds now, and not with the next submission.

        Raises:
          RuntimeError: the driver is closed.
        """
        state = self.state
        try:
            while self._retired:
                state = references.retire(state, self._retired.popleft())
        except BaseException:
            self.close()
            raise
        self._state = state

    def drain(self) -> DecodeState:
        """Drops outstanding rounds unread, retires every lease, and returns the state."""
        state = self.state
        leases = [*self._retired, *(output.lease for output in self._outputs)]
        for lease in leases:
            state = references.retire(state, lease)
        self.close()
        return state

    def close(self) -> None:
        """Lets go of everything. Twice is once."""
        self._state = None
        self._outputs.clear()
        self._retired.clear()


def _read(output: RoundOutput) -> tuple:
    """What the host reads of a round: the fields of `Round`."""
    return output.tokens, output.count, output.exit_loops, output.counters

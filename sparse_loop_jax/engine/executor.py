"""The device's side of an engine: a state, its driver of rounds, and outputs not yet read.

No policy: who runs and with which pages is decided elsewhere. Nothing but `collect` and
`swap_out` waits for the device.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from sparse_loop_jax.decoding.config import DecodeSpec
from sparse_loop_jax.decoding.rounds import RoundDriver
from sparse_loop_jax.decoding.sampling import seed_words
from sparse_loop_jax.decoding.state import DecodeState, RoundCounters
from sparse_loop_jax.engine import device
from sparse_loop_jax.engine.request import Request, SwappedPages
from sparse_loop_jax.engine.rows import RowData, empty_rows
from sparse_loop_jax.engine.sizing import Sizing
from sparse_loop_jax.generation.prompts import Emitted
from sparse_loop_jax.models.params import OuroParams

# Blocks that are copied to or from the host at once: bounds what the copy takes.
_SWAP_BLOCKS = 16


@dataclasses.dataclass(frozen=True)
class Ticket:
    """An output on the device and whose it is."""

    places: list[tuple[int, Request]]  # row of the output, request
    prompt: Emitted | None  # None: the driver's oldest


@dataclasses.dataclass(frozen=True)
class Collected:
    """A ticket's output on the host."""

    emitted: list[tuple[Request, list[int], list[int]]]  # tokens, and the loops they left
    counters: RoundCounters | None  # of a round


class Executor:
    """Runs prompts, rounds and changes of rows in the order of the calls."""

    def __init__(
        self, params: OuroParams, spec: DecodeSpec, sizing: Sizing, dtype, max_outstanding: int
    ):
        self.sizing = sizing
        self._params: OuroParams | None = params
        self.spec = spec
        self._dtype = dtype
        self._max_outstanding = max_outstanding
        self.sizes = sizing.sizes_at(1)
        self.tickets: collections.deque[Ticket] = collections.deque()
        self._driver: RoundDriver | None = None

    # Life ------------------------------------------------------------------------------

    def open(self) -> None:
        """Allocates the state, where there is none, at the sizes of the last one."""
        if self._driver is not None:
            return
        assert self._params is not None
        counts = self.sizing.key_counts(self.sizes)
        state = device.new_state(self.spec, self.sizes, self._dtype, counts)
        self._driver = RoundDriver(self._params, state, max_outstanding=self._max_outstanding)

    def drop(self) -> None:
        """Lets go of the state and of all outputs, unread."""
        for ticket in self.tickets:
            for _, request in ticket.places:
                request.pending = request.pending_rounds = 0
        self.tickets.clear()
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def close(self) -> None:
        self.drop()
        self._params = None

    @property
    def is_open(self) -> bool:
        return self._driver is not None

    @property
    def driver(self) -> RoundDriver:
        if self._driver is None:
            raise RuntimeError("the engine has no state on the device")
        return self._driver

    @property
    def can_submit(self) -> bool:
        return self.driver.can_submit

    # Work ------------------------------------------------------------------------------

    def prefill(self, parts: Sequence[tuple[Request, int]], rows: int, chunk: int) -> None:
        """Submits the next tokens of some prompts, in a program of `rows` rows.

        Args:
          parts: requests and how many of their next prompt tokens, at most `chunk`.
        """
        data = empty_rows(rows, self.sizes)
        tokens = np.zeros((rows, chunk), np.int32)
        valid, ends = np.zeros(rows, np.int32), np.zeros(rows, bool)
        for i, (request, count) in enumerate(parts):
            start = request.prefilled
            self._describe(data, i, request, position=start, token=0)
            tokens[i, :count] = request.prompt[start : start + count]
            valid[i] = count
            ends[i] = start + count == len(request.prompt)
        requests = [request for request, _ in parts]
        sampled, early_exit = _readout(requests)

        def run(state: DecodeState):
            return device.prefill_rows(
                self._checked_params(), state, data, tokens, valid, ends,
                sampled=sampled, early_exit=early_exit,
            )  # fmt: skip

        emitted = self.driver.edit(run)
        places = []
        for i, (request, count) in enumerate(parts):
            request.prefilled += count
            if ends[i]:
                request.blocks_on_device = len(request.blocks)
                request.pending += 1
                places.append((i, request))
        if places:
            for array in jax.tree.leaves(emitted):
                array.copy_to_host_async()
            self.tickets.append(Ticket(places, emitted))

    def submit_round(self, requests: Sequence[Request]) -> None:
        """Submits a round; `requests` are all whose rows may be live in it."""
        sampled, early_exit = _readout(requests)

        def choose(state: DecodeState):
            return device.with_readout(state, sampled=sampled, early_exit=early_exit), None

        self.driver.edit(choose)
        self.driver.submit()
        for request in requests:
            request.pending += 1
            request.pending_rounds += 1
        self.tickets.append(Ticket([(_row(r), r) for r in requests], None))

    def collect(self) -> Collected:
        """Waits for the oldest output and hands it out."""
        ticket = self.tickets[0]
        counters = None
        if ticket.prompt is None:
            done = self.driver.collect()
            tokens, count, exit_loops = done.tokens, done.count, done.exit_loops
            counters = done.counters
        else:
            tokens, count, exit_loops = jax.device_get(ticket.prompt)
        if exit_loops is None:
            exit_loops = np.full_like(tokens, self.sizing.loops)
        self.tickets.popleft()
        emitted = []
        for place, request in ticket.places:
            request.pending -= 1
            request.pending_rounds -= ticket.prompt is None
            n = count[place]
            emitted.append(
                (request, tokens[place, :n].tolist(), exit_loops[place, :n].tolist())
            )
        return Collected(emitted, counters)

    def settle(self) -> None:
        """Frees the slots of the rounds that were collected, since no other follows soon."""
        self.driver.retire()

    # Rows and pages --------------------------------------------------------------------

    def apply(self, grown: Sequence[Request], killed: Sequence[int]) -> None:
        """Tells the device of new blocks of live requests, and of rows that have ended."""
        entries = [
            (_row(request), place, request.blocks[place])
            for request in grown
            for place in range(request.blocks_on_device, len(request.blocks))
        ]
        kill = np.zeros(self.sizes.rows, bool)
        kill[list(killed)] = True
        size = self.sizes.rows * (1 + -(-self.spec.rows // self.sizes.page_size))
        for first in range(0, max(len(entries), 1 if len(killed) else 0), size):
            part = entries[first : first + size]
            edit = np.full((size, 3), self.sizes.rows, np.int32)
            edit[: len(part)] = np.reshape(part, (-1, 3))
            self.driver.edit(
                lambda state, edit=edit: (device.edit_rows(state, edit, kill), None)
            )
        for request in grown:
            request.blocks_on_device = len(request.blocks)

    def swap_out(self, request: Request) -> None:
        """Copies a live request's written pages to the host and ends its row.

        No output with the request in it may be outstanding.
        """
        if request.pending:
            raise RuntimeError(f"request {request.id!r} has rounds outstanding")
        state = self.driver.state
        pools = (state.cache.keys, state.cache.values)
        parts = [
            jax.device_get(device.take_pages(pools, pages)) for pages in self._written(request)
        ]
        history = None
        if state.history is not None:
            row = _row(request)
            accepted, judged = jax.device_get((state.history.accepted, state.history.judged))
            history = (accepted[row], judged[row])
        request.swapped = SwappedPages(parts, history)
        del state, pools
        self.apply([], [_row(request)])

    def swap_in(self, request: Request) -> None:
        """Puts a swapped request into its row and its first blocks; it is live then."""
        swapped = request.swapped
        assert swapped is not None
        data = empty_rows(1, self.sizes)
        self._describe(data, 0, request, position=request.position, token=request.tokens[-1])
        data.remaining[0] = request.remaining

        def restore(state: DecodeState):
            pools = (state.cache.keys, state.cache.values)
            for pages, part in zip(self._written(request), swapped.parts, strict=True):
                pools = device.put_pages(pools, pages, part)
            cache = dataclasses.replace(state.cache, keys=pools[0], values=pools[1])
            state = dataclasses.replace(state, cache=cache)
            return device.restore_row(state, data, swapped.history), None

        self.driver.edit(restore)
        request.blocks_on_device = len(request.blocks)
        request.swapped = None

    def resize(self, tokens: int) -> None:
        """Takes the bucket for requests of up to so many K/V tokens.

        No round may be outstanding, and every request must fit.
        """
        if self.driver.outstanding:
            raise RuntimeError(f"{self.driver.outstanding} rounds are outstanding")
        sizes = self.sizing.sizes_at(tokens)
        counts = self.sizing.key_counts(sizes)
        self.driver.edit(lambda state: (device.resize(state, sizes, counts), None))
        self.sizes = sizes

    def _written(self, request: Request) -> Iterator[np.ndarray]:
        """Pages that hold the request's tokens, int32, so many at a time.

        The last part is padded past the end of the pool: one shape for all.
        """
        loops = self.sizing.loops
        blocks = request.blocks[: self.sizing.blocks_for(request.position)]
        for first in range(0, len(blocks), _SWAP_BLOCKS):
            padded = np.full((_SWAP_BLOCKS, loops), self.sizes.num_blocks * loops, np.int32)
            for i, block in enumerate(blocks[first : first + _SWAP_BLOCKS]):
                padded[i] = self._pages(block)
            yield padded.ravel()

    def _pages(self, block: int) -> np.ndarray:
        """The pages of a block, by loop."""
        loops = self.sizing.loops
        return block * loops + np.arange(loops, dtype=np.int32)

    def _describe(
        self, data: RowData, i: int, request: Request, *, position: int, token: int
    ) -> None:
        params = request.params
        vocab = self.spec.config.vocab_size
        data.row[i] = _row(request)
        data.blocks[i, : len(request.blocks)] = request.blocks
        data.position[i] = position
        data.remaining[i] = params.max_tokens
        data.token[i] = token
        data.temperature[i] = params.temperature
        data.top_k[i] = vocab if params.top_k is None else min(params.top_k, vocab)
        data.top_p[i] = params.top_p
        data.exit_threshold[i] = request.exit_rule.threshold
        data.min_loops[i] = request.exit_rule.min_loops
        data.max_loops[i] = request.exit_rule.max_loops
        data.stop_ids[i, : len(request.stop_ids)] = request.stop_ids
        data.seed[i] = seed_words(params.seed)

    def _checked_params(self) -> OuroParams:
        assert self._params is not None
        return self._params


def _row(request: Request) -> int:
    assert request.row is not None, request.id
    return request.row


def _readout(requests: Sequence[Request]) -> tuple[bool, bool]:
    """What a program for these has to be capable of: sampling, leaving early."""
    return (
        any(r.params.sampled for r in requests),
        any(r.exit_rule.leaves_early for r in requests),
    )

"""Who gets a row and pages, and who gives them back. Host only: nothing here waits."""

from __future__ import annotations

import math

from sparse_loop_jax.engine.blocks import BlockPool, prompt_hashes
from sparse_loop_jax.engine.config import CacheConfig, SchedulerConfig
from sparse_loop_jax.engine.request import Request, Status
from sparse_loop_jax.engine.sizing import Sizing
from sparse_loop_jax.engine.waiting import WaitingQueue


class Scheduler:
    """Waiting requests, rows of the state, and the pool of blocks."""

    def __init__(
        self, cache: CacheConfig, scheduler: SchedulerConfig, sizing: Sizing, round_rows: int
    ):
        self._sizing = sizing
        self._round_rows = round_rows
        self._scan_limit = int(scheduler.scan_limit)
        self._prefix_caching = cache.enable_prefix_caching
        self._headroom = math.ceil(cache.watermark * sizing.num_blocks)
        self.waiting = WaitingQueue(scheduler.policy, int(scheduler.max_bypasses))
        self.reset()

    def reset(self) -> None:
        """Everything free and nobody known."""
        self.pool = BlockPool(self._sizing.num_blocks)
        self.running: list[Request] = []
        self.waiting.clear()
        self._free_rows = list(range(self._sizing.max_num_seqs - 1, -1, -1))

    @property
    def rows_in_use(self) -> int:
        return self._sizing.max_num_seqs - len(self._free_rows)

    def add(self, request: Request) -> None:
        if self._prefix_caching and not request.hashes:
            request.hashes = prompt_hashes(request.prompt, self._sizing.page_size)
        self.waiting.add(request)

    def admit(self) -> Request | None:
        """The next request that fits, with a row and the blocks of its prompt or its bytes.

        One that does not fit is passed over, until it was so often that it is protected.
        """
        for request in self.waiting.first(self._scan_limit):
            if not self._free_rows:
                return None
            if self._take_blocks(request):
                self.waiting.admit(request)
                request.row = self._free_rows.pop()
                self.running.append(request)
                request.status = Status.PREFILL if request.swapped is None else Status.DECODE
                return request
            if self.waiting.is_protected(request):
                return None
        return None

    def _take_blocks(self, request: Request) -> bool:
        sizing, pool = self._sizing, self.pool
        found = []
        if request.swapped is None:
            # The last token of a prompt is always run: its state gives the first new one.
            found = pool.find(request.hashes[: (len(request.prompt) - 1) // sizing.page_size])
        # Room for the first round too, or the request would be thrown out again at once.
        after = sizing.blocks_for(request.tokens_after_round(self._round_rows)) - len(found)
        spare = pool.available - sum(pool.is_kept(block) for block in found)
        if after > spare - (self._headroom if self.running else 0):
            return False
        for block in found:
            pool.share(block)
        new = pool.take(sizing.blocks_for(request.position) - len(found))
        assert new is not None
        request.blocks = found + new
        request.prefilled = request.reused = len(found) * sizing.page_size
        if request.swapped is not None:
            request.prefilled, request.reused = len(request.prompt), 0
        return True

    def grow(self, request: Request) -> bool:
        """Blocks for one more round, or False and no change where there are too few."""
        tokens = request.tokens_after_round(self._round_rows)
        new = self.pool.take(max(0, self._sizing.blocks_for(tokens) - len(request.blocks)))
        if new is None:
            return False
        request.blocks += new
        return True

    def publish(self, request: Request) -> None:
        """Lets later prompts find the full pages that this one has written."""
        full = request.prefilled // self._sizing.page_size
        for block, digest in zip(request.blocks[:full], request.hashes[:full], strict=False):
            self.pool.publish(block, digest)

    def with_status(self, status: Status) -> list[Request]:
        """Requests that have a row, the first in rank first."""
        chosen = (r for r in self.running if r.status is status)
        return sorted(chosen, key=self.waiting.rank)

    def last_in_rank(self) -> Request:
        """Whose pages are taken when there are too few."""
        return max(self.running, key=self.waiting.rank)

    def requeue(self, request: Request) -> None:
        """A preempted request waits again; without its bytes, from the start."""
        self.release(request)
        request.status = Status.WAITING
        request.prefilled = request.blocks_on_device = 0
        self.add(request)

    def release(self, request: Request) -> None:
        """Takes back a request's row and blocks; one that has none is let alone."""
        if request.row is None:
            return
        self.running.remove(request)
        self.pool.release(request.blocks)
        self._free_rows.append(request.row)
        request.row, request.blocks = None, []

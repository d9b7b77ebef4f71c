"""What the engine does in a step: rows ended, admitted, run, read and retired."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sparse_loop_jax.engine.executor import Executor
from sparse_loop_jax.engine.metrics import Metrics
from sparse_loop_jax.engine.request import Request, RequestOutput, Status
from sparse_loop_jax.engine.scheduler import Scheduler
from sparse_loop_jax.engine.sizing import Sizing
from sparse_loop_jax.generation.compilation import count_compilations

# Steps before tables get narrower: where long requests come and go, the pipeline of rounds is
# not to be drained for each of them.
_ROOMY_STEPS = 32


class ServingLoop:
    """The requests of an engine between their arrival and their retirement.

    Attributes:
      requests: by id, until nothing on the device is theirs any more.
      news: of them or just gone: those whose owner has something to be told.
      ended_rows: of aborted requests, still live on the device.
    """

    def __init__(
        self, sizing: Sizing, executor: Executor, scheduler: Scheduler, metrics: Metrics
    ):
        self.executor = executor
        self.scheduler = scheduler
        self.metrics = metrics
        self.requests: dict[str, Request] = {}
        self.news: dict[str, Request] = {}
        self.ended_rows: list[int] = []
        self._sizing = sizing
        self._roomy_steps = 0  # in a row, in which narrower tables would have done

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        self.scheduler.add(request)
        self.metrics.add(prompt_tokens=len(request.prompt))

    def abort(self, request_id: str) -> bool:
        """Ends a request; whether there was one, not finished."""
        request = self.requests.get(request_id)
        if request is None or request.status is Status.FINISHED:
            return False
        if request.status is Status.WAITING:
            self.scheduler.waiting.remove(request)
        elif request.status is Status.DECODE:
            assert request.row is not None
            self.ended_rows.append(request.row)
        request.finish("abort")
        self._tell(request)
        self._retire(request)
        return True

    def step(self) -> None:
        """One step, as `Engine.step` has it."""
        if not self.requests:
            return
        with self._all_or_error(), count_compilations() as compiled:
            self.executor.open()
            self._end_rows()
            self._admit()
            submitted = self._prefill()
            submitted = self._submit_round() or submitted
            self._collect_oldest(submitted)
            if not self.requests:
                self.executor.settle()
        self.metrics.add(compilations=compiled.programs)

    def take_outputs(self) -> list[RequestOutput]:
        """What is new, once."""
        outputs = [request.output() for request in self.news.values()]
        self.news.clear()
        return outputs

    def close(self) -> None:
        """Lets go of everything; requests that have not ended count as aborted."""
        live = sum(r.status is not Status.FINISHED for r in self.requests.values())
        self.metrics.add(requests_finished_abort=live)
        self.executor.close()
        self.scheduler.reset()
        self.requests.clear()
        self.news.clear()
        self.ended_rows.clear()

    def _end_rows(self) -> None:
        """Aborted rows emit and write nothing from here on."""
        if self.ended_rows:
            self.executor.apply([], self.ended_rows)
            self.ended_rows.clear()

    def _admit(self) -> None:
        while (request := self.scheduler.admit()) is not None:
            if self._sizing.sizes_at(request.kv_tokens).width > self.executor.sizes.width:
                self.collect_all()
                self.executor.resize(request.kv_tokens)
            if request.swapped is not None:
                self.executor.swap_in(request)
                self.metrics.add(resumptions=1)
            elif request.hashes:
                self.metrics.add(
                    prefix_queried_tokens=len(request.prompt),
                    prefix_reused_tokens=request.reused,
                )
        self._narrow()

    def _narrow(self) -> None:
        """Back to smaller tables and a smaller store when long requests have been gone a while.

        What rounds do over the width of a table, a selection of keys most of all, is cheaper
        then. Programs of the narrow state are compiled already, unless it never was one.
        """
        longest = max((request.kv_tokens for request in self.scheduler.running), default=0)
        if not longest or self._sizing.sizes_at(longest).width >= self.executor.sizes.width:
            self._roomy_steps = 0
            return
        self._roomy_steps += 1
        if self._roomy_steps >= _ROOMY_STEPS:
            self.collect_all()
            self.executor.resize(longest)

    def _prefill(self) -> bool:
        """Submits prompt tokens, at most `max_prefill_tokens` with their padding."""
        budget = self._sizing.max_prefill_tokens
        submitted = False
        while prompts := self.scheduler.with_status(Status.PREFILL):
            left = [len(r.prompt) - r.prefilled for r in prompts]
            rows, chunk = self._sizing.prefill_shape(left)
            if rows * chunk > budget:
                break
            budget -= rows * chunk
            parts = [(r, min(n, chunk)) for r, n in zip(prompts[:rows], left, strict=False)]
            self.executor.prefill(parts, rows, chunk)
            submitted = True
            self.metrics.add(prefill_calls=1)
            for request, _ in parts:
                request.started()
                self.scheduler.publish(request)
                if request.prefilled == len(request.prompt):
                    request.status = Status.DECODE
        return submitted

    def _submit_round(self) -> bool:
        """Submits a round for every request that may still want one, with pages for it."""
        while True:
            requests = [r for r in self.scheduler.with_status(Status.DECODE) if r.wants_round]
            if not requests:
                return False
            if all(self.scheduler.grow(request) for request in requests):
                break
            # What is outstanding may end requests, and shows how far the others really are.
            if self.executor.tickets:
                self.collect_all()
            else:
                self.preempt(self.scheduler.last_in_rank())
        self.executor.apply(requests, [])
        self.executor.submit_round(requests)
        return True

    def preempt(self, request: Request) -> None:
        """Takes a request's row and pages; nothing is outstanding."""
        if request.status is Status.DECODE:
            self.executor.swap_out(request)
            assert request.swapped is not None
            self.metrics.add(swapped_bytes=request.swapped.nbytes)
        self.metrics.add(preemptions=1)
        self.scheduler.requeue(request)

    def _collect_oldest(self, submitted: bool) -> None:
        """Reads up to the oldest round, if it is time: the device has the next one to do."""
        if submitted and self.executor.can_submit:
            return
        while self.executor.tickets:
            if self._collect():
                return

    def collect_all(self) -> None:
        while self.executor.tickets:
            self._collect()

    def _collect(self) -> bool:
        """Reads the oldest output; whether it was a round's."""
        collected = self.executor.collect()
        ended = []  # by a stop string, of which the device knows nothing
        for request, ids, exit_loops in collected.emitted:
            if request.status is Status.FINISHED:
                self.metrics.add(
                    discarded_rounds=collected.counters is not None,
                    discarded_tokens=len(ids),
                )
            elif ids:
                taken = request.take(ids, exit_loops)
                self.metrics.add(generated_tokens=taken, discarded_tokens=len(ids) - taken)
                self._tell(request)
                if request.finish_reason == "stop" and request.params.stop:
                    assert request.row is not None
                    ended.append(request.row)
            self._retire(request)
        if ended:
            self.executor.apply([], ended)  # before anybody gets their rows and pages
        if collected.counters is None:
            return False
        self.metrics.round(collected.counters, self.executor.spec)
        return True

    def _tell(self, request: Request) -> None:
        self.news[request.id] = request

    def _retire(self, request: Request) -> None:
        """Forgets a request that has ended once no output with it is outstanding."""
        if request.status is not Status.FINISHED or request.pending:
            return
        self.scheduler.release(request)
        self._count_end(request)
        del self.requests[request.id]

    def _count_end(self, request: Request) -> None:
        assert request.finish_reason is not None
        request.swapped = None
        self.metrics.finished(request.finish_reason, request.times)

    @contextlib.contextmanager
    def _all_or_error(self) -> Iterator[None]:
        """After a failure: nothing outstanding, every request ended, a state to be made."""
        try:
            yield
        except BaseException:
            self.executor.drop()
            self.ended_rows.clear()
            self.metrics.add(failures=1)
            for request in self.requests.values():
                if request.status is not Status.FINISHED:
                    request.finish("error")
                    self._tell(request)
                self._count_end(request)
            self.requests.clear()
            self.scheduler.reset()  # and the prefix cache, whose pages are gone
            raise

    def gauges(self) -> dict[str, int]:
        scheduler, loops = self.scheduler, self._sizing.loops
        return {
            "requests_waiting": len(scheduler.waiting),
            "requests_running": len(scheduler.running),
            "requests_held": len(self.requests),
            "rows_in_use": scheduler.rows_in_use,
            "rows": self._sizing.max_num_seqs,
            "pages_in_use": scheduler.pool.in_use * loops,
            "pages_kept": scheduler.pool.kept * loops,
            "pages": scheduler.pool.num_blocks * loops,
            "outputs_outstanding": len(self.executor.tickets),
            "swapped_bytes_held": sum(
                r.swapped.nbytes for r in scheduler.waiting if r.swapped is not None
            ),
        }

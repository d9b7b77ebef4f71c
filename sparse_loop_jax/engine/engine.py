"""`Engine`: many requests that come and go, in one running batch."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Sequence

from sparse_loop_jax.decoding.config import SpeculativeConfig
from sparse_loop_jax.engine.config import CacheConfig, SamplingParams, SchedulerConfig
from sparse_loop_jax.engine.executor import Executor
from sparse_loop_jax.engine.memory import MemoryPlan, plan_memory
from sparse_loop_jax.engine.metrics import Metrics
from sparse_loop_jax.engine.request import Request, RequestOutput, Status
from sparse_loop_jax.engine.scheduler import Scheduler
from sparse_loop_jax.engine.validation import make_request
from sparse_loop_jax.generation.compilation import count_compilations
from sparse_loop_jax.generation.options import Options
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse.config import SparseDecodeConfig


class Engine:
    """Serves requests that arrive at any time; each gets what `generate` would give it.

    `add_request` queues, `step` moves everything on by up to one round and tells what is
    new, `abort` ends one request. Not thread-safe: one thread calls, others hand it their
    requests. Use as a context manager, or call `close`.

    Args:
      model: from `sparse_loop_jax.load`, or an `Ouro`.
      cache: the pool of pages.
      scheduler: who runs.
      sparse: cross-loop sparse attention for decoded tokens; None is dense.
      speculative: draft with the first loops and verify with the rest; None decodes token
        by token.
      implementation: of the ops ("xla", "pallas"); None chooses by platform.

    Attributes:
      memory_plan: what it takes on the device, made before anything was taken.

    Raises:
      ValueError: the arguments do not fit each other, the model or the device.
    """

    def __init__(
        self,
        model: Ouro,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        sparse: SparseDecodeConfig | None = None,
        speculative: SpeculativeConfig | None = None,
        implementation: str | None = None,
    ):
        cache = _instance("cache", cache, CacheConfig)
        scheduler = _instance("scheduler", scheduler, SchedulerConfig)
        options = Options(
            sparse=sparse,
            speculative=speculative,
            exit_threshold=1.0,  # decided by each request
            page_size=cache.page_size,
            implementation=implementation,
        )
        spec = options.spec_for(model.config)
        outstanding = 2 if speculative is None else speculative.max_outstanding_rounds
        params = model.params
        self.memory_plan: MemoryPlan
        self.memory_plan, sizing = plan_memory(
            params, model.dtype, spec, sparse, cache, scheduler, outstanding
        )
        if sparse is not None:
            sparse.validate_for(model.config, sizing.max_context)
        self._model: Ouro | None = model
        self._spec = spec
        self._sizing = sizing
        self._metrics = Metrics()
        self._scheduler = Scheduler(cache, scheduler, sizing, spec.rows)
        self._requests: dict[str, Request] = {}  # until nothing on the device is theirs
        self._news: dict[str, Request] = {}  # those whose owner has something to be told
        self._ended_rows: list[int] = []  # of aborted requests, still live on the device
        self._arrivals = 0
        self._executor = Executor(params, spec, sizing, model.dtype, outstanding)
        self._executor.open()

    # Requests --------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queues a request.

        Args:
          request_id: of a request that is not being served and has nothing on the device.
          prompt: a string where the model has a tokenizer, or token ids.
          params: None: the defaults.
          priority: lower goes first, with `policy="priority"`.

        Raises:
          ValueError: the id is empty or taken, a value is out of range, or the request could
            never fit the context or the pool. Nothing has changed then.
          RuntimeError: the engine is closed.
        """
        model = self._open_model()
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a string that is not empty: {request_id!r}")
        if request_id in self._requests or request_id in self._news:
            raise ValueError(
                f"request {request_id!r} is still being served, or its last rounds are not "
                "over: wait for its end, or choose another id"
            )
        request = make_request(
            model,
            self._sizing,
            self._spec,
            request_id,
            prompt,
            SamplingParams() if params is None else params,
            priority=priority,
            arrival=self._arrivals,
        )
        self._arrivals += 1
        self._requests[request_id] = request
        self._scheduler.add(request)
        self._metrics.add(prompt_tokens=len(request.prompt))

    def abort(self, request_id: str) -> bool:
        """Ends a request; the next `step` tells so.

        Returns:
          Whether there was such a request, not finished.
        """
        request = self._requests.get(request_id)
        if request is None or request.status is Status.FINISHED:
            return False
        if request.status is Status.WAITING:
            self._scheduler.waiting.remove(request)
        elif request.status is Status.DECODE:
            assert request.row is not None
            self._ended_rows.append(request.row)
        request.finish("abort")
        self._tell(request)
        self._retire(request)
        return True

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has something to do or to tell."""
        return bool(self._requests or self._news)

    def step(self) -> list[RequestOutput]:
        """Admits, runs some prompt tokens, submits a round, and reads the oldest one out.

        Returns:
          What is new, one output a request. Often nothing: results are read late.

        Raises:
          RuntimeError: the engine is closed.
          Exception: whatever failed on the device. Every request has ended with reason
            "error" then, which the next `step` tells, and the engine can be used again.
        """
        self._open_model()
        if self._requests:
            with self._all_or_error(), count_compilations() as compiled:
                self._executor.open()
                self._end_rows()
                self._admit()
                submitted = self._prefill()
                submitted = self._submit_round() or submitted
                self._collect_oldest(submitted)
                if not self._requests:
                    self._executor.settle()
            self._metrics.add(compilations=compiled.programs)
        outputs = [request.output() for request in self._news.values()]
        self._news.clear()
        return outputs

    def run(
        self, requests: Iterable[tuple[str, str | Sequence[int], SamplingParams | None]]
    ) -> list[RequestOutput]:
        """Serves these `(id, prompt, params)` to their end; outputs in the order given.

        Raises:
          ValueError: as `add_request`; none of them is left behind then.
          RuntimeError: other requests are being served, whose outputs would be lost.
        """
        self._open_model()
        if self.has_unfinished:
            raise RuntimeError(
                f"{len(self._requests)} requests are being served: step until they end"
            )
        ids: list[str] = []
        try:
            for request_id, prompt, params in requests:
                self.add_request(request_id, prompt, params)
                ids.append(request_id)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            self._news.clear()
            raise
        last: dict[str, RequestOutput] = {}
        while self.has_unfinished:
            last.update((output.request_id, output) for output in self.step())
        return [last[request_id] for request_id in ids]

    # Life ------------------------------------------------------------------------------

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of everything on the device, whatever is going on. Twice is once."""
        self._executor.close()
        self._scheduler.reset()
        self._requests.clear()
        self._news.clear()
        self._ended_rows.clear()
        self._model = None

    def metrics(self) -> dict[str, float]:
        """Counters since the start, what is in use now, and times, by name."""
        return self._metrics.as_dict(self._gauges())

    def prometheus(self) -> str:
        """The same in Prometheus' text format."""
        return self._metrics.prometheus(self._gauges())

    # A step ----------------------------------------------------------------------------

    def _end_rows(self) -> None:
        """Aborted rows emit and write nothing from here on."""
        if self._ended_rows:
            self._executor.apply([], self._ended_rows)
            self._ended_rows.clear()

    def _admit(self) -> None:
        while (request := self._scheduler.admit()) is not None:
            if self._sizing.sizes_at(request.kv_tokens).width > self._executor.sizes.width:
                self._collect_all()
                self._executor.widen(request.kv_tokens)
            if request.swapped is not None:
                self._executor.swap_in(request)
                self._metrics.add(resumptions=1)
            elif request.hashes:
                self._metrics.add(
                    prefix_queried_tokens=len(request.prompt),
                    prefix_reused_tokens=request.reused,
                )

    def _prefill(self) -> bool:
        """Submits prompt tokens, at most `max_prefill_tokens` with their padding."""
        budget = self._sizing.max_prefill_tokens
        submitted = False
        while prompts := self._scheduler.with_status(Status.PREFILL):
            left = [len(r.prompt) - r.prefilled for r in prompts]
            rows, chunk = self._sizing.prefill_shape(left[0], len(prompts))
            if rows * chunk > budget:
                break
            budget -= rows * chunk
            parts = [(r, min(n, chunk)) for r, n in zip(prompts[:rows], left, strict=False)]
            self._executor.prefill(parts, rows, chunk)
            submitted = True
            self._metrics.add(prefill_calls=1)
            for request, _ in parts:
                request.started()
                self._scheduler.publish(request)
                if request.prefilled == len(request.prompt):
                    request.status = Status.DECODE
        return submitted

    def _submit_round(self) -> bool:
        """Submits a round for every request that may still want one, with pages for it."""
        while True:
            requests = [r for r in self._scheduler.with_status(Status.DECODE) if r.wants_round]
            if not requests:
                return False
            if all(self._scheduler.grow(request) for request in requests):
                break
            # What is outstanding may end requests, and shows how far the others really are.
            if self._executor.tickets:
                self._collect_all()
            else:
                self._preempt(self._scheduler.last_in_rank())
        self._executor.apply(requests, [])
        self._executor.submit_round(requests)
        return True

    def _preempt(self, request: Request) -> None:
        """Takes a request's row and pages; nothing is outstanding."""
        if request.status is Status.DECODE:
            self._executor.swap_out(request)
            assert request.swapped is not None
            self._metrics.add(swapped_bytes=request.swapped.nbytes)
        self._metrics.add(preemptions=1)
        self._scheduler.requeue(request)

    def _collect_oldest(self, submitted: bool) -> None:
        """Reads up to the oldest round, if it is time: the device has the next one to do."""
        if submitted and self._executor.can_submit:
            return
        while self._executor.tickets:
            if self._collect():
                return

    def _collect_all(self) -> None:
        while self._executor.tickets:
            self._collect()

    def _collect(self) -> bool:
        """Reads the oldest output; whether it was a round's."""
        collected = self._executor.collect()
        for request, ids in collected.emitted:
            if request.status is Status.FINISHED:
                self._metrics.add(
                    discarded_rounds=collected.counters is not None,
                    discarded_tokens=len(ids),
                )
            elif ids:
                request.take(ids)
                self._metrics.add(generated_tokens=len(ids))
                self._tell(request)
            self._retire(request)
        if collected.counters is None:
            return False
        self._metrics.round(collected.counters)
        return True

    def _tell(self, request: Request) -> None:
        self._news[request.id] = request

    def _retire(self, request: Request) -> None:
        """Forgets a request that has ended once no output with it is outstanding."""
        if request.status is not Status.FINISHED or request.pending:
            return
        self._scheduler.release(request)
        self._count_end(request)
        del self._requests[request.id]

    def _count_end(self, request: Request) -> None:
        assert request.finish_reason is not None
        request.swapped = None
        self._metrics.finished(request.finish_reason, request.times)

    @contextlib.contextmanager
    def _all_or_error(self) -> Iterator[None]:
        """After a failure: nothing outstanding, every request ended, a state to be made."""
        try:
            yield
        except BaseException:
            self._executor.drop()
            self._ended_rows.clear()
            self._metrics.add(failures=1)
            for request in self._requests.values():
                if request.status is not Status.FINISHED:
                    request.finish("error")
                    self._tell(request)
                self._count_end(request)
            self._requests.clear()
            self._scheduler.reset()  # and the prefix cache, whose pages are gone
            raise

    def _gauges(self) -> dict[str, int]:
        scheduler, loops = self._scheduler, self._sizing.loops
        return {
            "requests_waiting": len(scheduler.waiting),
            "requests_running": len(scheduler.running),
            "requests_held": len(self._requests),
            "rows_in_use": scheduler.rows_in_use,
            "rows": self._sizing.max_num_seqs,
            "pages_in_use": scheduler.pool.in_use * loops,
            "pages_kept": scheduler.pool.kept * loops,
            "pages": scheduler.pool.num_blocks * loops,
            "outputs_outstanding": len(self._executor.tickets),
            "swapped_bytes_held": sum(
                r.swapped.nbytes for r in scheduler.waiting if r.swapped is not None
            ),
        }

    def _open_model(self) -> Ouro:
        if self._model is None:
            raise RuntimeError("the engine is closed")
        return self._model


def _instance(name: str, value, kind):
    """The value, or a default one for None."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")
    return value

"""The thread that owns the engine: nothing else touches it, and it touches no event loop."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sparse_loop_jax.engine import Engine, RequestOutput, SamplingParams

log = logging.getLogger(__name__)

# Not an id that a job can have.
_TRIAL = "trial"


@dataclasses.dataclass(frozen=True)
class Progress:
    """A job as of now; each one replaces those before it.

    Attributes:
      text: what may be shown, "" without a tokenizer. It never ends in a part of a character
        or in what may become a stop string.
      token_ids: all new tokens so far.
      exit_loops: of each of them, the loop that it was read from.
      finish_reason: "stop" or "length"; "abort", "error" or "refused", with `error`; None
        until the end.
      prompt_tokens, cached_tokens: length of the prompt, and of it what was not run again.
      error: why there is no answer.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    exit_loops: Sequence[int] = ()
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


class Job:
    """One prompt on its way through the engine."""

    def __init__(
        self,
        job_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
    ):
        self.id = job_id
        self.prompt = prompt
        self.params = params
        self.priority = priority


def _progress(output: RequestOutput) -> Progress:
    """What the owner of a job is told."""
    return Progress(
        # The engine holds a partial character back until the end, and shows it then.
        (output.text or "").rstrip("\N{REPLACEMENT CHARACTER}"),
        output.token_ids,
        output.exit_loops,
        output.finish_reason,
        output.prompt_tokens,
        output.reused_prompt_tokens,
    )


class EngineThread:
    """Feeds an engine from a queue and steps it as long as it has work.

    Every method may be called from any thread; none waits but `stop`. After a failed step,
    all jobs have ended with an error; the engine is tried with a request of its own, and
    serves on if that works. Otherwise it is given up.

    Args:
      engine: closed by this thread when it ends.
      notify: called in this thread with what is new of jobs.

    Attributes:
      failure: what is wrong, None while all is well.
    """

    def __init__(self, engine: Engine, notify: Callable[[list[tuple[Job, Progress]]], None]):
        self._engine = engine
        self._notify = notify
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}
        self._stopping = False
        self._given_up = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds jobs, all or none: if one is refused, so are the others."""
        self._commands.put(lambda: self._add(jobs))

    def abort(self, ids: Sequence[str]) -> None:
        """Ends jobs that still run; they are told so."""
        self._commands.put(lambda: self._abort(ids))

    def abort_all(self) -> None:
        self._commands.put(lambda: self._abort(list(self._jobs)))

    def call(self, function: Callable[[Engine], Any]) -> concurrent.futures.Future:
        """`function(engine)` between two steps."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run():
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(run)
        return future

    def warm_up(self) -> concurrent.futures.Future:
        """Compiles what short requests need: greedy and sampled ones, alone and together."""
        return self.call(_warm_up)

    @property
    def running(self) -> bool:
        """Whether the thread has begun, and not ended."""
        return self._thread.is_alive()

    def stop(self, timeout: float | None = None) -> bool:
        """Aborts what is left, closes the engine and ends the thread; whether it has ended."""
        self._commands.put(self._stop)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self.running

    # In the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._obey()
                    if self._engine.has_unfinished:
                        self._step()
                except Exception as error:
                    log.exception("the engine is given up")
                    self._give_up(error)
        finally:
            self._engine.close()
            while not self._commands.empty():  # nobody is to wait for ever
                self._commands.get()()

    def _obey(self) -> None:
        """Carries out what was asked for; waits for something if there is nothing to do."""
        if not self._engine.has_unfinished:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            log.exception("a step of the engine failed")
            self.failure = _reason(error)
            self._tell(self._engine.step())  # every request has ended
            self._recover()
        else:
            self._tell(outputs)

    def _recover(self) -> None:
        _try(self._engine, temperature=0.0)
        self.failure = None

    def _give_up(self, error: BaseException) -> None:
        self._given_up = True
        self.failure = _reason(error)
        self._engine.close()
        self._end(list(self._jobs.values()), "error", self.failure)

    def _tell(self, outputs: list[RequestOutput]) -> None:
        news = []
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:  # refused together with others
                continue
            progress = _progress(output)
            if output.finish_reason == "error":
                progress = dataclasses.replace(progress, error=self.failure)
            elif output.finish_reason == "abort":
                progress = dataclasses.replace(progress, error="the request was aborted")
            if progress.finish_reason:
                del self._jobs[job.id]
            news.append((job, progress))
        if news:
            self._notify(news)

    def _end(self, jobs: Sequence[Job], reason: str, error: str) -> None:
        for job in jobs:
            self._jobs.pop(job.id, None)
        if jobs:
            self._notify([(job, Progress(finish_reason=reason, error=error)) for job in jobs])

    def _add(self, jobs: Sequence[Job]) -> None:
        if self._stopping or self._given_up:
            error = "the server is shutting down" if self._stopping else self.failure
            self._end(jobs, "error", str(error))
            return
        added = []
        try:
            for job in jobs:
                self._engine.add_request(job.id, job.prompt, job.params, priority=job.priority)
                added.append(job.id)
        except ValueError as error:
            for job_id in added:
                self._engine.abort(job_id)
            self._end(jobs, "refused", str(error))
        else:
            self._jobs.update((job.id, job) for job in jobs)

    def _abort(self, ids: Sequence[str]) -> None:
        for job_id in ids:
            if job_id in self._jobs:
                self._engine.abort(job_id)

    def _stop(self) -> None:
        self._stopping = True
        self._end(list(self._jobs.values()), "abort", "the server is shutting down")


def _warm_up(engine: Engine) -> None:
    """Prompts alone and as many as run at once, past the end of a page where it is not all."""
    plan, rows = engine.memory_plan, int(engine.metrics()["rows"])
    tokens = min(plan.page_size + 2, plan.max_context)
    for temperature in (0.0, 1.0):
        for prompts in dict.fromkeys((1, rows)):
            _try(engine, temperature=temperature, prompts=prompts, tokens=tokens)
    engine.reset_metrics()  # none of it was anybody's


def _try(engine: Engine, *, temperature: float, prompts: int = 1, tokens: int = 2) -> None:
    """Runs prompts of one token when nothing is served.

    Raises:
      Exception: what the engine raises.
      RuntimeError: a request did not come to its end.
    """
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    for output in engine.run([(f"{_TRIAL}{i}", [0], params) for i in range(prompts)]):
        if output.finish_reason != "length":
            raise RuntimeError(
                f"a request of the server's own ended with {output.finish_reason!r}"
            )


def _reason(error: BaseException) -> str:
    """For clients: XLA's messages can be pages; the log has them."""
    return f"{type(error).__name__}: {error!s:.300}"

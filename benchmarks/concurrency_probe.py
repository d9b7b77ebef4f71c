"""Many requests at once, dense and sparse, each with two draft loops and three drafted tokens.

    python benchmarks/concurrency_probe.py --json FILE [--resume]
    python benchmarks/concurrency_probe.py --tiny          # small shapes, where there is no GPU

32 and then 64 requests of Ouro-1.4B's shapes, random weights, bfloat16: prompt i is the 256
tokens 1 + (137 j + 53 i) mod 49000, and 16 tokens follow. The engine serves the model's whole
context of 65,536 tokens, and its pool holds one such request. Each case is an engine of its
own: once to warm up, once to measure. What is checked, or the case has failed:

- every request got its 16 tokens, and all were resident at once, none preempted;
- every drafted row was captured in every layer by loop 1 and consumed by loops 2 and 3; at
  r = 1, as in dense decoding, none was, no store was made, and the tokens are the dense ones;
- in the end no rows, pages, slots or outputs are held, and after `close` no array.

A case is printed, and written, as soon as it is over; `--resume` leaves out those that the file
already has. The peak is that of the process so far. `JAX_COMPILATION_CACHE_DIR` saves the
compilations of a second run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sparse_loop_jax as slj
from sparse_loop_jax.bench import measure, report
from sparse_loop_jax.bench.model import SHAPES
from sparse_loop_jax.bench.speculative import round_bytes
from sparse_loop_jax.cache import pages_for
from sparse_loop_jax.decoding import DecodeSpec
from sparse_loop_jax.generation.compilation import count_compilations
from sparse_loop_jax.generation.memory import peak_bytes

MODES = {"dense": None, "r=1": 1.0, "r=0.1": 0.1, "r=0.5": 0.5}
SPECULATIVE = slj.SpeculativeConfig(num_speculative_tokens=3, draft_loops=2)
# Floating-point operations a second of dense bfloat16 products, by a part of the device's name.
KNOWN_FLOPS = {"H200": 989e12}
_HELD = (
    "requests_waiting", "requests_running", "requests_held", "rows_in_use", "pages_in_use",
    "outputs_outstanding", "swapped_bytes_held",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Probe:
    """What all cases share."""

    model: slj.Ouro
    context: int
    prompt_tokens: int = 256
    output_tokens: int = 16
    max_prefill_tokens: int = 8192
    page_size: int = 16
    bandwidth: float = float("inf")

    def prompts(self, count: int) -> list[list[int]]:
        modulus = min(49000, self.model.config.vocab_size - 1)
        return [
            [1 + (137 * j + 53 * i) % modulus for j in range(self.prompt_tokens)]
            for i in range(count)
        ]

    def engine(self, requests: int, sparse: slj.SparseDecodeConfig | None) -> slj.Engine:
        tokens = max(self.context, 2 * requests * (self.prompt_tokens + self.output_tokens))
        loops = self.model.config.total_ut_steps
        return slj.Engine(
            self.model,
            cache=slj.CacheConfig(
                num_pages=loops * pages_for(tokens, self.page_size), page_size=self.page_size
            ),
            scheduler=slj.SchedulerConfig(
                max_num_seqs=requests,
                max_context=self.context,
                max_prefill_tokens=self.max_prefill_tokens,
            ),
            sparse=sparse,
            speculative=SPECULATIVE,
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """One time through all requests."""

    tokens: list[list[int]]
    seconds: float
    first_token: list[float]
    round_seconds: list[float]  # of steps that ran a round and no prompt
    resident: int  # the most at once
    counters: dict[str, float]  # by how much they grew


def run_once(engine: slj.Engine, prompts: list[list[int]], max_tokens: int) -> Run:
    params = slj.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    start = engine.metrics()
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    last: dict[str, slj.RequestOutput] = {}
    rounds, resident, before = [], 0, start
    while engine.has_unfinished:
        now = time.perf_counter()
        last.update((output.request_id, output) for output in engine.step())
        elapsed = time.perf_counter() - now
        after = engine.metrics()
        resident = max(resident, int(after["rows_in_use"]))
        if (
            after["prefill_calls"] == before["prefill_calls"]
            and after["rounds"] > before["rounds"]
        ):
            rounds.append(elapsed)
        before = after
    seconds = time.perf_counter() - begin
    outputs = [last[str(index)] for index in range(len(prompts))]
    for output in outputs:
        _require(
            output.finish_reason == "length" and len(output.token_ids) == max_tokens,
            f"request {output.request_id} ended with {output.finish_reason!r} after "
            f"{len(output.token_ids)} of {max_tokens} tokens",
        )
    return Run(
        [output.token_ids for output in outputs],
        seconds,
        [output.times.first_token or 0.0 for output in outputs],
        rounds,
        resident,
        {name: before[name] - start[name] for name in before},
    )


def measure_case(
    probe: Probe, mode: str, requests: int, dense_tokens: list[list[int]] | None
) -> tuple[report.Row, list[list[int]]]:
    """The row of one case, and its tokens.

    Raises:
      ValueError: the engine does not fit.
      RuntimeError: a check failed.
    """
    retention = MODES[mode]
    sparse = None if retention is None else slj.SparseDecodeConfig(key_retention=retention)
    gc.collect()
    arrays = len(jax.live_arrays())
    prompts = probe.prompts(requests)
    with count_compilations() as compiled:
        begin = time.perf_counter()
        engine = probe.engine(requests, sparse)
        with engine:
            run_once(engine, prompts, probe.output_tokens)
            _check_drained(engine)
            ready = time.perf_counter() - begin
            warm_programs = compiled.programs
            run = run_once(engine, prompts, probe.output_tokens)
            measured_programs = compiled.programs - warm_programs
            _check_drained(engine)
            store_bytes = _store_bytes(engine)
            plan = engine.memory_plan
    gc.collect()
    left = len(jax.live_arrays()) - arrays
    _require(left <= 0, f"{left} arrays are left after the engine was closed")
    _require(
        run.resident == requests and not run.counters["preemptions"],
        f"{run.resident} of {requests} requests were resident at once, "
        f"{run.counters['preemptions']:.0f} preempted",
    )
    _check_sparse(probe, run, retention, store_bytes)
    if mode == "r=1" and dense_tokens is not None:
        _require(run.tokens == dense_tokens, "the tokens at r = 1 are not the dense ones")
    counters, seconds = run.counters, statistics.median(run.round_seconds)
    floor = round_floor(probe, requests, retention or 1.0)
    peak = peak_bytes()
    return {
        "mode": mode,
        "requests": requests,
        "tokens/s": requests * probe.output_tokens / run.seconds,
        "ms/round": seconds * 1e3,
        "floor ms": floor * 1e3,
        "times floor": seconds / floor,
        "acceptance": counters["accepted_tokens"] / max(counters["drafted_tokens"], 1),
        "first token p95 ms": 1e3 * float(np.percentile(run.first_token, 95)),
        "rounds": int(counters["rounds"]),
        "captured": int(counters["captured_rows"]),
        "consumed": int(counters["consumed_rows"]),
        "resident": run.resident,
        "store MB": store_bytes / 1e6,
        "planned store GB": plan.reference_store / 1e9,
        "planned GB": plan.total / 1e9,
        "peak GB": None if peak is None else peak / 1e9,
        "same as dense": _same(run.tokens, dense_tokens),
        "compiled": measured_programs,
        "warm-up s": ready,
    }, run.tokens


def round_floor(probe: Probe, requests: int, retention: float) -> float:
    """Seconds that a round takes at least: each phase its bytes or its products.

    A phase is one drafting pass, of which there are K + 1, or the verification.
    """
    config = probe.model.config
    sparse = slj.SparseDecodeConfig(key_retention=retention)
    spec = DecodeSpec(
        config,
        sparse=None if sparse.is_dense else sparse.compiled_part,
        speculative=SPECULATIVE,
    )
    context = probe.prompt_tokens + probe.output_tokens // 2
    itemsize = probe.model.dtype.itemsize
    least = round_bytes(config, spec, requests, context, itemsize, retention).total
    seconds = least / probe.bandwidth
    name = jax.devices()[0].device_kind
    flops = next((f for part, f in KNOWN_FLOPS.items() if part in name), None)
    if flops is None:
        return seconds
    rows, head = spec.rows, config.vocab_size * config.hidden_size
    layers = round_bytes(config, spec, 1, 0, 1, 1.0).weights - rows * head
    loops, drafting = config.total_ut_steps, SPECULATIVE.draft_loops
    one_loop = layers / (rows * drafting + loops - drafting)
    verified = (loops - drafting) * one_loop + head
    products = 2 * requests * rows * verified / flops
    verified_bytes = itemsize * verified / probe.bandwidth
    return seconds + max(0.0, products - verified_bytes)


def _check_sparse(probe: Probe, run: Run, retention: float | None, store_bytes: int) -> None:
    captured, consumed = run.counters["captured_rows"], run.counters["consumed_rows"]
    if retention is None or retention == 1:
        _require(
            not captured and not consumed and not store_bytes,
            f"a dense case captured {captured:.0f} rows, consumed {consumed:.0f} and has a "
            f"store of {store_bytes} bytes",
        )
        return
    layers = probe.model.config.num_hidden_layers
    deeper = probe.model.config.total_ut_steps - 2
    # Every token after a request's first one came from a row of a round.
    least = layers * sum(len(tokens) - 1 for tokens in run.tokens)
    _require(
        captured >= least and captured % layers == 0 and consumed == deeper * captured,
        f"captured {captured:.0f} rows and consumed {consumed:.0f}: at least {least} and "
        f"{deeper} times as many are expected, in {layers} layers",
    )


def _check_drained(engine: slj.Engine) -> None:
    metrics = engine.metrics()
    held = {name: metrics[name] for name in _HELD if metrics[name]}
    state = engine._loop.executor.driver.state
    if bool(state.live.any()):
        held["live rows"] = int(state.live.sum())
    if state.store is not None and bool(state.store.held.any()):
        held["slots"] = int(state.store.held.sum())
    _require(not held, f"still held in the end: {held}")


def _store_bytes(engine: slj.Engine) -> int:
    store = engine._loop.executor.driver.state.store
    return sum(leaf.nbytes for leaf in jax.tree.leaves(store))


def _same(tokens: list[list[int]], dense: list[list[int]] | None) -> float | None:
    """The share of tokens that dense decoding gave at the same place."""
    return None if dense is None else float(np.mean(np.array(tokens) == np.array(dense)))


def _against_dense(row: report.Row, rows: Sequence[report.Row]) -> report.Row:
    """Throughput and p95 of the first token over those of dense decoding, where it was run."""
    names = {"of dense": "tokens/s", "first token of dense": "first token p95 ms"}
    dense = next(
        (r for r in rows if r["mode"] == "dense" and r["requests"] == row["requests"]), None
    )
    return {
        ratio: None if dense is None else row[name] / dense[name]
        for ratio, name in names.items()
    }


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", default=None, help="default 32,64; 2,4 with --tiny")
    parser.add_argument("--modes", default=",".join(MODES), help="default: all")
    parser.add_argument("--max-prefill-tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=540, help="begin no case after")
    parser.add_argument("--tiny", action="store_true", help="small shapes and prompts")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--resume", action="store_true", help="skip what FILE has")
    args = parser.parse_args(arguments)
    begin = time.perf_counter()
    rows: list[report.Row] = _known(args.json) if args.resume else []
    config = SHAPES["tiny" if args.tiny else "ouro-1.4b"]
    _require(config.initializer_range == 0.02, "the probe's weights have a deviation of 0.02")
    model = slj.Ouro(config, rngs=0, dtype="float32" if args.tiny else "bfloat16")
    small: dict[str, Any] = {}
    if args.tiny:
        small = {"context": 512, "prompt_tokens": 40, "output_tokens": 8}
    probe = Probe(
        model,
        **{"context": config.max_position_embeddings, **small},
        max_prefill_tokens=args.max_prefill_tokens,
        bandwidth=measure.bandwidth(),
    )
    setup = measure.setup_info() | {
        "shape": "tiny" if args.tiny else "ouro-1.4b",
        "dtype": str(model.dtype),
        "initial deviation": f"{config.initializer_range:g}",
        "context": f"{probe.context}",
        "prompt": f"{probe.prompt_tokens}",
        "new": f"{probe.output_tokens}",
        "K": f"{SPECULATIVE.num_speculative_tokens}",
        "draft loops": f"{SPECULATIVE.draft_loops}",
        "max_prefill_tokens": f"{probe.max_prefill_tokens}",
    }
    failures = []
    for requests in map(int, (args.requests or ("2,4" if args.tiny else "32,64")).split(",")):
        dense_tokens = None
        for mode in args.modes.split(","):
            case = f"{mode}, {requests} requests"
            if any(r["mode"] == mode and r["requests"] == requests for r in rows):
                continue
            if time.perf_counter() - begin > args.seconds:
                failures.append(f"{case}: not begun after {args.seconds:g} seconds")
                continue
            try:
                row, tokens = measure_case(probe, mode, requests, dense_tokens)
            except (RuntimeError, ValueError) as error:
                failures.append(f"{case}: {error}")
                print(f"\n{failures[-1]}", flush=True)
                continue
            dense_tokens = tokens if mode == "dense" else dense_tokens
            row |= _against_dense(row, rows)
            rows.append(row)
            print(
                f"\n{case}:", ", ".join(f"{k} {_text(v)}" for k, v in row.items()), flush=True
            )
            if args.json:
                report.write_json(args.json, "concurrency", rows, setup)
    report.print_table("concurrency probe", rows, setup)
    print("".join(f"\nFAILED {failure}" for failure in failures))
    return 1 if failures else 0


def _known(path: str | None) -> list[report.Row]:
    if path is None:
        raise ValueError("--resume needs --json FILE")
    file = Path(path)
    data = json.loads(file.read_text()) if file.exists() else {}
    return data.get("concurrency", {}).get("rows", [])


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())

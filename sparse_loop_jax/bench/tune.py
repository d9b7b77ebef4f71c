"""`sparse-loop bench tune`: measures kernel configurations and writes a device's file.

What is tried is in `tune_products`, for each matrix of a layer, and in `tune_cases`, for
each workload of attention: a small grid around the computed configuration. It is compiled in
threads and then timed. The computed one is kept unless another is faster by more than
`MARGIN`: a difference that small may be noise, and a changed cut changes bits.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.chain import Chain
from sparse_loop_jax.bench.tune_cases import Case, cases
from sparse_loop_jax.bench.tune_products import product_cases
from sparse_loop_jax.kernels import tuning
from sparse_loop_jax.kernels.workloads import AttentionWorkload, tagged
from sparse_loop_jax.models.config import OuroConfig

MARGIN = 0.02
FINALISTS = 3
SECONDS = 0.015  # of one timing
REPEATS = 3


def tune(
    cases: Iterator[Callable[[], Case]],
    *,
    seconds: float,
    note: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[dict]]:
    """Measures cases until `seconds` have passed; none is begun after that.

    Args:
      cases: functions that make a case with its inputs, the most wanted first.
      note: gets a line per case.

    Returns:
      Entries by op, for `write`.
    """
    end = clock() + seconds
    entries: dict[str, list[dict]] = {op: [] for op in tuning.OPS}
    left_out = 0
    for make in cases:
        if clock() >= end:
            left_out += 1
            continue
        case = make()
        key = tuning.describe(case.op, case.key)
        if any(entry["key"] == key for entry in entries[case.op]):
            continue  # another workload of the same bucket came first
        entry = measure_case(case)
        if entry is None:
            note(f"{case.op} {case.workload}: nothing could be run")
            continue
        entries[case.op].append(entry)
        note(
            f"{case.op} {case.workload}: {entry['us']} us, computed {entry['computed us']} us, "
            f"{entry['config']}"
        )
    if left_out:
        note(f"{left_out} cases were left out: {seconds:g} s have passed")
    return entries


def measure_case(case: Case) -> dict | None:
    """The entry of a case with all times; None where no configuration could be run.

    "us" are those of the chosen configuration for each number of rows. What was tried is
    listed by the time of the first of them; what failed to compile is there with its error.
    """
    configs = [case.computed, *(c for c in case.grid if c != case.computed)]
    (first, chain), *others = case.chains.items()
    times, errors = _measure(chain, configs)
    if not times:
        return None
    finalists = sorted(times, key=lambda i: times[i])[:FINALISTS]
    if 0 in times and 0 not in finalists:
        finalists.append(0)
    by_rows = {first: times}
    for rows, chain in others:
        found, failed = _measure(chain, [configs[i] for i in finalists])
        by_rows[rows] = {finalists[i]: t for i, t in found.items()}
        errors |= {finalists[i]: f"{rows} rows: {e}" for i, e in failed.items()}
    able = [i for i in finalists if all(i in times for times in by_rows.values())]
    if not able:
        return None

    def cost(index: int) -> float:
        """Times relative to those of the fastest finalist, summed over the rows."""
        return sum(t[index] / min(t[i] for i in able) for t in by_rows.values())

    best = min(able, key=cost)
    if 0 in able and cost(0) <= cost(best) * (1 + MARGIN):
        best = 0

    def us(index: int) -> dict[str, float]:
        return {str(r): round(t[index] * 1e6, 2) for r, t in by_rows.items() if index in t}

    def fields(index: int) -> dict[str, int]:
        return {name: getattr(configs[index], name) for name in tuning.OPS[case.op].fields}

    tried = [{"us": us(i), **fields(i)} for i in sorted(times, key=lambda i: times[i])]
    tried += [{"error": error, **fields(i)} for i, error in sorted(errors.items())]
    return {
        "key": tuning.describe(case.op, case.key),
        "config": fields(best),
        "us": us(best),
        "computed us": us(0),
        "workload": case.workload,
        "tried": tried,
    }


def _measure(chain: Callable[[Any], Chain], configs: list[Any]):
    """Seconds by index of a configuration, and what failed, by index."""
    chains = [chain(config) for config in configs]
    times, errors, compiling = {}, {}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for index, calls in enumerate(chains):
            try:
                compiling[index] = pool.submit(calls.lower(SECONDS).compile)
            except Exception as error:  # a grid may ask for what cannot be lowered
                errors[index] = _first_line(error)
    for index, future in compiling.items():
        try:
            program = future.result()
            timing = chains[index].time(program, seconds=SECONDS, repeats=REPEATS)
        except jax.errors.JaxRuntimeError as error:  # too much shared memory, for example
            errors[index] = _first_line(error)
        else:
            times[index] = timing.median
    return times, errors


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


# The file ------------------------------------------------------------------------------


def default_workloads() -> list[AttentionWorkload]:
    """Those tagged "tune"."""
    return tagged("tune")


def plan(
    workloads: list[AttentionWorkload], config: OuroConfig
) -> Iterator[Callable[[], Case]]:
    """The products of a model, then the attention of workloads, the most wanted first."""
    yield from product_cases(config)
    yield from cases(workloads)


def write(
    workloads: list[AttentionWorkload],
    config: OuroConfig,
    path: str | Path | None,
    *,
    seconds: float,
    command: str,
) -> Path:
    """Measures for `seconds` and writes a device's file; returns where it is.

    Args:
      workloads, config: of attention; the model whose products are measured.
      path: where to; None: `<device>.json` here, to be moved into the package's
        `data/tuning` by whoever finds it good.
      command: what made the file, to be named in it.
    """
    device = jax.devices()[0].device_kind
    path = Path(path or tuning.file_name(device))
    entries = tune(plan(workloads, config), seconds=seconds)
    path.write_text(file_text(entries, command))
    tuning.read_table(path)  # what was written can be read
    return path


def file_text(entries: dict[str, list[dict]], command: str) -> str:
    """The text of a device's file: a line for each key and each configuration tried."""
    data = {
        "device": jax.devices()[0].device_kind,
        "made": {
            "date": time.strftime("%Y-%m-%d"),
            "command": command,
            **measure.setup_info(),
        },
        "ops": {op: listed for op, listed in entries.items() if listed},
    }
    text = json.dumps(data, indent=1)
    shallow = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
    return shallow.sub(lambda match: " ".join(match[0].split()), text) + "\n"

"""Golden tokens in float32 on the default device: dense, sparse and speculative.

    python benchmarks/gold_on_device.py [pallas|xla|triton ...]

Prints a line a run, a count for each implementation, and fails if any differs. "triton" is a
name of the sparse ops alone: it leaves out the dense runs, and dense attention is as without a
name. Matrix products run at the highest precision, since the golden runs are float32. Two
rounds are also submitted under a guard that forbids reads from the device (which guards
nothing on the CPU).

Nearly all of the time is compilation, so runs go through a few threads.
"""

from __future__ import annotations

import collections
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import sparse_loop_jax as slj
from sparse_loop_jax.decoding import RoundDriver
from sparse_loop_jax.kernels import paged_attention

GOLD = Path(__file__).parent.parent / "tests" / "gold"
NAMES = ("mha", "gqa")
RETENTIONS = (None, 1, 0.5, 0.25, 0.1, 0.02)
THREADS = min(8, os.cpu_count() or 1)

DRAFTS = (None, (3, 2), (3, 1))  # tokens drafted in a round and loops that draft


class Run(NamedTuple):
    """One comparison."""

    name: str
    implementation: str | None
    retention: float | None
    draft: tuple[int, int] | None

    @property
    def names_sparse_ops_alone(self) -> bool:
        return self.implementation not in (None, *paged_attention.implementations)


def main(implementations: Sequence[str | None]) -> int:
    jax.config.update("jax_default_matmul_precision", "highest")
    start = time.perf_counter()
    models = {name: slj.load(GOLD / name) for name in NAMES}
    totals, equal = collections.Counter(), collections.Counter()
    with ThreadPoolExecutor(THREADS) as pool:
        guarded = [
            pool.submit(submit_under_guard, models["mha"], draft) for draft in (None, (3, 2))
        ]
        runs = list(cases(implementations or [None]))
        for run, (same, line) in zip(
            runs, pool.map(lambda r: check(models, r), runs), strict=True
        ):
            totals[run.implementation] += 1
            equal[run.implementation] += same
            print(line, flush=True)
        for future in guarded:
            print(future.result(), flush=True)
    for implementation, total in totals.items():
        print(f"implementation={implementation}: {equal[implementation]} of {total} equal")
    wrong = totals.total() - equal.total()
    print(f"{wrong} runs differ from the golden tokens; {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


def cases(implementations: Sequence[str | None]) -> Iterator[Run]:
    """The runs, in the order in which they are printed."""
    for name in NAMES:
        for implementation in implementations:
            for retention in RETENTIONS:
                for draft in DRAFTS:
                    run = Run(name, implementation, retention, draft)
                    if not (run.names_sparse_ops_alone and retention in (None, 1)):
                        yield run


def check(models: dict[str, slj.Ouro], run: Run) -> tuple[bool, str]:
    """Whether the tokens are the golden ones, and a line that says so."""
    dense = np.load(GOLD / f"{run.name}_dense.npz")
    sparse = None
    if run.retention is not None:
        sparse = slj.SparseDecodeConfig(
            key_retention=run.retention, implementation=run.implementation
        )
    out = slj.generate(
        models[run.name],
        [dense["p0_input_ids"].tolist(), dense["p1_input_ids"].tolist()],
        max_new_tokens=32,
        eos_token_id=[],
        sparse=sparse,
        speculative=run.draft and slj.SpeculativeConfig(*run.draft),
        implementation=None if run.names_sparse_ops_alone else run.implementation,
        progress=False,
    )
    same = out.token_ids == _golden_tokens(run, dense)
    line = (
        f"{run.name} implementation={run.implementation} retention={run.retention} "
        f"draft={run.draft} {'equal' if same else 'DIFFERENT'} "
        f"captured={out.stats.captured_rows} {out.stats.implementations}"
    )
    return same, line


def submit_under_guard(model: slj.Ouro, draft: tuple[int, int] | None) -> str:
    """Submits two sparse rounds with reads forbidden, then reads them."""
    params, state, _ = slj.start(
        model,
        [list(range(1, 30)), list(range(5, 60))],
        max_new_tokens=32,
        eos_token_id=[],
        outstanding_rounds=2,
        sparse=slj.SparseDecodeConfig(key_retention=0.1),
        speculative=draft and slj.SpeculativeConfig(*draft),
    )
    with RoundDriver(params, state) as driver:
        with jax.transfer_guard_device_to_host("disallow"):
            driver.submit()
            driver.submit()
        counts = [driver.collect().count.tolist() for _ in range(2)]
    return f"two rounds (draft={draft}) submitted with reads forbidden; emitted {counts}"


def _golden_tokens(run: Run, dense) -> list[list[int]]:
    if run.retention is None:
        return [dense[f"{p}_gen_tokens"].tolist() for p in ("p0", "p1")]
    sparse = np.load(GOLD / f"{run.name}_sparse_r{run.retention:g}.npz")
    return [sparse[f"{p}_tokens"].tolist() for p in ("p0", "p1")]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

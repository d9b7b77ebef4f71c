"""Golden tokens in float32 on the default device: dense, sparse and speculative.

    python benchmarks/gold_on_device.py [pallas|xla|triton ...]

Prints a line a run and fails if any differs. "triton" is a name of the sparse ops alone: it
leaves out the dense runs, and dense attention is as without a name. Matrix products run at
the highest precision, since the golden runs are float32. Then two rounds are submitted under
a guard that forbids reads from the device (which guards nothing on the CPU).
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

import sparse_loop_jax as slj
from sparse_loop_jax.decoding import RoundDriver
from sparse_loop_jax.kernels import paged_attention

GOLD = Path(__file__).parent.parent / "tests" / "gold"


def main(implementations: list[str]) -> int:
    jax.config.update("jax_default_matmul_precision", "highest")
    wrong = 0
    for name in ("mha", "gqa"):
        model = slj.load(GOLD / name)
        dense = np.load(GOLD / f"{name}_dense.npz")
        prompts = [dense["p0_input_ids"].tolist(), dense["p1_input_ids"].tolist()]
        for implementation in implementations or [None]:
            sparse_alone = implementation not in (None, *paged_attention.implementations)
            for retention in (None, 1, 0.5, 0.25, 0.1, 0.02):
                if sparse_alone and retention in (None, 1):
                    continue
                want = _golden_tokens(name, dense, retention)
                for speculative in (
                    None,
                    slj.SpeculativeConfig(3, 2),
                    slj.SpeculativeConfig(3, 1),
                ):
                    sparse = None
                    if retention is not None:
                        sparse = slj.SparseDecodeConfig(
                            key_retention=retention, implementation=implementation
                        )
                    out = slj.generate(
                        model,
                        prompts,
                        max_new_tokens=32,
                        eos_token_id=[],
                        sparse=sparse,
                        speculative=speculative,
                        implementation=None if sparse_alone else implementation,
                        progress=False,
                    )
                    same = out.token_ids == want
                    wrong += not same
                    drafted = speculative and speculative.draft_loops
                    print(
                        f"{name} implementation={implementation} retention={retention} "
                        f"draft_loops={drafted} {'equal' if same else 'DIFFERENT'} "
                        f"captured={out.stats.captured_rows} {out.stats.implementations}",
                        flush=True,
                    )
    print(f"{wrong} runs differ from the golden tokens")
    submit_under_guard()
    return 1 if wrong else 0


def submit_under_guard() -> None:
    """Submits two rounds with reads forbidden, then reads them: sparse, then both."""
    model = slj.load(GOLD / "mha")
    prompts = [list(range(1, 30)), list(range(5, 60))]
    for speculative in (None, slj.SpeculativeConfig(3, 2)):
        params, state, _ = slj.start(
            model,
            prompts,
            max_new_tokens=32,
            eos_token_id=[],
            outstanding_rounds=2,
            sparse=slj.SparseDecodeConfig(key_retention=0.1),
            speculative=speculative,
        )
        with RoundDriver(params, state) as driver:
            with jax.transfer_guard_device_to_host("disallow"):
                driver.submit()
                driver.submit()
            counts = [driver.collect().count.tolist() for _ in range(2)]
        print(f"two rounds ({speculative}) submitted with reads forbidden; emitted {counts}")


def _golden_tokens(name: str, dense, retention: float | None) -> list[list[int]]:
    if retention is None:
        return [dense[f"{p}_gen_tokens"].tolist() for p in ("p0", "p1")]
    sparse = np.load(GOLD / f"{name}_sparse_r{retention:g}.npz")
    return [sparse[f"{p}_tokens"].tolist() for p in ("p0", "p1")]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

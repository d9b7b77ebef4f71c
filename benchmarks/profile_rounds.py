"""Where the device time of a round goes, by kernel.

    python benchmarks/profile_rounds.py BATCHxCONTEXT [RETENTION [DRAFT_LOOPS]] ...

Each argument group is given as one string, e.g. "8x1024 1.0 1". Prints the wall time of a
round, the time the device was busy, and the kernels that took most of it.
"""

from __future__ import annotations

import collections
import functools
import glob
import gzip
import json
import re
import sys
import tempfile
import time

import jax

from sparse_loop_jax.bench.model import SHAPES, state_at
from sparse_loop_jax.bench.rounds import accept_all
from sparse_loop_jax.decoding import (
    DecodeSpec,
    RoundDriver,
    SpeculativeConfig,
    speculative_step,
)
from sparse_loop_jax.decoding.speculative import RoundHooks
from sparse_loop_jax.models.ouro import random_params
from sparse_loop_jax.sparse import SparseDecodeConfig

ROUNDS = 6


def main(cases: list[str]) -> None:
    config = SHAPES["ouro-1.4b" if jax.default_backend() == "gpu" else "tiny"]
    params = random_params(config, jax.random.key(0), "bfloat16")
    for case in cases:
        shape, retention, drafting = [*case.split(), *["1.0", "0"][len(case.split()) - 1 :]]
        batch, context = map(int, shape.split("x"))
        sparse = SparseDecodeConfig(key_retention=float(retention))
        speculative = SpeculativeConfig(3, int(drafting)) if int(drafting) else None
        spec = DecodeSpec(
            config,
            sparse=None if sparse.is_dense else sparse.compiled_part,
            speculative=speculative,
        )
        state = state_at(
            spec,
            batch,
            context,
            "bfloat16",
            new_tokens=3 * ROUNDS * spec.rows,
            outstanding_rounds=2,
            retention=float(retention),
        )
        profile(case, params, state)


def profile(case: str, params, state) -> None:
    step = None
    if state.spec.speculative is not None:
        step = functools.partial(speculative_step, hooks=RoundHooks(accepted=accept_all))
    with RoundDriver(params, state, step=step) as driver:
        del state

        def rounds() -> float:
            start = time.perf_counter()
            for _ in range(ROUNDS):
                driver.submit()
                if not driver.can_submit:
                    driver.collect()
            driver.collect()
            return (time.perf_counter() - start) / ROUNDS

        rounds()
        wall = rounds()
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                rounds()
            events = _device_events(folder)
    spans: dict[str, list[float]] = collections.defaultdict(list)
    for name, microseconds in events:
        spans[name].append(microseconds)
    busy = sum(map(sum, spans.values())) / ROUNDS
    print(f"\n{case}: {wall * 1e3:.2f} ms a round, device busy {busy / 1e3:.2f} ms")
    for name, each in sorted(spans.items(), key=lambda item: -sum(item[1]))[:16]:
        total, calls = sum(each), len(each)
        print(
            f"  {total / ROUNDS:9.0f} us {calls // ROUNDS:5d} x {total / calls:7.1f} us  {name}"
        )


def _device_events(folder: str) -> list[tuple[str, float]]:
    """Names and microseconds of what ran on the device's streams."""
    (file,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    devices, streams = set(), set()
    for event in events:
        if event.get("name") == "process_name" and "GPU" in event["args"]["name"]:
            devices.add(event["pid"])
    for event in events:
        if event.get("name") == "thread_name" and "Stream" in event["args"]["name"]:
            streams.add((event["pid"], event["tid"]))
    return [
        (re.sub(r"[._]\d+$", "", event["name"])[:70], event["dur"])
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in devices
        and (event["pid"], event["tid"]) in streams
    ]


if __name__ == "__main__":
    main(sys.argv[1:])

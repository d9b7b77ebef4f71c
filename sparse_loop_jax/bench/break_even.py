"""`sparse-loop bench break-even`: the context from which on sparse decode is faster."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax

from sparse_loop_jax.bench import measure
from sparse_loop_jax.bench.report import Row
from sparse_loop_jax.kernels.tuning import file_name
from sparse_loop_jax.models import OuroConfig
from sparse_loop_jax.sparse import break_even


def entries(config: OuroConfig, dtype: str, rows: Sequence[Row]) -> list[dict]:
    """Entries of a device's file, from the rows of `bench_decode`."""
    speeds: dict[tuple[int, float], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["retention"] < 1:
            by_context = speeds[row["batch"], row["retention"]]
            by_context[str(row["context"])] = round(row["vs dense"], 4)
    shape = dict(zip(break_even.SHAPE_FIELDS, break_even.shape_of(config), strict=True))
    return [
        {
            "shape": shape,
            "dtype": dtype,
            "batch": batch,
            "retention": retention,
            "times dense": by_context,
        }
        for (batch, retention), by_context in sorted(speeds.items())
    ]


def write(path: str | Path | None, found: list[dict], command: str) -> Path:
    """Writes the entries, in place of older ones of the same shape and dtype.

    Args:
      path: where to; None: `<device>.json` here, to be moved into the package's
        `data/break_even` by whoever finds it good.

    Returns:
      The path.

    Raises:
      ValueError: there is a file of another device, or one that cannot be read.
    """
    device = jax.devices()[0].device_kind
    path = Path(path or file_name(device))
    kept = []
    if path.exists():
        other, _ = break_even.read(path)
        if other != device:
            raise ValueError(f"{path} is of {other!r}, this is {device!r}: name another file")
        kinds = [(e["shape"], e["dtype"]) for e in found]
        kept = [
            e
            for e in json.loads(path.read_text())["entries"]
            if (e["shape"], e["dtype"]) not in kinds
        ]
    made = {"date": time.strftime("%Y-%m-%d"), "command": command, **measure.setup_info()}
    data = {"device": device, "made": made, "entries": kept + found}
    path.write_text(json.dumps(data, indent=1) + "\n")
    break_even.read(path)  # what was written can be read
    return path

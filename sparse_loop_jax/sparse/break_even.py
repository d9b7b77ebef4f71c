"""From which context on a sparse step is faster than a dense one, as measured.

A device's file is package data, `data/break_even/<device>.json`, written by `sparse-loop bench
break-even`. It holds speeds at some contexts; between two of them the speed is taken to run
straight, as a step's time does over its context while it reads K/V.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.sparse.config import SparseDecodeConfig

# What of a model decides how long a step takes.
SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "total_ut_steps",
)


class SparseSlowerWarning(UserWarning):
    """Sparse decode was asked for where it was measured to be slower than dense."""


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """One entry of a device's file.

    Attributes:
      shape: values of `SHAPE_FIELDS`.
      dtype: of weights and cache, such as "bfloat16".
      batch: requests that decode together.
      retention: share of the keys kept, in (0, 1).
      speeds: (context in tokens, speed over that of dense) in ascending order.
    """

    shape: tuple[int, ...]
    dtype: str
    batch: int
    retention: float
    speeds: tuple[tuple[int, float], ...]

    @property
    def slower_below(self) -> int:
        """Up to this context sparse is slower; 0 where it never was."""
        slower = [i for i, (_, speed) in enumerate(self.speeds) if speed < 1]
        if not slower:
            return 0
        (context, speed), after = self.speeds[slower[-1]], self.speeds[slower[-1] + 1 :]
        if not after:
            return context
        further, faster = after[0]
        return round(context + (further - context) * (1 - speed) / (faster - speed))

    @property
    def is_reached(self) -> bool:
        """Whether sparse is as fast as dense at the longest context that was measured."""
        return self.speeds[-1][1] >= 1

    def __str__(self) -> str:
        least, most = self.speeds[0][0], self.speeds[-1][0]
        if not self.is_reached:
            return f"not up to {most:,} tokens"
        if not self.slower_below:
            return f"at {least:,} tokens or fewer"
        return f"from {self.slower_below:,} tokens"


def shape_of(config: OuroConfig) -> tuple[int, ...]:
    """The key of a model's shape."""
    return tuple(getattr(config, name) for name in SHAPE_FIELDS)


def measured(config: OuroConfig, dtype) -> Iterator[tuple[str, list[BreakEven]]]:
    """What was measured of models of this shape, by name of the device."""
    folder = importlib.resources.files("sparse_loop_jax") / "data" / "break_even"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            device, entries = _shipped(file)
            ours = [e for e in entries if (e.shape, e.dtype) == (shape_of(config), str(dtype))]
            if ours:
                yield device, ours


def slower_below(entries: list[BreakEven], batch: int, retention: float) -> int:
    """The context up to which sparse decode is slower for sure; 0 where nothing says so.

    More requests, or fewer keys kept, are faster at the same context. So an entry with at
    least as many requests and at most the same retention gives a bound from below.
    """
    bounds = [e.slower_below for e in entries if e.batch >= batch and e.retention <= retention]
    return max(bounds, default=0)


def warning(
    config: OuroConfig, dtype, sparse: SparseDecodeConfig, device: str, batch: int, context: int
) -> str | None:
    """What to tell someone whose requests are all too short to gain; None: nothing.

    Args:
      dtype: of weights and cache.
      device: JAX's `device_kind`.
      batch: requests that decode together.
      context: tokens of the longest at its end.
    """
    # Other loops were not measured. How a row is corrected costs next to nothing.
    plain = dataclasses.replace(SparseDecodeConfig(), key_retention=sparse.key_retention)
    if sparse.is_dense or dataclasses.replace(sparse, capacity=None) != plain:
        return None
    entries = dict(measured(config, dtype)).get(device, [])
    bound = slower_below(entries, batch, sparse.key_retention)
    if context >= bound:
        return None
    return (
        f"sparse decode was measured slower than dense on {device} below {bound:,} tokens "
        f"for {batch} request{'s' if batch > 1 else ''} at key_retention "
        f"{sparse.key_retention:g}; these requests end at {context:,}: leave `sparse` out to "
        "be faster"
    )


def read(file: Traversable | Path) -> tuple[str, list[BreakEven]]:
    """The device and the entries of a file.

    Raises:
      ValueError: it is not such a file; the message names it, the place and what is wrong.
    """
    where = "the file"
    try:
        data = json.loads(file.read_text())
        device = data["device"]
        entries = []
        for index, entry in enumerate(data["entries"]):
            where = f"entries[{index}]"
            entries.append(_entry(entry))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file.name}: {where}: {type(error).__name__}: {error}; "
            "`sparse-loop bench break-even` writes such files"
        ) from error
    return device, entries


# A generation looks at every call; what ships with the package does not change.
_shipped = functools.cache(read)


def _entry(entry: dict) -> BreakEven:
    speeds = sorted((int(context), float(s)) for context, s in entry["times dense"].items())
    if not speeds:
        raise ValueError("no speed was measured")
    return BreakEven(
        shape=tuple(int(entry["shape"][name]) for name in SHAPE_FIELDS),
        dtype=str(entry["dtype"]),
        batch=int(entry["batch"]),
        retention=float(entry["retention"]),
        speeds=tuple(speeds),
    )

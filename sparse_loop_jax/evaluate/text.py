"""What retention does to the prediction of given text, and to the attention behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sparse_loop_jax.evaluate.forcing import Forced, ForcedRun, force
from sparse_loop_jax.evaluate.inputs import at_retention, evenly
from sparse_loop_jax.evaluate.inside import summary_step
from sparse_loop_jax.evaluate.progress import Steps
from sparse_loop_jax.evaluate.report import Row
from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.models.ouro import Ouro
from sparse_loop_jax.sparse.arithmetic import retained_counts
from sparse_loop_jax.sparse.config import CONSUME, SparseDecodeConfig

# Ranges of context length that the table by position has.
_BINS = 8


@dataclasses.dataclass
class _Tokens:
    """Decoded rows of all windows at one retention, one after the other."""

    nll: np.ndarray
    margin: np.ndarray
    predicted: np.ndarray
    kl: np.ndarray
    length: np.ndarray  # keys that the row saw
    window: np.ndarray  # index of its window


@dataclasses.dataclass
class _Inside:
    """Loops that capture or consume, `[rows, loops, layers, heads]`."""

    loops: list[int]
    mass: np.ndarray
    error: np.ndarray
    size: np.ndarray
    length: np.ndarray  # [rows]


def measure_text(
    model: Ouro,
    windows: Sequence[Forced],
    retentions: Sequence[float],
    *,
    sparse: SparseDecodeConfig,
    batch: int,
    inside_windows: int,
    implementation: str | None,
    steps: Steps,
) -> dict[str, list[Row]]:
    """Tables "text", "positions" and perhaps "attention"; see `evaluate` for their columns.

    Args:
      retentions: falling, 1.0 first.
      sparse: everything of the method but its retention.
      batch: windows at once.
      inside_windows: windows of which the attention is looked at; may be 0.
      steps: told of `parts` parts.
    """
    longest = max(len(w.ids) - 1 for w in windows)
    configs = [at_retention(sparse, r, longest, model.config) for r in retentions]
    tokens: list[list[_Tokens]] = [[] for _ in retentions]
    for start in range(0, len(windows), batch):
        group = windows[start : start + batch]
        steps.begin("text, dense")
        dense = force(model, group, keep_logits=True, implementation=implementation)
        tokens[0].append(_tokens(dense, start))
        steps.done()
        for column, config in enumerate(configs[1:], start=1):
            steps.begin(f"text, retention {config.key_retention:g}")
            run = force(
                model, group, sparse=config, reference=dense.logits,
                implementation=implementation,
            )  # fmt: skip
            _require_sparse(run, config, model.config)
            tokens[column].append(_tokens(run, start))
            steps.done()
    joined = [_join(parts) for parts in tokens]

    looked_at: list[_Inside | None] = [None] * len(configs)
    group = evenly(list(windows), inside_windows)
    for column, config in enumerate(configs[1:] if group else [], start=1):
        steps.begin(f"attention, retention {config.key_retention:g}")
        run = force(
            model, group, sparse=config, step=summary_step, implementation=implementation
        )
        looked_at[column] = _inside(run)
        steps.done()
    tables = {
        "text": [
            _text_row(config, here, joined[0], inside, model)
            for config, here, inside in zip(configs, joined, looked_at, strict=True)
        ],
        "positions": [
            row
            for config, here, inside in zip(configs, joined, looked_at, strict=True)
            for row in _position_rows(config, here, joined[0], inside)
        ],
    }
    if group:
        tables["attention"] = [
            row
            for config, inside in zip(configs, looked_at, strict=True)
            if inside is not None
            for row in _attention_rows(config, inside)
        ]
    return tables


def parts(windows: int, retentions: int, batch: int, inside_windows: int) -> int:
    """Parts that `measure_text` reports to `steps`."""
    inside = retentions - 1 if inside_windows else 0
    return -(-windows // batch) * retentions + inside


def _require_sparse(run: ForcedRun, config: SparseDecodeConfig, model: OuroConfig) -> None:
    """A sparse run that ran dense is no result."""
    rows = int(run.live.sum()) * model.num_hidden_layers
    modes = config.modes(model.total_ut_steps)
    want = tuple(rows * sum(kind in mode for mode in modes) for kind in ("capture", "consume"))
    counted = run.counters.sparse
    got = (0, 0) if counted is None else (int(counted.captured), int(counted.consumed))
    if got != want:
        raise RuntimeError(f"the rows should capture and consume {want} times, and did {got}")


def _tokens(run: ForcedRun, first: int) -> _Tokens:
    live = run.live.T  # window by window
    window = np.broadcast_to(np.arange(live.shape[0])[:, None] + first, live.shape)
    scores = run.scores
    return _Tokens(
        *(np.asarray(x).T[live] for x in (scores.nll, scores.margin, scores.predicted)),
        kl=np.asarray(scores.kl).T[live],
        length=run.lengths.T[live],
        window=window[live],
    )


def _join(parts: list[_Tokens]) -> _Tokens:
    names = [f.name for f in dataclasses.fields(_Tokens)]
    return _Tokens(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


def _inside(run: ForcedRun) -> _Inside:
    loops = sorted(run.inside)

    def rows(name):
        # [loops, T, layers, B, heads] to [rows, loops, layers, heads]
        stacked = np.stack([getattr(run.inside[loop], name) for loop in loops])
        return np.moveaxis(stacked, (1, 3), (0, 1))[run.live].astype(np.float64)

    return _Inside(loops, rows("mass"), rows("error"), rows("size"), run.lengths[run.live])


def _text_row(
    config: SparseDecodeConfig, here: _Tokens, dense: _Tokens, inside: _Inside | None, model
) -> Row:
    change = (here.nll - dense.nll).astype(np.float64)
    flipped = here.predicted != dense.predicted
    row: Row = {
        "retention": config.key_retention,
        "tokens": len(here.nll),
        "keys read": keys_read(config, here.length, model.config),
        "KV bytes": kv_bytes(config, here.length, model.config, model.dtype.itemsize),
        "perplexity": float(np.exp(here.nll.mean(dtype=np.float64))),
        "nll": float(here.nll.mean(dtype=np.float64)),
        "nll change": float(change.mean()),
        "standard error": standard_error(change, here.window),
        "KL": float(here.kl.mean(dtype=np.float64)),
        "KL p99": float(np.quantile(here.kl, 0.99)),
        "agreement": float(1 - flipped.mean()),
        "margin": float(here.margin.mean(dtype=np.float64)),
        "margin where changed": float(dense.margin[flipped].mean()) if flipped.any() else None,
    }
    if inside is not None:
        row["mass"] = float(inside.mass[:, 0].mean())
        row["mass min"] = float(inside.mass[:, 0].min())
        for i, loop in enumerate(inside.loops[1:], start=1):
            row[f"mass in loop {loop}"] = float(inside.mass[:, i].mean())
        for i, loop in enumerate(inside.loops[1:], start=1):
            row[f"error in loop {loop}"] = _relative(inside.error[:, i], inside.size[:, i])
    return row


def standard_error(values: np.ndarray, groups: np.ndarray) -> float | None:
    """Of the mean of all values, whose groups are drawn and not they themselves.

    That of a ratio of sums, sum(values) to their number: a group counts by its size. Groups
    of one size give the standard deviation of their means over the root of their number.
    None for a single group.
    """
    mean = values.mean()
    sums = np.array([(values[groups == g] - mean).sum() for g in np.unique(groups)])
    if len(sums) < 2:
        return None
    return float(np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / len(values))


def _attention_rows(config: SparseDecodeConfig, inside: _Inside) -> list[Row]:
    _, loops, layers, heads = inside.mass.shape
    return [
        {
            "retention": config.key_retention,
            "loop": inside.loops[i],
            "layer": layer,
            "head": head,
            "mass": float(inside.mass[:, i, layer, head].mean()),
            "mass min": float(inside.mass[:, i, layer, head].min()),
            "error": _relative(inside.error[:, i, layer, head], inside.size[:, i, layer, head]),
        }
        for i in range(loops)
        for layer in range(layers)
        for head in range(heads)
    ]


def _position_rows(
    config: SparseDecodeConfig, here: _Tokens, dense: _Tokens, inside: _Inside | None
) -> list[Row]:
    low, high = int(here.length.min()), int(here.length.max())
    edges = np.unique(np.linspace(low, high + 1, _BINS + 1).round().astype(int))
    rows = []
    for first, last in zip(edges[:-1], edges[1:] - 1, strict=True):
        mine = (here.length >= first) & (here.length <= last)
        if not mine.any():
            continue
        row: Row = {
            "retention": config.key_retention,
            "from": int(first),
            "to": int(last),
            "tokens": int(mine.sum()),
            "nll": float(here.nll[mine].mean(dtype=np.float64)),
            "nll change": float((here.nll - dense.nll)[mine].mean(dtype=np.float64)),
            "KL": float(here.kl[mine].mean(dtype=np.float64)),
            "mass": None,
            "error": None,
        }
        if inside is not None:
            seen = (inside.length >= first) & (inside.length <= last)
            if seen.any():
                row["mass"] = float(inside.mass[seen, 0].mean())
                row["error"] = _relative(inside.error[seen, 1:], inside.size[seen, 1:])
        rows.append(row)
    return rows


def _relative(error: np.ndarray, size: np.ndarray) -> float:
    """Root of the summed squared errors over the summed squared norms."""
    return float(np.sqrt(error.sum() / size.sum()))


def keys_read(config: SparseDecodeConfig, lengths: np.ndarray, model: OuroConfig) -> float:
    """Share of the keys of dense attention that rows seeing `lengths` keys read."""
    read = sum(_keys_by_loop(config, lengths, model))
    return float(read / (int(lengths.sum(dtype=np.int64)) * model.total_ut_steps))


def kv_bytes(
    config: SparseDecodeConfig, lengths: np.ndarray, model: OuroConfig, itemsize: int
) -> float:
    """Bytes of K/V that a decoded row reads on average, over all layers and loops.

    Each query head reads its own kept keys; what heads of a group have in common is counted
    for each of them, though never more than all keys of their shared plane.
    """
    modes = config.modes(model.total_ut_steps)
    total = 0
    for mode, keys in zip(modes, _keys_by_loop(config, lengths, model), strict=True):
        dense = int(lengths.sum(dtype=np.int64)) * model.num_key_value_heads
        total += min(keys * model.num_attention_heads, dense) if mode == CONSUME else dense
    per_key = 2 * model.head_dim * itemsize * model.num_hidden_layers
    return total * per_key / len(lengths)


def _keys_by_loop(config: SparseDecodeConfig, lengths, model: OuroConfig) -> list[int]:
    counts = retained_counts(config.key_retention, int(lengths.max()))
    # The true mass of the kept keys takes the scores of them all.
    kept = lengths if config.mass_scaling == "oracle" else counts[lengths]
    return [
        int((kept if mode == CONSUME else lengths).sum(dtype=np.int64))
        for mode in config.modes(model.total_ut_steps)
    ]

"""A directory of safetensors files: one, or several with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from sparse_loop_jax.checkpoint.safetensors import SafetensorsWriter, TensorInfo, read_header
from sparse_loop_jax.checkpoint.strict_json import listed, read_json_object

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5_000_000_000

Specs = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint directory by name, from headers alone.

    Raises:
      FileNotFoundError: there are no safetensors files, or one that the index names is
        missing.
      ValueError: a malformed file; an index that leaves its directory or that does not
        agree with its files.
    """
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if index.exists():
        return _read_sharded(directory)
    if single.exists():
        return read_header(single)
    stray = sorted(p.name for p in directory.glob("*.safetensors"))
    found = f"; it has {', '.join(stray[:3])}, but no index" if stray else ""
    raise FileNotFoundError(
        f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME} is there{found} "
        "(weights in other formats, pickles among them, are never read)"
    )


def _read_sharded(directory: Path) -> dict[str, TensorInfo]:
    index = directory / INDEX_NAME
    weight_map = read_json_object(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    files = {name: _shard_path(directory, name) for name in sorted(set(weight_map.values()))}
    if SINGLE_NAME not in files and (directory / SINGLE_NAME).exists():
        raise ValueError(
            f"{directory}: has {SINGLE_NAME} and an index that does not name it; remove one"
        )
    headers = {name: read_header(path) for name, path in files.items()}

    problems = []
    for tensor, file in weight_map.items():
        if tensor not in headers[file]:
            elsewhere = [name for name, header in headers.items() if tensor in header]
            where = f"; it is in {elsewhere[0]}" if elsewhere else ""
            problems.append(f"{tensor} should be in {file}, but is not{where}")
    for file, header in headers.items():
        for tensor in header:
            meant = weight_map.get(tensor)
            if meant is None:
                problems.append(f"{tensor} of {file} is not in the index")
            elif meant != file and tensor in headers[meant]:
                problems.append(f"{tensor} is in {file} as well as in {meant}")
    if problems:
        raise ValueError(f"{index}: does not agree with its files:{listed(problems)}")
    return {tensor: headers[file][tensor] for tensor, file in weight_map.items()}


def _shard_path(directory: Path, name: str) -> Path:
    """`directory / name`, if that is a plain name of a file that really lies there."""
    index = directory / INDEX_NAME
    if (
        name != Path(name).name
        or "\\" in name
        or "\0" in name
        or Path(name).suffix != ".safetensors"
    ):
        raise ValueError(
            f"{index}: names the file {name!r}; only plain names of .safetensors files in "
            "the same directory are read"
        )
    home = directory.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        # The cache of huggingface_hub keeps files in `blobs` and links to them from
        # `snapshots/<commit>`.
        allowed.append(home.parent.parent / "blobs")
    path = directory / name
    if path.resolve().parent not in allowed:
        raise ValueError(
            f"{index}: names the file {name!r}, which is a link to {path.resolve()}, outside "
            "the directory of the checkpoint"
        )
    if not path.exists():
        raise FileNotFoundError(f"{index}: names the file {name!r}, which does not exist")
    return path


def plan_shards(
    specs: Specs, shard_bytes: int
) -> list[dict[str, tuple[np.dtype, tuple[int, ...]]]]:
    """Cuts tensors, in order, into files of at most `shard_bytes` of data.

    A tensor that is larger than that gets a file of its own.

    Raises:
      ValueError: `shard_bytes` is not a positive integer.
    """
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ValueError(f"shard_bytes must be a positive integer, got {shard_bytes!r}")
    shards: list[dict[str, tuple[np.dtype, tuple[int, ...]]]] = [{}]
    used = 0
    for name, spec in specs.items():
        nbytes = _nbytes(spec)
        if shards[-1] and used + nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = spec
        used += nbytes
    return shards


def write_tensors(
    directory: Path,
    specs: Specs,
    tensors: Iterator[tuple[str, np.ndarray]],
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes one file, or several and their index, in the names that are customary.

    Args:
      directory: an existing directory without such files.
      specs: name to (dtype, shape), known before the first tensor is.
      tensors: (name, array) in the order of `specs`; one is held at a time.
      shard_bytes: see `plan_shards`.
    """
    shards = plan_shards(specs, shard_bytes)
    count = len(shards)
    files = [SINGLE_NAME]
    if count > 1:
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file, shard in zip(files, shards, strict=True):
        with SafetensorsWriter(directory / file, shard) as writer:
            for _ in shard:
                writer.write(*next(tensors))
    if count > 1:
        index = {
            "metadata": {"total_size": sum(_nbytes(spec) for spec in specs.values())},
            "weight_map": {name: f for f, s in zip(files, shards, strict=True) for name in s},
        }
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _nbytes(spec: tuple[np.dtype, tuple[int, ...]]) -> int:
    dtype, shape = spec
    return dtype.itemsize * math.prod(shape)

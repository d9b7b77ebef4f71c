"""Reading and writing safetensors files, one tensor at a time.

A file is an unsigned 64-bit little-endian length, a JSON header of that length, and the
tensors' bytes without gaps (https://huggingface.co/docs/safetensors). The header is checked
completely before any tensor is read: afterwards each tensor is known to lie inside the file
and to have the size that its shape and dtype ask for. bfloat16 is `ml_dtypes.bfloat16`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparse_loop_jax.checkpoint.dtypes import BFLOAT16, CAST_ELEMENTS, cast_into
from sparse_loop_jax.checkpoint.strict_json import parse_json_object, require_regular_file

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Room for 30,000 tensors; the parsed form takes some twenty times as much memory.
MAX_HEADER_BYTES = 4 * 2**20
MAX_RANK = 8


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor is: `nbytes` at `offset` (absolute, in bytes) of `file`."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file by name, in the order of their data; reads no tensor.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is truncated or malformed; the message names the file, the tensor
        and the numbers.
    """
    size = require_regular_file(path)
    if size < 8:
        raise ValueError(f"{path}: {size} bytes are too few for a safetensors file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(
                f"{path}: the header should have {length} bytes, but only {size - 8} follow; "
                "the file is truncated or is not a safetensors file"
            )
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path}: a header of {length} bytes is larger than {MAX_HEADER_BYTES}"
            )
        data = file.read(length)
    # The format allows blanks after the object, to align the data, but not before it.
    if not data.startswith(b"{"):
        raise ValueError(f"{path}: the header does not begin with '{{'")
    header = parse_json_object(data, f"{path}: header")
    _check_metadata(path, header.pop("__metadata__", {}))
    start = 8 + length
    tensors = [_tensor_info(path, name, entry, start) for name, entry in header.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    _check_layout(path, tensors, start, size)
    return {info.name: info for info in tensors}


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path}: __metadata__ must map strings to strings")


def _tensor_info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """One entry of the header, its numbers checked against each other."""
    where = f"{path}: tensor {name!r:.200}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: expected exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(
            f"{where}: dtype {entry['dtype']!r:.200} is not supported, only {', '.join(DTYPES)}"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise ValueError(
            f"{where}: shape must be at most {MAX_RANK} sizes below 2^63, got {shape!r:.200}"
        )
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{where}: data_offsets must be two sizes, got {offsets!r:.200}")
    begin, end = offsets
    info = TensorInfo(path, name, dtype, tuple(shape), start + begin)
    if end - begin != info.nbytes:
        raise ValueError(
            f"{where}: data_offsets [{begin}, {end}] span {end - begin} bytes, but shape "
            f"{shape} of {entry['dtype']} needs {info.nbytes}"
        )
    return info


def _is_sizes(value: Any) -> bool:
    """A list of integers from 0 to 2^63 - 1; booleans are integers to Python, not here."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_layout(path: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    """Sorted by offset, the tensors fill the file without gaps and without overlaps."""
    end, previous = start, "the header"
    for info in tensors:
        if info.offset != end:
            what = "overlaps" if info.offset < end else "leaves a gap after"
            raise ValueError(
                f"{path}: tensor {info.name!r:.200} begins at byte {info.offset - start} of "
                f"the data and {what} {previous}, which ends at {end - start}"
            )
        end, previous = info.offset + info.nbytes, f"{info.name!r:.200}"
    if end != size:
        problem = "is truncated" if end > size else "has bytes that belong to no tensor"
        raise ValueError(
            f"{path}: the file {problem}: the tensors end at byte {end}, the file at {size}"
        )


def read_tensor(info: TensorInfo) -> np.ndarray:
    """One tensor as stored."""
    out = np.empty(info.shape, info.dtype)
    read_tensor_into(info, out)
    return out


def read_tensor_into(info: TensorInfo, out: np.ndarray) -> None:
    """Reads one tensor into `out`, rounding where the dtypes differ.

    Args:
      info: from `read_header`.
      out: a C-contiguous array of the same shape; blocks of rows of a larger array are.

    Raises:
      ValueError: the shapes differ, the file has changed since its header was read, or a
        value is out of the range of `out`'s dtype.
    """
    if out.shape != info.shape or not out.flags.c_contiguous:
        raise ValueError(f"tensor {info.name!r} has shape {info.shape}, not {out.shape}")
    flat = out.reshape(-1)
    with info.file.open("rb", buffering=0) as file:
        file.seek(info.offset)
        if out.dtype == info.dtype:
            _read_exactly(file, flat, info)
            return
        part = np.empty(min(flat.size, CAST_ELEMENTS), info.dtype)
        for begin in range(0, flat.size, CAST_ELEMENTS):
            piece = part[: min(CAST_ELEMENTS, flat.size - begin)]
            _read_exactly(file, piece, info)
            cast_into(piece, flat[begin : begin + piece.size], info.name)


def _read_exactly(file: Any, array: np.ndarray, info: TensorInfo) -> None:
    # Not the array's own buffer: NumPy exports none for bfloat16.
    view = memoryview(array.view(np.uint8).data)
    while view:
        count = file.readinto(view)
        if not count:
            raise ValueError(f"{info.file}: the file ended inside tensor {info.name!r}")
        view = view[count:]


class SafetensorsWriter:
    """Writes a new file of which all names, dtypes and shapes are known beforehand.

    A context manager: `write` takes the tensors in the order of `tensors`, one at a time,
    and leaving the context without an error checks that none is missing.

    Args:
      path: the file to create; it must not exist.
      tensors: name to (dtype, shape).

    Raises:
      FileExistsError: `path` exists.
      ValueError: a dtype that the format does not have here.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]):
        self._path = path
        self._pending = list(tensors.items())[::-1]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in tensors.items():
            if dtype not in _NAMES:
                raise ValueError(f"tensor {name!r}: dtype {dtype} is not one of {list(DTYPES)}")
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned to 8 bytes
        self._file = path.open("xb", buffering=0)
        self._put(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes the next tensor.

        Raises:
          ValueError: it is not the next one, or its dtype or shape is not as announced.
        """
        given = (name, (array.dtype, array.shape))
        expected = self._pending.pop() if self._pending else None
        if given != expected:
            raise ValueError(f"{self._path}: got {given}, the next tensor is {expected}")
        self._put(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, error_type: Any, *_: Any) -> None:
        self._file.close()
        if error_type is None and self._pending:
            raise ValueError(f"{self._path}: {self._pending[-1]} was not written")

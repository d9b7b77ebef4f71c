"""The safetensors reader and writer, against the official package and hostile files."""

from __future__ import annotations

import json
import os
import random

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from sparse_loop_jax.checkpoint.safetensors import (
    MAX_HEADER_BYTES,
    SafetensorsWriter,
    read_header,
    read_tensor,
    read_tensor_into,
)

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def bits(shape, dtype, seed=0):
    """Random bit patterns, NaN payloads and subnormals among them."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def pack(header, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin, end, shape, dtype: object = "F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# Agreement with the official package ------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_what_the_official_package_wrote(tmp_path, dtype):
    tensors = {
        "a": bits((3, 5), dtype),
        "b.c": bits((7,), dtype, 1),
        "zero": bits((0, 4), dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    infos = read_header(tmp_path / "x.safetensors")
    assert set(infos) == set(tensors)
    for name, expected in tensors.items():
        got = read_tensor(infos[name])
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()
        assert infos[name].nbytes == expected.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_official_package_reads_what_was_written(tmp_path, dtype):
    path = tmp_path / "x.safetensors"
    tensors = {
        "b": bits((3, 5), dtype),
        "a": bits((2, 2, 2), dtype, 1),
        "s": bits((), dtype, 2),
    }
    specs = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    with SafetensorsWriter(path, specs) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, expected in tensors.items():
        assert loaded[name].dtype == expected.dtype
        assert loaded[name].shape == expected.shape
        assert loaded[name].tobytes() == expected.tobytes()
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert next(iter(read_header(path).values())).offset % 8 == 0


def test_blocks_of_rows_are_read_in_place(tmp_path):
    tensors = {"q": bits((4, 3), np.float32), "k": bits((2, 3), np.float32, 1)}
    save_file(tensors, tmp_path / "x.safetensors")
    infos = read_header(tmp_path / "x.safetensors")
    fused = np.zeros((6, 3), np.float32)
    read_tensor_into(infos["q"], fused[:4])
    read_tensor_into(infos["k"], fused[4:])
    assert fused.tobytes() == tensors["q"].tobytes() + tensors["k"].tobytes()


def test_rounding_while_reading_matches_numpy(tmp_path, monkeypatch):
    monkeypatch.setattr("sparse_loop_jax.checkpoint.safetensors.CAST_ELEMENTS", 7)
    values = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    save_file({"x": values}, tmp_path / "x.safetensors")
    out = np.empty((5, 9), ml_dtypes.bfloat16)
    read_tensor_into(read_header(tmp_path / "x.safetensors")["x"], out)
    assert out.tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()


def test_a_value_beyond_the_dtype_is_refused(tmp_path):
    values = np.array([1.0, 70000.0, np.inf], np.float32)
    save_file({"big": values, "inf": values[2:]}, tmp_path / "x.safetensors")
    infos = read_header(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"tensor big: the value 70000\.0 .* float16"):
        read_tensor_into(infos["big"], np.empty(3, np.float16))
    out = np.empty(1, np.float16)
    read_tensor_into(infos["inf"], out)  # an infinity that was there stays one
    assert np.isinf(out[0])


# Bad files --------------------------------------------------------------------------------

GOOD = {"a": entry(0, 8, [2]), "b": entry(8, 12, [1])}
DATA = bytes(12)
HOSTILE = {
    "empty": (b"", "0 bytes are too few"),
    "seven bytes": (bytes(7), "7 bytes are too few"),
    "header larger than the file": (pack(GOOD, DATA, 2**63), "should have 9223372036854775808"),
    "header longer by one": (pack(b"{}", b"", 3), "should have 3 bytes, but only 2 follow"),
    "absurd header": (pack(b"{" + b" " * MAX_HEADER_BYTES + b"}"), "is larger than"),
    "no header": (pack(b"", DATA), "does not begin with"),
    "blank first": (pack(b" {}"), "does not begin with"),
    "not JSON": (pack(b"{nope}"), "not valid JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "not valid JSON"),
    "cut JSON": (pack(json.dumps(GOOD).encode()[:-1], DATA), "not valid JSON"),
    "two objects": (pack(b"{}{}"), "not valid JSON"),
    "deeply nested": (pack(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "NaN": (pack(b'{"a": NaN}'), "NaN is not a JSON number"),
    "infinite": (pack(b'{"a": 1e999}'), "1e999 is out of range"),
    "endless integer": (pack(b'{"a": ' + b"1" * 5000 + b"}"), "not valid JSON"),
    "duplicate name": (pack(b'{"a": 1, "b": 2, "a": 3}'), "'a' occurs twice"),
    "metadata is a list": (pack({"__metadata__": []}), "__metadata__ must map"),
    "metadata of numbers": (pack({"__metadata__": {"a": 1}}), "__metadata__ must map"),
    "entry is a list": (pack({"a": []}), "tensor 'a': expected exactly dtype, shape"),
    "entry lacks a field": (pack({"a": {"dtype": "F32", "shape": []}}), "expected exactly"),
    "entry has another field": (
        pack({"a": {**entry(0, 4, [1]), "x": 1}}, bytes(4)),
        "expected exactly",
    ),
    "unsupported dtype": (pack({"a": entry(0, 8, [1], "I64")}, bytes(8)), "'I64' is not supp"),
    "dtype is a list": (pack({"a": entry(0, 4, [1], [])}, bytes(4)), r"\[\] is not supported"),
    "negative size": (pack({"a": entry(0, 4, [-1])}, bytes(4)), "shape must be"),
    "boolean size": (pack({"a": entry(0, 4, [True])}, bytes(4)), "shape must be"),
    "fractional size": (pack({"a": entry(0, 4, [1.0])}, bytes(4)), "shape must be"),
    "huge size": (pack({"a": entry(0, 4, [2**64, 0])}, bytes(4)), "shape must be"),
    "nine dimensions": (pack({"a": entry(0, 4, [1] * 9)}, bytes(4)), "shape must be"),
    "shape is a number": (pack({"a": entry(0, 4, 1)}, bytes(4)), "shape must be"),
    "one offset": (
        pack({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}, bytes(4)),
        "data_offsets must be two sizes",
    ),
    "negative offset": (pack({"a": entry(-4, 0, [1])}, bytes(4)), "data_offsets must be two"),
    "backward offsets": (pack({"a": entry(4, 0, [1])}, bytes(4)), "span -4 bytes"),
    "size and offsets differ": (
        pack({"a": entry(0, 8, [3])}, bytes(8)),
        r"\[0, 8\] span 8 bytes, but shape \[3\] of F32 needs 12",
    ),
    "overflowing shape": (pack({"a": entry(0, 0, [2**62, 4])}), "needs 73786976294838206464"),
    "overlap": (
        pack({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, DATA),
        "tensor 'b' begins at byte 4 of the data and overlaps 'a', which ends at 8",
    ),
    "same place twice": (
        pack({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)),
        "overl",
    ),
    "gap": (
        pack({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, DATA),
        "'b' begins at byte 8 of the data and leaves a gap after 'a', which ends at 4",
    ),
    "gap in front": (pack({"a": entry(4, 8, [1])}, bytes(8)), "leaves a gap after the header"),
    "truncated data": (pack(GOOD, DATA[:-1]), "the file is truncated: the tensors end at"),
    "out of range": (pack({"a": entry(0, 2**40, [2**38])}, DATA), "the file is truncated"),
    "surplus data": (pack(GOOD, DATA + b"x"), "has bytes that belong to no tensor"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_bad_files_are_refused(tmp_path, case):
    data, message = HOSTILE[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_the_good_version_of_the_bad_files_is_read(tmp_path):
    path = tmp_path / "good.safetensors"
    path.write_bytes(pack(json.dumps(GOOD).encode() + b"   ", DATA))
    assert list(read_header(path)) == ["a", "b"]


def test_no_file_a_directory_and_a_pipe(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_header(tmp_path / "missing")
    with pytest.raises(ValueError, match="not a regular file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_header(tmp_path / "pipe")  # and does not wait for a writer


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(100, np.float32)}, path)
    info = read_header(path)["a"]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="ended inside tensor 'a'"):
        read_tensor(info)


@pytest.mark.parametrize("out", [np.empty((3, 2), np.float32), np.empty((3, 2), np.float32).T])
def test_a_target_that_does_not_fit(tmp_path, out):
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"'a' has shape \(2, 3\)"):
        read_tensor_into(read_header(tmp_path / "x.safetensors")["a"], out)


def test_the_writer_insists_on_what_was_announced(tmp_path):
    f32 = np.dtype(np.float32)
    with pytest.raises(ValueError, match="dtype float64 is not one of"):
        SafetensorsWriter(tmp_path / "f64", {"a": (np.dtype(np.float64), (1,))})
    assert not (tmp_path / "f64").exists()

    specs = {"a": (f32, (2,)), "b": (f32, (1,))}
    wrong = {
        "order": ("b", np.zeros(1, f32)),
        "dtype": ("a", np.zeros(2, np.float16)),
        "shape": ("a", np.zeros((1, 2), f32)),
    }
    for what, (name, array) in wrong.items():
        with (
            pytest.raises(ValueError, match="the next tensor is"),
            SafetensorsWriter(tmp_path / what, specs) as writer,
        ):
            writer.write(name, array)
    with (
        pytest.raises(ValueError, match=r"'b'.* was not written"),
        SafetensorsWriter(tmp_path / "short", specs) as writer,
    ):
        writer.write("a", np.zeros(2, f32))
    with (
        pytest.raises(ValueError, match="the next tensor is None"),
        SafetensorsWriter(tmp_path / "long", {}) as writer,
    ):
        writer.write("a", np.zeros(2, f32))
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "short", specs)


# Mutations --------------------------------------------------------------------------------

TOKENS = [
    *(b'"F16"', b'"BF16"', b'"I64"', b"null", b"-1", b"true", b"1e5", b"NaN", b"9" * 30),
    *(b"[", b"]", b"{", b"}", b"[[", b",", b'"', b"\\u0000", b"\xff", b"0", b": "),
]


def mutate(good: bytes, rng: random.Random) -> bytes:
    """One to three changes of the length, of the header or of the file's size."""
    data = bytearray(good)
    end = 8 + int.from_bytes(good[:8], "little")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(8, end)
        match rng.randrange(8):
            case 0:
                data[rng.randrange(8)] = rng.randrange(256)
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                data += bytes(rng.randint(1, 20))
            case 3:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 4:
                token = rng.choice(TOKENS)
                data[at : at + len(token)] = token
            case 5:  # inserted, the length following it
                token = rng.choice(TOKENS)
                data[at:at] = token
                data[:8] = (end - 8 + len(token)).to_bytes(8, "little")
            case 6:  # another digit
                digits = [i for i in range(8, min(end, len(data))) if 48 <= data[i] < 58]
                if digits:
                    data[rng.choice(digits)] = 48 + rng.randrange(10)
            case 7:  # copied over another place
                size = rng.randint(1, 40)
                source = rng.randrange(8, end)
                data[at : at + size] = data[source : source + size]
    return bytes(data)


def test_every_mutation_is_harmless_or_refused(tmp_path):
    """Never another exception, and never other data under the same names and shapes."""
    tensors = {f"model.layers.{i}.w": bits((3, i + 1), np.float32, i) for i in range(6)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    good = path.read_bytes()
    expected = {(n, a.shape, a.dtype): a.tobytes() for n, a in tensors.items()}
    rng = random.Random(0)
    refused = 0
    for _ in range(600):
        path.write_bytes(mutate(good, rng))
        try:
            infos = read_header(path)
            found = {(n, i.shape, i.dtype): read_tensor(i).tobytes() for n, i in infos.items()}
        except ValueError:
            refused += 1
            continue
        for key in found.keys() & expected.keys():
            assert found[key] == expected[key]
        # A renamed tensor is left to the check of names; sizes cannot have changed.
        assert sum(map(len, found.values())) == sum(map(len, expected.values()))
    assert 400 < refused < 600

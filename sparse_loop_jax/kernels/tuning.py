"""Measured kernel configurations, by device and shape.

A device's file is package data, `data/tuning/<device>.json`, written by `sparse-loop bench
tune` together with the times that justify it. An op asks with the shapes of its arguments;
where its device or shape was not measured it gets the configuration that it computes itself.

What is found depends on the device and on shapes alone, so that results repeat bit for bit.
The number of rows of a request is not part of a key of paged attention: a verification then
cuts its context as decoding does, and its rows have the bits that decoding would give them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.resources
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import jax

Config = TypeVar("Config")
# The values of a key in the order of `Tunable.key`.
Key = tuple[int | str, ...]


@dataclasses.dataclass(frozen=True)
class Tunable:
    """What is measured of an op.

    Attributes:
      key: what a configuration is looked up by.
      fields: those of the op's configuration that an entry decides.
      serves_double: whether an entry also serves twice its length, where that has none.
        Contexts fill the upper half of the bucket that holds them.
    """

    key: tuple[str, ...]
    fields: tuple[str, ...]
    serves_double: bool = True


PRODUCT = ("block_out", "block_in", "num_warps", "num_stages")

OPS: Mapping[str, Tunable] = {
    "paged_attention": Tunable(
        ("batch", "kv_heads", "group", "head_dim", "length", "dtype"),
        ("block_keys", "splits", "min_keys", "num_warps", "num_stages"),
    ),
    "sparse_attention": Tunable(
        ("batch", "rows", "heads", "head_dim", "length", "dtype"),
        ("block_keys", "splits", "num_warps", "num_stages"),
    ),
    # A row of scores is held in registers: what suits it does not suit twice as many.
    "select_keys": Tunable(("rows", "length"), ("num_warps",), serves_double=False),
    # `rows` are the most that the configuration serves (`matvec.pallas.rows_served`).
    "project_qkv": Tunable(
        ("rows", "outputs", "inputs", "head_dim", "dtype"), PRODUCT, serves_double=False
    ),
    "gated_linear": Tunable(
        ("rows", "outputs", "inputs", "dtype"), PRODUCT, serves_double=False
    ),
    "linear_add_norm": Tunable(
        ("rows", "outputs", "inputs", "dtype"), (*PRODUCT, "splits"), serves_double=False
    ),
}
# Of a key: taken up to the next power of two, as the shapes of a generation are.
BUCKETED = ("batch", "rows", "length")


@dataclasses.dataclass(frozen=True)
class Table:
    """The entries of one file.

    Attributes:
      source: what the file is called in complaints.
      device: `device_kind` of the device it was made on.
      entries: op -> key -> fields of its configuration.
    """

    source: str
    device: str
    entries: Mapping[str, Mapping[Key, Mapping[str, int]]]

    def find(self, op: str, key: Key) -> Mapping[str, int]:
        """The entry that serves a bucketed key; empty where there is none."""
        entries = self.entries.get(op, {})
        if key in entries or not OPS[op].serves_double:
            return entries.get(key, {})
        at = OPS[op].key.index("length")
        length = key[at]
        assert isinstance(length, int)
        return entries.get((*key[:at], length // 2, *key[at + 1 :]), {})


def tuned(op: str, make: Callable[..., Config], **shape: Any) -> Config:
    """`make(**fields)` with the fields measured for this device and shape, or without any.

    Args:
      op: a name in `OPS`.
      make: gives the op's configuration; what is not among its arguments it computes.
      shape: the op's key, in numbers as they are (not bucketed); `dtype` may be one.

    Raises:
      ValueError: the device's file is broken, or an entry is no valid configuration; the
        message names the file, the entry and the value.
    """
    table = current_table()
    if table is None:
        return make()
    key = bucketed(op, **shape)
    fields = table.find(op, key)
    try:
        return make(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{table.source}: {op}: the entry for {describe(op, key)} is no configuration: "
            f"{dict(fields)}: {error}"
        ) from error


def bucketed(op: str, **shape: Any) -> Key:
    """The key of a shape.

    Raises:
      ValueError: the names are not those of the op's key.
    """
    names = OPS[op].key
    if set(shape) != set(names):
        raise ValueError(f"{op} is looked up by {names}, got {tuple(shape)}")
    return tuple(_part(name, shape[name]) for name in names)


def _part(name: str, value: Any) -> int | str:
    if name == "dtype":
        return jax.numpy.dtype(value).name
    return 1 << (value - 1).bit_length() if name in BUCKETED else value


def describe(op: str, key: Key) -> dict[str, int | str]:
    """A key with its names, as files have it."""
    return dict(zip(OPS[op].key, key, strict=True))


# Tables --------------------------------------------------------------------------------

_chosen: contextvars.ContextVar[tuple[Table | None] | None] = contextvars.ContextVar(
    "sparse_loop_jax_tuning", default=None
)


@contextlib.contextmanager
def using(table: Table | None) -> Iterator[None]:
    """Within it, `table` stands in for the device's; None: everything is computed.

    It decides when an op is traced: a program that is compiled already keeps what it has.
    """
    token = _chosen.set((table,))
    try:
        yield
    finally:
        _chosen.reset(token)


def current_table() -> Table | None:
    """The table of the default device, or the one that `using` put in its place."""
    chosen = _chosen.get()
    return device_table(jax.devices()[0].device_kind) if chosen is None else chosen[0]


@functools.cache
def device_table(device: str) -> Table | None:
    """The shipped table of a device, read once; None where there is none.

    Raises:
      ValueError: as `read_table`.
    """
    file = folder() / file_name(device)
    if not file.is_file():
        return None
    table = read_table(file)
    if table.device != device:
        raise ValueError(f"{table.source}: device is {table.device!r}, it should be {device!r}")
    return table


def folder() -> Traversable:
    """Where the shipped files are."""
    return importlib.resources.files("sparse_loop_jax") / "data" / "tuning"


def file_name(device: str) -> str:
    """ "NVIDIA H200" to "nvidia_h200.json"."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def read_table(file: Traversable | Path) -> Table:
    """Reads and checks a tuning file.

    Raises:
      ValueError: it is not JSON, or something is missing, unknown, twice there or of another
        type than it should be; the message names the file, the place and the value.
    """
    try:
        data = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file.name}: not JSON: {error}") from error
    check = _Checker(file.name)
    device = check.member(data, "the file", "device", str)
    entries = {}
    for op, listed in check.member(data, "the file", "ops", dict).items():
        if op not in OPS:
            raise ValueError(f"{file.name}: ops: {op!r} is none of {sorted(OPS)}")
        check.of_type(listed, f"ops.{op}", list)
        entries[op] = {}
        for index, entry in enumerate(listed):
            where = f"ops.{op}[{index}]"
            key = check.key(op, check.member(entry, where, "key", dict), f"{where}.key")
            config = check.member(entry, where, "config", dict)
            check.integers(config, f"{where}.config", OPS[op].fields)
            if key in entries[op]:
                raise ValueError(
                    f"{file.name}: {where}.key: {describe(op, key)} is there twice"
                )
            entries[op][key] = config
    return Table(file.name, device, entries)


KINDS = {dict: "an object", list: "a list", str: "a string", int: "an integer"}


@dataclasses.dataclass(frozen=True)
class _Checker:
    source: str

    def of_type(self, value: Any, where: str, kind: type) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.source}: {where} must be {KINDS[kind]}, got {value!r}")
        return value

    def member(self, data: Any, where: str, name: str, kind: type) -> Any:
        if name not in self.of_type(data, where, dict):
            raise ValueError(f"{self.source}: {where} has no {name!r}")
        return self.of_type(data[name], f"{where}.{name}", kind)

    def integers(self, data: dict, where: str, names: tuple[str, ...]) -> None:
        if set(data) != set(names):
            raise ValueError(f"{self.source}: {where} must have {names}, got {tuple(data)}")
        for name, value in data.items():
            if self.of_type(value, f"{where}.{name}", int) < 1:
                raise ValueError(f"{self.source}: {where}.{name} must be positive, got {value}")

    def key(self, op: str, data: dict, where: str) -> Key:
        names = OPS[op].key
        numbers = {name: value for name, value in data.items() if name != "dtype"}
        self.integers(numbers, where, tuple(name for name in names if name != "dtype"))
        if "dtype" in names:
            self.member(data, where, "dtype", str)
        for name in BUCKETED:
            value = numbers.get(name, 1)
            if value & (value - 1):
                raise ValueError(
                    f"{self.source}: {where}.{name} must be a power of two, got {value}"
                )
        return tuple(data[name] for name in names)

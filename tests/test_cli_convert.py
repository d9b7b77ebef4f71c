"""`sparse-loop convert`, and what all commands share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sparse_loop_jax import load
from sparse_loop_jax.cli import COMMANDS, main


@pytest.fixture(autouse=True)
def keep_the_platforms():
    """`convert` chooses the CPU for its process, which here is the tests'."""
    jax.devices()
    config: Any = jax.config
    before = config.jax_platforms
    yield
    config.update("jax_platforms", before)


def test_there_and_back(load_gold, tmp_path, capsys):
    source = load_gold("gqa").directory
    assert main(["convert", str(source), str(tmp_path / "a")]) == 0
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/a\nwrote {tmp_path}/b\n"
    for left, right in zip(
        jax.tree.leaves(load(source).params),
        jax.tree.leaves(load(tmp_path / "b").params),
        strict=True,
    ):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_dtype(load_gold, tmp_path):
    source = str(load_gold("mha").directory)
    assert main(["convert", source, str(tmp_path / "a"), "--dtype", "float16"]) == 0
    assert load(tmp_path / "a").dtype == np.float16


def test_complaints_are_one_line_and_status_2(load_gold, tmp_path, capsys):
    source = str(load_gold("mha").directory)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    cases = {
        str(tmp_path / "full"): "exists already and is not an empty directory",
        str(tmp_path / "no" / "parent"): "no such directory",
        "/proc/no/such": "error: ",  # an OSError, or a parent that is not there
    }
    for target, message in cases.items():
        assert main(["convert", source, target]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("sparse-loop: error: ")
        assert message in err
        assert err.count("\n") == 1
    assert main(["convert", str(tmp_path / "missing"), str(tmp_path / "y")]) == 2
    assert "missing: no such directory" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["full"]


def test_a_bug_keeps_its_traceback(load_gold, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyError("a bug")

    monkeypatch.setattr("sparse_loop_jax.checkpoint.convert", fail)
    with pytest.raises(KeyError, match="a bug"):
        main(["convert", str(load_gold("mha").directory), str(tmp_path / "x")])


@pytest.mark.parametrize(
    "argv",
    [[], ["nonsense"], ["convert"], ["convert", "a"], ["convert", "a", "b", "--dtype", "f8"]],
)
def test_bad_arguments(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: sparse-loop" in capsys.readouterr().err


def test_every_command_has_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n    {name} " in out
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert f"usage: sparse-loop {name}" in capsys.readouterr().out


def test_help_and_bad_arguments_do_not_wait_for_jax():
    code = """
import sys
from sparse_loop_jax.cli import main
for line in ("--help", "--version", "nonsense", "convert --help", "inspect --x"):
    try:
        main(line.split())
    except SystemExit:
        pass
    else:
        raise AssertionError(line)
heavy = {"jax", "flax", "numpy", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_as_a_module_and_as_a_script():
    arguments = ["inspect", "--page-size=0"]
    script = Path(sys.executable).parent / "sparse-loop"
    for command in ([sys.executable, "-m", "sparse_loop_jax"], [str(script)]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr == "sparse-loop: error: --page-size must be a power of two, got 0\n"


def test_conversion_starts_no_accelerator(load_gold, tmp_path):
    """Where JAX finds a GPU too, the process of the command uses the CPU only."""
    code = f"""
import jax
from sparse_loop_jax.cli import main
assert main(["convert", {str(load_gold("mha").directory)!r}, {str(tmp_path / "x")!r}]) == 0
from jax._src import xla_bridge
assert set(xla_bridge._backends) == {{"cpu"}}, xla_bridge._backends
"""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)

"""`sparse-loop inspect`: sizes by hand, for both formats."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from sparse_loop_jax.checkpoint import convert
from sparse_loop_jax.cli import main
from sparse_loop_jax.cli.inspect import memory_size, tokens_that_fit


def inspect(capsys, *argv) -> str:
    assert main(["inspect", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_a_golden_checkpoint_by_hand(load_gold, capsys):
    """gqa: hidden 128, 2 layers of 8/2 heads of 16, MLP 160, vocabulary 128, 4 loops."""
    layer = (8 + 2 + 2) * 16 * 128 + 128 * 128 + 3 * 128 * 160 + 4 * 128
    parameters = 2 * layer + 2 * 128 * 128 + 128 + 129
    kv = 4 * 2 * 2 * 2 * 16 * 4  # loops, layers, K and V, heads, head size, float32
    memory = 4 * parameters + 37 * kv  # room for 37 tokens: two pages of 16
    out = inspect(capsys, load_gold("gqa").directory, "--memory", memory)
    assert "gqa (Ouro, Hugging Face format)" in out
    assert "2, run 4 times; hidden 128, MLP 160" in out
    assert "8 query and 2 key/value heads of 16; rope theta 1e+06" in out
    assert f"parameters     {parameters:,}\n" in out
    assert f"weights        {4 * parameters:,} bytes (0.00 GiB) in float32\n" in out
    assert f"KV cache       {kv:,} bytes per token in float32\n" in out
    assert "in pages of 16" in out
    assert out.splitlines()[-1].split()[2] == "32"
    out = inspect(capsys, load_gold("gqa").directory, "--memory", memory, "--page-size", 1)
    assert out.splitlines()[-1].split()[2] == "37"
    out = inspect(
        capsys, load_gold("gqa").directory, "--memory", memory, "--kv-dtype", "float16"
    )
    assert f"KV cache       {kv // 2:,} bytes per token in float16\n" in out
    assert out.splitlines()[-1].split()[2] == "64"
    out = inspect(capsys, load_gold("gqa").directory, "--memory", 4 * parameters)
    assert out.splitlines()[-1].endswith(" none")


def test_both_formats_say_the_same(load_gold, tmp_path, capsys):
    source = Path(shutil.copytree(load_gold("mha").directory, tmp_path / "a" / "mha"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "b").mkdir()
    convert(source, tmp_path / "b" / "mha")
    first = inspect(capsys, source)
    second = inspect(capsys, tmp_path / "b" / "mha")
    assert "stop ids       0, 2\n" in first
    assert first.replace("Hugging Face", "native") == second


def test_the_bundled_model_and_common_sizes(capsys):
    out = inspect(capsys)
    assert "tiny-ouro (Ouro, Hugging Face format)" in out
    assert "parameters     6,116,865\n" in out
    assert "KV cache       20,480 bytes per token in bfloat16\n" in out
    for size in ("16.0", "24.0", "48.0", "80.0", "140.0"):
        assert f"  {size:>7} GiB" in out


def test_the_large_model_on_80_gib():
    """1.4B in bfloat16: 786,432 bytes a token, so 105,7xx tokens beside 2.87 GB."""
    from sparse_loop_jax.models import OURO_1_4B

    kv = OURO_1_4B.kv_bytes_per_token(2)
    free = memory_size("80GiB") - 2 * OURO_1_4B.num_parameters
    tokens = tokens_that_fit(free, kv, 16)
    assert kv == 786_432
    assert tokens % 16 == 0
    assert tokens * kv <= free < (tokens + 16) * kv


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("141GB", 141 * 10**9),
        ("512MiB", 2**29),
        ("2KB", 2000),
        ("7B", 7),
        ("1000", 1000),
        ("1TiB", 2**40),
    ],
)
def test_memory_sizes(text, size):
    assert memory_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "80gib", "80 XB", "0", "0GiB", "1e9", "inf"]
)
def test_bad_memory_sizes(text, capsys):
    assert main(["inspect", f"--memory={text}"]) == 2
    assert (
        f"--memory must be a size like 80GiB or 141GB, got {text!r}" in capsys.readouterr().err
    )


@pytest.mark.parametrize("size", [0, -16, 3])
def test_a_bad_page_size(size, capsys):
    assert main(["inspect", f"--page-size={size}"]) == 2
    assert f"--page-size must be a power of two, got {size}" in capsys.readouterr().err


def test_the_device_is_asked_for_its_memory(capsys, monkeypatch):
    class Device:
        device_kind = "a device"
        stats: dict[str, int] | None = None

        def memory_stats(self):
            return self.stats

    device = Device()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert main(["inspect", "--memory", "device"]) == 2
    assert "a device reports no memory; give --memory SIZE" in capsys.readouterr().err
    device.stats = {"bytes_limit": 5 * 2**30, "bytes_in_use": 2**30}
    assert "      4.0 GiB" in inspect(capsys, "--memory", "device")


def test_several_dtypes_need_a_choice(load_gold, tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    path = Path(shutil.copytree(load_gold("mha").directory, tmp_path / "mixed"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("float16")
    save_file(tensors, path / "model.safetensors")
    assert main(["inspect", str(path)]) == 2
    assert "choose the cache's with --kv-dtype" in capsys.readouterr().err
    assert "in float16, float32\n" in inspect(capsys, path, "--kv-dtype", "float32")


def test_complaints(load_gold, tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is no checkpoint" in capsys.readouterr().err
    path = str(load_gold("mha").directory)
    assert main(["inspect", path, "--revision", "main"]) == 2
    assert "revision is for Hub ids" in capsys.readouterr().err


def test_no_device_is_started(load_gold):
    code = f"""
from sparse_loop_jax.cli import main
assert main(["inspect", {str(load_gold("mha").directory)!r}]) == 0
from jax._src import xla_bridge
assert not xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

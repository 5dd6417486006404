"""Files that appear under their name only when they are whole: written under a temporary name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from lsverify.errors import InputError

M = TypeVar("M", bound=BaseModel)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; renamed to it at the end, removed if anything was raised."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes, whole or not at all; the folder is made if it is not there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def read_record(kind: type[M], file: Path) -> M:
    """A record that one of our commands wrote as JSON. Raises `InputError`, one line, for anything else."""
    try:
        return kind.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        said = str(error).splitlines()[0]
        raise InputError(
            f"record {str(file)!r} cannot be read ({said}): give a file that the same command wrote with --out"
        ) from None

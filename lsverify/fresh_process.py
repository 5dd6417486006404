"""A function called in a new Python process, so that nothing earlier in this one is measured with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def in_fresh_process(
    target: str, *args: Any, environment: Mapping[str, str] | None = None, **kwargs: Any
) -> Any:
    """Calls `target`, written "module:function", in a new Python process and returns what it returns.

    Arguments and result travel as JSON. The process sees this one's `sys.path` and environment, with `environment`
    added. Raises RuntimeError, with the last line of its error output, when it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        call, result = Path(folder, "call.json"), Path(folder, "result.json")
        call.write_text(json.dumps({"target": target, "args": args, "kwargs": kwargs}))
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from {__name__} import serve; serve()",
                str(call),
                str(result),
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **(environment or {}),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"{target} failed in its own process: {lines[-1]}")
        return json.loads(result.read_text())


def serve() -> None:
    """What the new process runs: read a call, make it, write its result."""
    call = json.loads(Path(sys.argv[1]).read_text())
    module, _, name = call["target"].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    Path(sys.argv[2]).write_text(json.dumps(function(*call["args"], **call["kwargs"])))

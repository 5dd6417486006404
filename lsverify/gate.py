"""Runs the ladder's suites on the cases asked for, with pytest as the engine, and returns their receipts."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lsverify.cases import Options, load_candidate
from lsverify.errors import InputError
from lsverify.evidence import RUNGS, CaseReceipt, Rung
from lsverify.pytest_plugin import JUDGED, TROUBLE, Evidence, as_arguments, case_id

Progress = Callable[[str, Rung], None]


def suites_folder() -> Path:
    """Where the suites are: beside the package in a checkout, inside it when installed from a wheel.

    Raises `InputError` when neither is there.
    """
    package = Path(__file__).parent
    for folder in (package / "suites", package.parent / "suites"):
        if (folder / "test_gradient.py").is_file():
            return folder
    raise InputError(
        f"no suites beside {str(package)!r}: install lsverify from a wheel or a whole checkout"
    )


def run_gate(
    options: Options, *, junit: Path | None = None, progress: Progress | None = None
) -> list[CaseReceipt]:
    """Judge every case of `options`; `progress(case, rung)` is called as rungs are settled.

    Raises `InputError` for bad input, before anything runs where it can be seen from the options alone; any other
    exception is a fault of lsverify itself.
    """
    options.cases()
    if options.candidate is not None:
        load_candidate(options.candidate)
    listener = _Listener(progress)
    files = [str(suites_folder() / f"test_{name}.py") for name in RUNGS]
    arguments = [
        *files,
        *as_arguments(options),
        "--import-mode=importlib",
        f"--rootdir={suites_folder()}",
        "-c",
        os.devnull,
        "-p",
        "lsverify.pytest_plugin",
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
    ]
    if junit is not None:
        arguments.append(f"--junitxml={junit}")
    with _only_our_plugin():
        pytest.main(arguments, plugins=[listener])
    if listener.trouble is not None:
        raise listener.trouble
    return listener.receipts


class _Listener:
    """Follows one pytest run from inside."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.receipts: list[CaseReceipt] = []
        self.trouble: BaseException | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            yield
        finally:
            self._tell(item, getattr(item, "funcargs", {}).get("evidence"))

    def _tell(self, item: pytest.Item, evidence: Evidence | None) -> None:
        if self._progress is not None and evidence is not None and evidence.settled:
            for rung in evidence.receipt.rungs:
                if item.path.stem == f"test_{rung.name}":
                    self._progress(case_id(evidence.config), rung)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        judged = session.config.stash.get(JUDGED, {})
        self.receipts = [evidence.receipt for evidence in judged.values() if evidence.settled]
        self.trouble = session.config.stash.get(TROUBLE, None)


@contextmanager
def _only_our_plugin() -> Iterator[None]:
    """Keeps whatever else is installed in the user's environment out of the run."""
    name = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

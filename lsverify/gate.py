"""Runs the ladder's suites on the cases asked for, with pytest as the engine, and returns their receipts."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from lsverify.cases import Options
from lsverify.errors import InputError
from lsverify.evidence import RUNGS, CaseConfig, CaseReceipt, Rung
from lsverify.pytest_plugin import JUDGED, TROUBLE, Evidence, as_arguments, case_id
from lsverify.whole_files import appearing

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

    `junit` is written whole at the end, and not at all when an error is raised. Raises `InputError` for bad input,
    before anything runs where it can be seen from the options alone, and KeyboardInterrupt when interrupted; any
    other exception is a fault of lsverify itself.
    """
    cases = options.checked()
    listener = _Listener(progress)
    with _written_whole(junit) as report, _only_our_plugin():
        code = pytest.main([*_arguments(options), *report], plugins=[listener])
        if listener.trouble is not None:
            raise listener.trouble
        if code == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"pytest ended with {code!r} instead of a verdict")
        # A case without a receipt would be missing from the table, and so from the exit code.
        missing = [case_id(case) for case in cases if case not in listener.receipts]
        if missing:
            raise RuntimeError(f"no receipt for {', '.join(missing)}")
    return [listener.receipts[case] for case in cases]


def _arguments(options: Options) -> list[str]:
    suites = suites_folder()
    return [
        *(str(suites / f"test_{name}.py") for name in RUNGS),
        *as_arguments(options),
        # Modules are named from the root: `suites.test_gradient` meets no module of the caller's.
        "--import-mode=importlib",
        f"--rootdir={suites.parent}",
        f"--confcutdir={suites}",
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


@contextmanager
def _written_whole(junit: Path | None) -> Iterator[list[str]]:
    """Pytest's arguments for a JUnit file that appears under its name once it is whole and true.

    Raises `InputError` when its folder is not there or it cannot be a file.
    """
    if junit is None:
        yield []
        return
    if junit.is_dir() or not junit.parent.is_dir():
        raise InputError(
            f"junit {str(junit)!r} is not a file in a folder that exists: create the folder, or choose another file"
        )
    with appearing(junit) as temporary:
        yield [f"--junitxml={temporary}"]


class _Listener:
    """Follows one pytest run from inside."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.receipts: dict[CaseConfig, CaseReceipt] = {}
        self.trouble: BaseException | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            yield
        finally:
            self._tell(item, getattr(item, "funcargs", {}).get("evidence"))

    def _tell(self, item: pytest.Item, evidence: Evidence | None) -> None:
        if self._progress is None or evidence is None or not evidence.settled:
            return
        # What a path prints is kept out of the way by pytest's capture; progress is to be seen.
        capture = item.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            for rung in evidence.receipt.rungs:
                if item.path.stem == f"test_{rung.name}":
                    self._progress(case_id(evidence.config), rung)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        judged = session.config.stash.get(JUDGED, {})
        self.receipts = {case: found.receipt for case, found in judged.items() if found.settled}
        self.trouble = session.config.stash.get(TROUBLE, None)


@contextmanager
def _only_our_plugin() -> Iterator[None]:
    """Keeps the user's own pytest set-up out of the run: other plugins, and options such as `-k`, which drop cases."""
    ours = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

"""The pytest plugin: suites written against the `evidence` fixture run on every case that the options name.

Loaded by pytest in every project where lsverify is installed, so nothing heavy is imported before a case runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lsverify.cases import Options
    from lsverify.evidence import CaseConfig, CaseReceipt, Rung


JUDGED = pytest.StashKey[dict[Any, "Evidence"]]()
TROUBLE = pytest.StashKey[Exception]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lsverify", "gradient parity of a GRPO step")
    several = {"action": "append", "default": []}
    group.addoption(
        "--lsv-arch", metavar="NAME", help="architecture; repeat for several", **several
    )
    group.addoption(
        "--lsv-policy", metavar="SPEC", help="detach policy; repeat for several", **several
    )
    group.addoption(
        "--lsv-candidate",
        metavar="NAME",
        help="judge this path instead of ours: MODULE:NAME or an installed name",
    )
    group.addoption("--lsv-reference", default="declared", help="declared or full")
    group.addoption("--lsv-require", metavar="RUNG", help="highest rung asked for")
    group.addoption("--lsv-dtype", default="float64")
    group.addoption("--lsv-prompt-length", type=int)
    group.addoption("--lsv-group-size", type=int)
    group.addoption("--lsv-response-length", metavar="N,N,..")
    group.addoption("--lsv-objective", default="grpo")
    group.addoption("--lsv-seed", type=int, default=0)
    group.addoption("--lsv-chunk", type=int)
    group.addoption("--lsv-branches", type=int)
    group.addoption("--lsv-lora", action="store_true", help="train adapters only")
    group.addoption("--lsv-quantised", action="store_true", help="over a base rounded to NF4")
    group.addoption("--lsv-tied", action="store_true", help="tie head and embedding")
    group.addoption("--lsv-spans", default="none", help="none, image or prefix")
    group.addoption(
        "--lsv-quick", action="store_true", help="the smallest problem that shows anything"
    )


def options_of(config: pytest.Config) -> Options:
    """The cases' options as given to pytest."""
    from lsverify.cases import Options

    get = config.getoption
    return Options(
        archs=tuple(get("--lsv-arch")),
        policies=tuple(get("--lsv-policy")),
        candidate=get("--lsv-candidate"),
        reference=get("--lsv-reference"),
        require=get("--lsv-require"),
        dtype=get("--lsv-dtype"),
        prompt_length=get("--lsv-prompt-length"),
        group_size=get("--lsv-group-size"),
        response_length=get("--lsv-response-length"),
        objective=get("--lsv-objective"),
        seed=get("--lsv-seed"),
        chunk=get("--lsv-chunk"),
        branches=get("--lsv-branches"),
        lora=get("--lsv-lora"),
        quantised=get("--lsv-quantised"),
        tied=get("--lsv-tied"),
        spans=get("--lsv-spans"),
        quick=get("--lsv-quick"),
    )


def as_arguments(options: Options) -> list[str]:
    """The same options as pytest arguments: the inverse of `options_of`."""
    arguments = [f"--lsv-arch={arch}" for arch in options.archs]
    arguments += [f"--lsv-policy={policy}" for policy in options.policies]
    for name in (
        "candidate",
        "reference",
        "require",
        "dtype",
        "prompt_length",
        "group_size",
        "response_length",
        "objective",
        "seed",
        "chunk",
        "branches",
        "spans",
    ):
        value = getattr(options, name)
        if value is not None:
            arguments.append(f"--lsv-{name.replace('_', '-')}={value}")
    flags = ("lora", "quantised", "tied", "quick")
    return arguments + [f"--lsv-{flag}" for flag in flags if getattr(options, flag)]


class Evidence:
    """A case, judged when first asked; `require` fails the test unless the rung holds."""

    def __init__(self, config: CaseConfig, stash: pytest.Stash) -> None:
        self.config = config
        self._stash = stash
        self._receipt: CaseReceipt | None = None

    @property
    def settled(self) -> bool:
        """Whether the case has been judged."""
        return self._receipt is not None

    @property
    def receipt(self) -> CaseReceipt:
        """The case's receipt. Bad input, or a fault of lsverify itself, ends the whole run."""
        if self._receipt is None:
            from lsverify.errors import InputError
            from lsverify.ladder import judge

            try:
                self._receipt = judge(self.config)
            except Exception as error:
                self._stash[TROUBLE] = error
                code = 2 if isinstance(error, InputError) else 3
                pytest.exit(f"lsverify: {type(error).__name__}: {error}", returncode=code)
        return self._receipt

    def require(self, name: str) -> Rung:
        """The rung of this name. Fails, with its detail, when it does not hold; one not asked for is let be."""
        from lsverify.evidence import RUNGS

        rung = next((rung for rung in self.receipt.rungs if rung.name == name), None)
        asked = RUNGS.index(name) <= RUNGS.index(self.config.require)
        if rung is None or (asked and not rung.holds):
            status = rung.status if rung else "missing"
            pytest.fail(f"{name}: {status}. {rung.detail if rung else ''}", pytrace=False)
        return rung


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "evidence" not in metafunc.fixturenames or not _ours(metafunc):
        return
    from lsverify.errors import InputError

    try:
        cases = options_of(metafunc.config).cases()
    except InputError as error:
        # Of what can be raised here, this alone is told without a traceback.
        raise pytest.Collector.CollectError(f"lsverify: {error}") from None
    metafunc.parametrize("evidence", cases, indirect=True, scope="session", ids=case_id)


def _ours(metafunc: pytest.Metafunc) -> bool:
    """Whether a test's `evidence` is the fixture below: the project that loads us may have one of its own."""
    if any(
        "evidence" in str(mark.args[:1]) for mark in metafunc.definition.iter_markers("parametrize")
    ):
        return False
    found = getattr(metafunc, "_arg2fixturedefs", {}).get("evidence", ())
    return bool(found) and found[-1].func.__module__ == __name__


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under `pytest -n N --dist loadgroup`, keep a case's rungs on one worker: it is judged once."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        case: Any = getattr(getattr(item, "callspec", None), "params", {}).get("evidence")
        # Of another project's own `evidence`, nothing is known; importing the class for it would cost.
        if type(case).__module__ == "lsverify.evidence":
            item.add_marker(pytest.mark.xdist_group(case_id(case)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A failed step leaves a folder that runs it again; Hypothesis reports the smallest one that it found."""
    report = (yield).get_result()
    failed: Any = call.excinfo.value if call.excinfo else None
    if type(failed).__name__ != "StepFailed" or type(failed).__module__ != "lsverify.steps":
        return
    from lsverify.reproduce import folder_of, write

    script = write(failed, item.config.getoption("--lsv-candidate"), folder_of(item.nodeid))
    report.sections.append(("lsverify", f"run it again: python {script}"))


def case_id(case: CaseConfig) -> str:
    """A case's name in test ids and tables."""
    return f"{case.arch}-{case.candidate or ''}{case.policy or ''}"


@pytest.fixture(scope="session")
def evidence(request: pytest.FixtureRequest) -> Evidence:
    """The evidence of one case (see `lsverify.evidence`), computed once for all suites that ask."""
    stash: dict[Any, Evidence] = request.config.stash.setdefault(JUDGED, {})
    config = request.param
    if config not in stash:
        stash[config] = Evidence(config, request.config.stash)
    return stash[config]

"""What the suites share beside `evidence`: architectures and the path under test, as the options name them."""

import pytest
import torch

from lsverify.cases import expanded, load_candidate
from lsverify.models import build
from lsverify.prompt import capture
from lsverify.pytest_plugin import options_of


def pytest_generate_tests(metafunc):
    """One worker of xdist has all tests of a file on an architecture, which share a model and what it gave."""
    if "arch" in metafunc.fixturenames:
        file = metafunc.module.__name__
        archs = [
            pytest.param(arch, marks=pytest.mark.xdist_group(f"{file}-{arch}"), id=arch)
            for arch in expanded(options_of(metafunc.config).archs)
        ]
        metafunc.parametrize("arch", archs, scope="session")


@pytest.fixture(scope="session")
def candidate(request):
    """The path that --lsv-candidate names; None stands for LongStraw with the step's own policy."""
    name = options_of(request.config).candidate
    return None if name is None else load_candidate(name)


@pytest.fixture(scope="session")
def stateful(arch):
    """The numbers of the architecture's layers that hold a state: some have none, some read another's."""
    prompt = torch.arange(4)
    rows = capture(build(arch, seed=0), prompt, boundary=3, chunk=3, keep_from=3).inventory()
    return sorted({row.layer for row in rows if row.layer is not None and row.kind != "index"})

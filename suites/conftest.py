"""What the suites share beside `evidence`: architectures and the path under test, as the options name them."""

import pytest

from lsverify.cases import expanded, load_candidate
from lsverify.pytest_plugin import options_of


def pytest_generate_tests(metafunc):
    if "arch" in metafunc.fixturenames:
        archs = expanded(options_of(metafunc.config).archs)
        metafunc.parametrize("arch", archs, scope="session")


@pytest.fixture(scope="session")
def candidate(request):
    """The path that --lsv-candidate names; None stands for LongStraw with the step's own policy."""
    name = options_of(request.config).candidate
    return None if name is None else load_candidate(name)

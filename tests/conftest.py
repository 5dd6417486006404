"""One thread for every test, and the tiny models at oracle precision, each built once."""

import functools
import sys
from contextlib import ExitStack

import pytest
import torch

from lsverify.models import build
from lsverify.precision import computing
from lsverify.references import take_gradients
from lsverify.tags import weights_version


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def _oracles():
    with ExitStack() as stack:

        @functools.cache
        def model(name):
            found = build(name, seed=0)
            stack.enter_context(computing(found, "float64"))
            return found

        yield model


@pytest.fixture
def oracle(_oracles):
    """A tiny model by name, in train() and at oracle precision; a test that changes it must put it back."""
    used = {}

    def model(name):
        found = _oracles(name)
        used.setdefault(name, (found, weights_version(found)))
        return found

    yield model
    for found, before in used.values():
        assert weights_version(found) == before
        assert found.training
        take_gradients(found)


@pytest.fixture
def my_path_anew():
    """README and docs each have a module of this name: what another test has imported is forgotten."""
    sys.modules.pop("my_path", None)
    yield
    sys.modules.pop("my_path", None)

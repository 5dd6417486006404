"""Trainings of a few steps and a fraction of a second each, on the warm-started llama."""

import sys
import types

from lsverify import rollouts_online
from lsverify.convergence import train
from lsverify.trainings import Training

SMALL = {
    "steps": 4,
    "prompts": 2,
    "responses": 4,
    "lr": 1e-3,
    "dtype": "float64",
    "test_every": 2,
    "test_responses": 1,
    "compare_every": 2,
    "checkpoint_every": 1,
}


def small(**options):
    return Training.parse(SMALL | options)


def shorter_test(monkeypatch, number=12):
    """Leave all but the first tasks out of every test."""
    whole = rollouts_online.examined

    def short(model, tasks, **options):
        return whole(model, tasks[:number], **options)

    monkeypatch.setattr("lsverify.convergence.examined", short)


def curve_of(folder, **options):
    return train(small(**options), folder)


def cluster_of_one(monkeypatch):
    """A stand-in for ray, returned, that trains in this process when results are waited for; `begun` has what was sent to it."""
    begun = []

    class Remote:
        def __init__(self, function):
            self._function = function

        def remote(self, *arguments):
            begun.append(arguments)
            return lambda: self._function(*arguments)

    found = types.ModuleType("ray")
    found.is_initialized = lambda: bool(begun)
    found.init = lambda: None
    found.remote = Remote
    found.wait = lambda waiting, num_returns: (waiting[-num_returns:], waiting[:-num_returns])
    found.get = lambda reference: reference()
    found.begun = begun
    monkeypatch.setitem(sys.modules, "ray", found)
    return found

"""Trainings of a few steps and a fraction of a second each, on the warm-started llama."""

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

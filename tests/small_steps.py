"""Small GRPO steps: a problem for a model, the gradient that a path leaves, and how far two gradients are apart."""

import torch

from lsverify.objective import preset
from lsverify.paths import full_score
from lsverify.problems import ProblemSpec, draw, off_policy
from lsverify.references import take_gradients

GRPO = preset("grpo")
VOCABULARY = 97


def tokens(length, seed=0):
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def problem_for(model, objective=GRPO, seed=0, **spec):
    sizes = {"prompt_lengths": (9,), "group_sizes": (2,), "response_lengths": (3, 1), "seed": seed}
    drawn = draw(ProblemSpec(**(sizes | spec)), VOCABULARY)
    scored = full_score(model, drawn, temperature=objective.temperature)
    return off_policy(drawn, scored, objective, seed)


def gradients(path, model, problem, objective=GRPO, **options):
    take_gradients(model)
    path(model, problem, objective, **options)
    return take_gradients(model)


def distance(actual, expected):
    """Relative L2 over all parameters; both must reach the same ones."""
    reached = {name for name, g in expected.items() if g is not None}
    assert {name for name, g in actual.items() if g is not None} == reached
    a, e = (
        torch.cat([side[name].flatten() for name in sorted(reached)]) for side in (actual, expected)
    )
    return float((a - e).norm() / e.norm())

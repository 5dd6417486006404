"""Problems with every kind of log-prob, current log-probs and entropies, for tests below the logits."""

import torch

from lsverify.problems import ProblemSpec, draw


def scored(seed=0, **options):
    """(problem, logps, entropies): two groups of four with holes and a truncated response in each.

    Log-ratios of policy, sampler and reference lie within 0.6, 0.3 and 0.5, so that clips and bounds act on some.
    """
    spec = {"prompt_lengths": (3, 2), "group_sizes": (4, 4), "holes": True, "truncated": True}
    problem = draw(ProblemSpec(seed=seed, **{**spec, **options}), 50)
    generator = torch.Generator().manual_seed(seed)
    old, ref, sampler, logps, entropies = [], [], [], [], []
    for length in problem.response_lengths:
        u = torch.rand(5, length, generator=generator, dtype=torch.float64)
        old.append(-0.3 - 3 * u[0])
        ref.append(old[-1] + u[1] - 0.5)
        sampler.append(old[-1] + 0.6 * u[2] - 0.3)
        logps.append(old[-1] + 1.2 * u[3] - 0.6)
        entropies.append(u[4])
    return problem.replace_logps(old=old, ref=ref, sampler=sampler), logps, entropies

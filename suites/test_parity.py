"""Gradient of `exact` = full autograd's; of `detach`, `window:m`, `tail:k` = their stopped reference's; to 1e-12.

The ladder judges one problem per architecture. Here lengths, groups and chunks vary over the edges where
implementations change course: prompts of one token, chunks that end on, before and behind the boundary, windows,
top-k selections and delta-net chunks that are just full, responses of one token, groups of one. Guards against code
that is right only away from an edge. With `test_references`: each path trains what it claims to train.

LSVERIFY_PROFILE=deep meets every prompt length from 1 to 200 at four seeds, so every seed at 40 lengths; quick is for
all architectures at once (--lsv-arch=all): each meets ten lengths, and together they meet all.
"""

import pytest
from hypothesis import given, target

from lsverify.families import TINY
from lsverify.objective import preset
from lsverify.problems import ProblemSpec
from lsverify.steps import Step, hold
from lsverify.strategies import LONGEST, SEEDS, policies, register_profiles, steps

PROFILE = register_profiles()
# Every how many tokens a seed meets a prompt length; each seed and architecture begins elsewhere.
STRIDE = {"quick": 200, "ci": 100, "deep": 5}[PROFILE]
DRAWN = SEEDS // 2 if PROFILE == "quick" else SEEDS
# Prompts of one problem of the sweep.
PACK = 10
# No clip, a KL term, and a baseline that leaves a group of one its reward: every response moves the gradient.
UNCUT = preset("reinforce", advantage="leave_one_out", beta=0.04)


def step(prompts, groups, responses, chunk, *, seed, policy="exact", holes=False, branches=1):
    spec = ProblemSpec(
        prompt_lengths=prompts,
        group_sizes=groups,
        response_lengths=responses,
        seed=seed,
        holes=holes,
    )
    return Step(
        spec=spec,
        objective=UNCUT,
        policy=policy,
        chunk=chunk,
        branches=branches,
        training=seed % 2 == 0,
    )


# prompts, group sizes, response lengths, chunk. B is one less than the prompt.
EDGES = {
    "one-token prompts": ((1, 2), (2, 3), (1, 2, 5), 1),
    "chunks of one token": ((12,), (2,), (3, 1), 1),
    "boundary around a chunk": ((8, 9, 10), (2, 1, 3), (1, 4, 2), 8),
    "boundary around two chunks": ((16, 17, 18), (1, 3, 2), (2, 1), 8),
    "chunk beyond the prompt": ((13, 5), (2, 2), (4, 1, 2), 64),
    "responses of one token": ((11, 6), (4, 2), (1,), 4),
    "response longer than prompt": ((5, 9), (2, 2), (21, 1), 3),
    "longest": ((200,), (2,), (2, 1), 64),
}
WINDOW_OR_TOPK = {
    "prompt around 8": ((7, 8, 9, 10), (2, 1, 2, 1), (2, 1, 4), 3),
    "chunk of 7": ((15, 16, 17), (1, 2, 1), (1, 3), 7),
    "chunk of 8": ((24, 25, 26), (1, 1, 2), (1, 8), 8),
    "chunk of 9": ((17, 18, 19), (2, 1, 1), (9, 2), 9),
    "branch around 8": ((3,), (4,), (7, 8, 9, 10), 2),
}
DELTA_NET = {
    "prompt around 64": ((63, 64, 65, 66), (1,), (1, 3), 512),
    "prompt around 128": ((127, 128, 129, 130), (1,), (2, 1), 512),
    "chunk of 63": ((128, 64), (1, 2), (1, 2), 63),
    "chunk of 64": ((65, 129, 130), (1,), (1, 2), 64),
    "chunk of 65": ((132, 66), (1, 2), (2, 1), 65),
    "branch around 64": ((3,), (4,), (63, 64, 65, 66), 2),
}
OWN = {"mistral": WINDOW_OR_TOPK, "glm_moe_dsa": WINDOW_OR_TOPK, "qwen3_5": DELTA_NET}


def edges(arch):
    return list((EDGES | OWN.get(arch, {})).items())


def test_exact_at_every_edge(arch, candidate):
    for number, (name, shape) in enumerate(edges(arch)):
        found = hold(arch, step(*shape, seed=number), candidate)
        assert found.status == "proven", name


@pytest.mark.parametrize("seed", range(DRAWN))
def test_exact_over_prompt_lengths(arch, seed, candidate):
    place = list(TINY).index(arch) if arch in TINY else 0
    lengths = range(1 + (37 * seed + 17 * place) % STRIDE, LONGEST + 1, STRIDE)
    for first in range(0, len(lengths), PACK):
        pack = tuple(lengths[first : first + PACK])
        groups = tuple(2 if (seed + at) % 3 == 0 else 1 for at in range(len(pack)))
        responses = ((1, 3, 2), (2, 1), (4, 1, 1, 2))[seed % 3]
        chunk = (16, 64, 33, 200)[seed % 4]
        more = {"holes": seed % 3 == 0, "branches": 1 + seed % 2}
        one = step(pack, groups, responses, chunk, seed=seed, **more)
        found = hold(arch, one, candidate)
        assert found.status == "proven"


@given(drawn=steps())
def test_exact_on_drawn_steps(arch, drawn, candidate):
    target(hold(arch, drawn, candidate).rel_l2 or 0.0, label="relative L2")


POLICIES = {
    "detach": 8,
    "window:1": 8,
    "window:7": 8,
    "window:8": 8,
    "window:9": 8,
    "window:300": 64,
    "tail:2": 8,
    "tail:9": 4,
    "tail:300": 8,
    "tail:3+window:0": 5,
    "tail:3+window:6": 5,
    "layers:{first},{last}": 8,
    "layers:{last}+window:7": 4,
    "tail:2+layers:{last}": 64,
    "roulette:0.5": 8,
    "roulette:0.5+layers:{first}": 8,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_at_chunk_edges(arch, policy, stateful):
    chunk, spec = POLICIES[policy], policy.format(first=stateful[0], last=stateful[-1])
    prompts, groups = ((18,), (2,)) if PROFILE == "quick" else ((18, 10), (2, 1))
    hold(arch, step(prompts, groups, (4, 1, 2), chunk, seed=3, policy=spec))


@given(drawn=steps(policies=policies()))
def test_policies_on_drawn_steps(arch, drawn):
    target(hold(arch, drawn).rel_l2 or 0.0, label="relative L2")

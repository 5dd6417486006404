"""Hypothesis strategies: steps by structure and seed. The only module that imports hypothesis.

Structure is drawn (lengths around the edges where implementations change course, group sizes, masks, rewards,
objective, policy, chunk) and contents follow from the drawn seed, so a failure shrinks to the smallest structure.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st

from lsverify.errors import InputError
from lsverify.objective import PRESETS, Objective, preset
from lsverify.problems import ProblemSpec
from lsverify.steps import Step

PROFILES = ("quick", "ci", "deep")
SEEDS = 20
LONGEST = 200
# Around chunks, windows and top-k of 8, and around the delta net's chunks of 64, each on the prompt and on B = P - 1.
EDGES = (1, 2, 3, 7, 8, 9, 10, 16, 17, 18, 63, 64, 65, 66, 127, 128, 129, 130, 199, 200)
RESPONSES = (1, 2, 3, 4, 5, 8, 9, 17)
REACHES = (0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 300)
# A chunk is two forward passes and a backward: many tiny ones buy time and no structure.
MOST_CHUNKS = 24


def profile() -> str:
    """The profile's name, from LSVERIFY_PROFILE: quick, ci (the default) or deep. Raises `InputError`."""
    name = os.environ.get("LSVERIFY_PROFILE", "ci")
    if name not in PROFILES:
        raise InputError(
            f"LSVERIFY_PROFILE {name!r} is not known: use one of {', '.join(PROFILES)}"
        )
    return name


def register_profiles() -> str:
    """Register the profiles with Hypothesis, load the one that is asked for, and return its name.

    quick and ci are derandomised: the same examples on every machine. deep draws anew each time, searches for the
    largest error, and remembers failures in .hypothesis.
    """
    # Hypothesis loads a profile of its own where it sees a CI: ours must not inherit from it, nor from one another.
    parent = settings.get_profile("default")
    fixed = (Phase.explicit, Phase.generate, Phase.shrink)
    for name, examples in (("quick", 2), ("ci", 4)):
        settings.register_profile(
            f"lsverify-{name}",
            parent,
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=fixed,
        )
    settings.register_profile(
        "lsverify-deep",
        parent,
        max_examples=40,
        deadline=None,
        print_blob=True,
    )
    chosen = profile()
    settings.load_profile(f"lsverify-{chosen}")
    return chosen


def policies() -> st.SearchStrategy[str]:
    """Every form of the grammar, reaching from nothing to beyond the prompt."""
    reach = st.sampled_from(REACHES) | st.integers(0, LONGEST)
    window = reach.map("window:{}".format)
    tail = reach.map(lambda k: f"tail:{max(k, 1)}")
    # Of every architecture only the first layer is known to hold a state.
    layers = st.sampled_from(("layers:0", "layers:all", "kinds:all"))
    chosen = layers | st.sampled_from(("roulette:0.5", "roulette:0.1"))
    pairs = (tail, window), (window, chosen), (tail, chosen)
    both = st.one_of([st.tuples(*pair).map("+".join) for pair in pairs])
    return st.sampled_from(("detach", "exact")) | window | tail | chosen | both


def objectives() -> st.SearchStrategy[Objective]:
    """The presets, some with a KL term, a temperature, an entropy bonus or a sampler's correction."""
    overrides = st.fixed_dictionaries(
        {},
        optional={
            "beta": st.just(0.04),
            "temperature": st.just(0.7),
            "entropy_bonus": st.just(0.01),
            "sampler_correction": st.sampled_from(("token_truncate", "token_mask")),
        },
    )
    return st.tuples(st.sampled_from(sorted(PRESETS)), overrides).map(_preset)


def _preset(drawn: tuple[str, dict[str, Any]]) -> Objective:
    name, overrides = drawn
    return preset(name, **overrides)


@st.composite
def steps(
    draw: st.DrawFn,
    policies: st.SearchStrategy[str] | None = None,
    longest: int = LONGEST,
) -> Step:
    """A step of one to three prompts of at most `longest` tokens, with groups of one to three responses.

    policies: what the step's policy is drawn from; None: `exact`.
    """
    edges = [edge for edge in EDGES if edge <= longest]
    length = st.sampled_from(edges) | st.integers(1, longest)
    prompts = draw(st.lists(length, min_size=1, max_size=3).map(tuple))
    objective = draw(objectives())
    spec = ProblemSpec(
        prompt_lengths=prompts,
        group_sizes=draw(st.tuples(*[st.integers(1, 3)] * len(prompts))),
        response_lengths=draw(
            st.lists(st.sampled_from(RESPONSES), min_size=1, max_size=4).map(tuple)
        ),
        seed=draw(st.integers(0, SEEDS - 1)),
        holes=draw(st.booleans()),
        rewards=draw(rewards(objective)),
        truncated=draw(st.booleans()),
    )
    return Step(
        spec=spec,
        objective=objective,
        policy="exact" if policies is None else draw(policies),
        chunk=draw(chunks(prompts)),
        branches=draw(st.integers(1, 3)),
        training=draw(st.booleans()),
    )


def rewards(objective: Objective) -> st.SearchStrategy[str]:
    """Kinds of rewards that keep their advantages' signs: a KL term in the reward would turn ties over."""
    in_reward = objective.kl_in == "reward" and objective.beta > 0
    return st.sampled_from(("distinct",) if in_reward else ("distinct", "ties", "equal"))


def chunks(prompts: tuple[int, ...]) -> st.SearchStrategy[int]:
    """Chunk sizes: small, around the first prompt's B and its half, around 64, beyond every prompt."""
    least = max(-(-sum(prompts) // MOST_CHUNKS), 1)
    boundary = prompts[0] - 1
    around = [c for whole in (boundary, boundary // 2) for c in (whole - 1, whole, whole + 1)]
    sizes = {c for c in (1, 2, 3, 7, 8, 63, 64, 65, 512, *around) if c >= least}
    return st.sampled_from(sorted(sizes))

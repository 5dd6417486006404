import functools
import inspect

import pytest
from hypothesis import Phase, find, given, settings
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from lsverify.errors import InputError
from lsverify.models import build
from lsverify.objective import PRESETS
from lsverify.policies import parse_policy
from lsverify.problems import draw
from lsverify.steps import hold
from lsverify.strategies import (
    EDGES,
    LONGEST,
    MOST_CHUNKS,
    PROFILES,
    SEEDS,
    policies,
    profile,
    register_profiles,
    steps,
)

FAST = settings(max_examples=60, derandomize=True, database=None, deadline=None)


@pytest.fixture
def _profile_put_back():
    yield
    settings.load_profile("default")


@FAST
@given(drawn=steps(policies=policies()))
def test_every_drawn_step_is_a_problem_within_its_bounds(drawn):
    spec = drawn.spec
    assert all(1 <= length <= LONGEST for length in spec.prompt_lengths)
    assert all(1 <= size <= 3 for size in spec.sizes())
    assert sum(-(-length // drawn.chunk) for length in spec.prompt_lengths) <= MOST_CHUNKS + 3
    parse_policy(drawn.policy)
    problem = draw(spec, vocab_size=97)
    assert problem.prompt_lengths == spec.prompt_lengths
    assert repr(spec) in repr(drawn)


@FAST
@given(drawn=steps(longest=9))
def test_prompts_can_be_kept_short(drawn):
    assert max(drawn.spec.prompt_lengths) <= 9


@settings(FAST, max_examples=5)
@given(drawn=steps(policies=policies(), longest=9))
def test_drawn_steps_can_be_held_to_their_claims(drawn):
    assert hold("llama", drawn).passed


@functools.cache
def sample():
    """What 800 draws give: the rarest edge comes up about 19 times, so a change of the options does not lose it."""
    found = []

    @settings(FAST, max_examples=800, phases=[Phase.generate])
    @given(drawn=steps(policies=policies()))
    def collect(drawn):
        found.append(drawn)

    collect()
    return found


SHAPES = {
    "one-token prompt": lambda s: 1 in s.spec.prompt_lengths,
    "just beyond a delta-net chunk": lambda s: 65 in s.spec.prompt_lengths and s.chunk >= 64,
    "chunk equal to B": lambda s: s.chunk == s.spec.prompt_lengths[0] - 1 > 1,
    "chunk beyond the prompt": lambda s: s.chunk > max(s.spec.prompt_lengths) > 8,
    "chunks of one token": lambda s: s.chunk == 1 < max(s.spec.prompt_lengths),
    "uneven groups": lambda s: len(set(s.spec.sizes())) > 1,
    "group of one": lambda s: 1 in s.spec.sizes(),
    "only one-token responses": lambda s: set(s.spec.response_lengths) == {1},
    "response beyond prompt": lambda s: max(s.spec.response_lengths) > max(s.spec.prompt_lengths),
    "policy beyond every prompt": lambda s: parse_policy(s.policy).clamped(
        max(s.spec.prompt_lengths)
    ),
    "equal rewards": lambda s: s.spec.rewards == "equal",
    "holes and truncation in eval": lambda s: s.spec.holes and s.spec.truncated and not s.training,
    "KL in the reward": lambda s: s.objective.beta > 0 and s.objective.kl_in == "reward",
    "KL in the loss": lambda s: s.objective.beta > 0 and s.objective.kl_in == "loss",
    "temperature": lambda s: s.objective.temperature != 1,
    "entropy": lambda s: s.objective.entropy_bonus > 0,
    "sampler": lambda s: s.objective.sampler_correction != "none",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_at_the_edges_are_drawn(shape):
    assert any(SHAPES[shape](step) for step in sample())


def test_every_edge_preset_seed_and_form_of_policy_is_drawn():
    assert set(EDGES) <= {length for s in sample() for length in s.spec.prompt_lengths}
    assert {s.objective.name for s in sample()} == set(PRESETS)
    assert {s.spec.seed for s in sample()} == set(range(SEEDS))
    drawn = {s.policy for s in sample()}
    for form in ("exact", "detach", "window:0", "tail:1", "+window:"):
        assert any(form in policy for policy in drawn), form


def test_failures_shrink_to_the_smallest_structure():
    quick = settings(FAST, max_examples=100)
    least = find(steps(policies=policies()), lambda s: s.spec.prompt_lengths[0] > 8, settings=quick)
    assert least.spec.prompt_lengths == (9,)
    assert least.spec.group_sizes == (1,)
    assert least.spec.response_lengths == (1,)
    assert (least.spec.seed, least.policy, least.spec.holes) == (0, "detach", False)


def test_rewards_stay_distinct_where_a_kl_term_in_the_reward_would_turn_them_over():
    def tied(step):
        return (
            step.spec.rewards != "distinct"
            and step.objective.kl_in == "reward"
            and step.objective.beta > 0
        )

    assert not any(map(tied, sample()))


def test_edges_lie_around_what_the_models_have():
    chunk = inspect.signature(torch_chunk_gated_delta_rule).parameters["chunk_size"].default
    window = build("mistral", seed=0).config.sliding_window
    topk = build("glm_moe_dsa", seed=0).config.index_topk
    # On the prompt and on B, one less: exactly full, one short, one over.
    for size in (window, topk, chunk):
        assert {size - 1, size, size + 1, size + 2} <= set(EDGES)


@pytest.mark.usefixtures("_profile_put_back")
def test_profiles_are_chosen_by_name(monkeypatch):
    monkeypatch.delenv("LSVERIFY_PROFILE", raising=False)
    assert register_profiles() == profile() == "ci"
    examples = {}
    for name in PROFILES:
        monkeypatch.setenv("LSVERIFY_PROFILE", name)
        assert register_profiles() == name
        examples[name] = settings.default.max_examples
        assert settings.default.deadline is None
        assert settings.default.derandomize == (name != "deep")
        assert (settings.default.database is None) == (name != "deep")
    assert examples["quick"] < examples["ci"] < examples["deep"]


def test_an_unknown_profile_is_refused(monkeypatch):
    monkeypatch.setenv("LSVERIFY_PROFILE", "slow")
    with pytest.raises(InputError, match="LSVERIFY_PROFILE 'slow' is not known: use one of quick"):
        register_profiles()

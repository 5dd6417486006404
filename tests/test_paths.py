from __future__ import annotations

import copy
import functools
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from small_steps import GRPO, distance, gradients, problem_for
from torch import nn

import lsverify.paths
from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError, StalePromptState
from lsverify.models import build
from lsverify.objective import monolithic, preset
from lsverify.paths import (
    SweepMismatch,
    adapters_off,
    full_autograd,
    full_logits,
    full_score,
    longstraw,
    score,
    shared_prompts,
)
from lsverify.policies import parse_policy
from lsverify.precision import computing
from lsverify.prompt import capture
from lsverify.references import stopped_reference, take_gradients
from lsverify.watch import Watch

ARCHS = sorted(DEFAULT_ARCHS)
UNEVEN = {"prompt_lengths": (9, 5), "group_sizes": (2, 3), "response_lengths": (3, 1, 4, 1, 2)}
KL = preset("grpo", beta=0.5, kl="k3")


@pytest.fixture(scope="module")
def adapted():
    model = build("llama", seed=0, lora=True)
    with computing(model, "float64"):
        yield model


@contextmanager
def hooked(module, hook, **options):
    handle = module.register_forward_hook(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def rows_equal(actual, expected, limit=1e-12):
    return len(actual) == len(expected) and all(
        a.shape == e.shape and (a - e).norm() <= limit * e.norm()
        for a, e in zip(actual, expected, strict=True)
    )


# The two paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("chunk", [1, 5])
def test_exact_is_the_full_gradient_at_any_chunk(oracle, arch, chunk):
    model = oracle(arch)
    problem = problem_for(model, **UNEVEN)
    expected = gradients(full_autograd, model, problem)
    assert distance(gradients(longstraw, model, problem, chunk=chunk), expected) <= 1e-12


@pytest.mark.parametrize("arch", ARCHS)
def test_responses_replayed_together_have_the_same_gradient(oracle, arch):
    model = oracle(arch)
    problem = problem_for(model, **UNEVEN)
    expected = full_autograd(model, problem, GRPO)
    assert rows_equal(
        longstraw(model, problem, GRPO, chunk=5, branches=2).log_probs, expected.log_probs
    )
    take_gradients(model)
    expected = gradients(full_autograd, model, problem)
    assert distance(gradients(longstraw, model, problem, branches=3), expected) <= 1e-12


def test_fewer_than_one_branch_is_refused(oracle):
    model = oracle("llama")
    with pytest.raises(InputError, match="branches 0 is not allowed: replay 1 or more"):
        longstraw(model, problem_for(model, **UNEVEN), GRPO, branches=0)


@pytest.mark.parametrize(
    ("arch", "policy"),
    [
        ("llama", "detach"),
        ("mistral", "tail:3"),
        ("mistral", "window:2"),
        ("qwen3_5", "detach"),
        ("qwen3_5", "tail:2+window:2"),
        ("qwen3_5", "tail:9"),
        ("glm_moe_dsa", "window:3"),
    ],
)
def test_each_policy_is_the_gradient_that_it_claims_and_not_the_full_one(oracle, arch, policy):
    model = oracle(arch)
    problem = problem_for(model, **UNEVEN)
    actual = gradients(longstraw, model, problem, policy=policy, chunk=2)
    full = gradients(full_autograd, model, problem)
    expected = stopped_reference(model, problem, GRPO, parse_policy(policy).stop)
    assert distance(actual, expected.response.gradients) <= 1e-12
    # A live tail that covers both prompts loses nothing.
    assert distance(actual, full) <= 1e-12 if policy == "tail:9" else distance(actual, full) > 1e-3


@pytest.mark.parametrize("path", [full_autograd, longstraw])
def test_a_step_returns_its_loss_and_every_log_prob(oracle, path):
    model = oracle("glm_moe_dsa")
    problem = problem_for(model, **UNEVEN)
    result = path(model, problem, GRPO)
    logits = [full_logits(model, problem, i) for i in range(5)]
    expected = monolithic(GRPO, problem, logits).detach().item()
    assert result.loss == pytest.approx(expected, rel=1e-12)
    assert rows_equal(result.log_probs, full_score(model, problem))
    assert not any(row.requires_grad for row in result.log_probs)
    assert (result.reference, result.objective, result.update) == (
        "full" if path is full_autograd else "exact",
        None,
        None,
    )


@pytest.mark.parametrize("padding", ["left", "right"])
def test_the_batched_form_returns_the_same(oracle, padding):
    model = oracle("mistral")
    problem = problem_for(model, **UNEVEN)
    serial = full_autograd(model, problem, GRPO)
    batched = full_autograd(model, problem, GRPO, batched=True, padding=padding)
    by_default = full_autograd(model, problem, GRPO, batched=True)
    assert rows_equal(by_default.log_probs, serial.log_probs)
    assert batched.loss == pytest.approx(serial.loss, rel=1e-12)
    assert rows_equal(batched.log_probs, serial.log_probs)
    assert batched.reference == "full"


def test_one_response_at_a_time_is_the_default(oracle):
    model = oracle("llama")
    problem = problem_for(model, **UNEVEN)
    for batched, passes in (({}, 5), ({"batched": True}, 1)):
        with Watch(model) as watch:
            full_autograd(model, problem, GRPO, **batched)
        assert len(watch.forwards) == passes


def test_gradients_add_to_what_is_there(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    once = gradients(longstraw, model, problem, chunk=4)
    longstraw(model, problem, GRPO, chunk=4)
    longstraw(model, problem, GRPO, chunk=4)
    twice = take_gradients(model)
    assert distance(twice, {name: 2 * g for name, g in once.items()}) <= 1e-12


def test_permuting_siblings_changes_nothing(oracle):
    model = oracle("qwen3_5")
    problem = problem_for(model, group_sizes=(3,), response_lengths=(3, 1, 2))
    group = problem.groups[0]
    turned = replace(problem, groups=(replace(group, responses=group.responses[::-1]),))
    expected = gradients(longstraw, model, problem, policy="window:3", chunk=2)
    actual = gradients(longstraw, model, turned, policy="window:3", chunk=2)
    assert distance(actual, expected) <= 1e-13
    rows = [longstraw(model, each, GRPO).log_probs for each in (problem, turned)]
    assert rows_equal(rows[1][::-1], rows[0])


def test_groups_with_one_prompt_share_one_capture_and_change_nothing(oracle):
    model = oracle("llama")
    problem = problem_for(model, prompt_lengths=(9, 9), response_lengths=(3, 1, 4, 2))
    first, second = problem.groups
    shared = replace(problem, groups=(first, replace(second, prompt=first.prompt.clone())))
    assert [(len(p), m) for p, m in shared_prompts(shared)] == [(9, [0, 1, 2, 3])]
    assert [m for _, m in shared_prompts(problem)] == [[0, 1], [2, 3]]
    with Watch(model) as watch:
        actual = gradients(longstraw, model, shared, chunk=4)
    # Once captured, once swept, and per response the last prompt token and all but the last of its own.
    assert watch.tokens().total == 8 + 8 + (3 + 1 + 4 + 2)
    assert watch.tokens().no_grad == 8
    assert distance(actual, gradients(full_autograd, model, shared)) <= 1e-12


def test_equal_prompts_need_not_stand_together(oracle):
    model = oracle("llama")
    problem = problem_for(
        model, prompt_lengths=(9, 5, 9), group_sizes=(1, 1, 1), response_lengths=(3, 2, 4)
    )
    first, middle, last = problem.groups
    split = replace(problem, groups=(first, middle, replace(last, prompt=first.prompt)))
    assert [m for _, m in shared_prompts(split)] == [[0, 2], [1]]
    result = longstraw(model, split, GRPO, chunk=4)
    assert rows_equal(result.log_probs, full_score(model, split))
    take_gradients(model)
    # A group of one has no advantage over itself, so its rewards are taken as they are.
    expected = gradients(full_autograd, model, split, preset("reinforce"))
    assert distance(gradients(longstraw, model, split, preset("reinforce")), expected) <= 1e-12


@pytest.mark.parametrize("policy", ["exact", "detach", "window:3", "tail:4"])
def test_a_one_token_prompt_loses_nothing(oracle, policy):
    model = oracle("qwen3_5")
    problem = problem_for(model, prompt_lengths=(1,))
    expected = gradients(full_autograd, model, problem)
    assert distance(gradients(longstraw, model, problem, policy=policy), expected) <= 1e-12


def test_equal_rewards_give_exactly_no_gradient(oracle):
    model = oracle("llama")
    problem = problem_for(model, rewards="equal")
    for path in (full_autograd, functools.partial(longstraw, chunk=4)):
        found = gradients(path, model, problem)
        assert all(not g.any() for g in found.values())


def test_a_policy_may_be_given_parsed(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    as_text = gradients(longstraw, model, problem, policy="window:3")
    parsed = gradients(longstraw, model, problem, policy=parse_policy("window:3"))
    assert distance(parsed, as_text) == 0


def test_adapters_are_trained_as_full_autograd_trains_them(adapted):
    problem = problem_for(adapted, **UNEVEN)
    expected = gradients(full_autograd, adapted, problem)
    assert expected
    assert all("lora_" in name or "modules_to_save" in name for name in expected)
    assert distance(gradients(longstraw, adapted, problem, chunk=4), expected) <= 1e-12


@pytest.mark.parametrize("part", ["lm_head", "model.layers.3", "model.embed_tokens"])
def test_training_a_part_of_the_model_is_exact_too(part):
    model = build("qwen3_5", seed=0).requires_grad_(False)
    model.get_submodule(part).requires_grad_(True)
    with computing(model, "float64"):
        problem = problem_for(model)
        expected = gradients(full_autograd, model, problem)
        assert distance(gradients(longstraw, model, problem, chunk=3), expected) <= 1e-12


# Refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, -3])
def test_a_chunk_without_tokens_is_refused(oracle, chunk):
    with pytest.raises(InputError, match=f"chunk {chunk} is not allowed"):
        longstraw(oracle("llama"), problem_for(oracle("llama")), GRPO, chunk=chunk)


def test_a_malformed_policy_is_refused_before_any_pass(oracle):
    model, problem = oracle("llama"), problem_for(oracle("llama"))
    for path in (
        lambda: longstraw(model, problem, GRPO, policy="half"),
        lambda: score(model, problem, policy="half"),
    ):
        with Watch(model) as watch, pytest.raises(InputError, match="policy 'half' is not known"):
            path()
        assert watch.events == []


@pytest.mark.parametrize("policy", ["exact", "detach"])
def test_a_frozen_model_is_refused_whatever_the_policy(policy):
    model = build("llama", seed=0).requires_grad_(False)
    problem = problem_for(model)
    for path in (full_autograd, functools.partial(longstraw, policy=policy)):
        with pytest.raises(
            InputError,
            match=r"^no parameter of the model requires a gradient: unfreeze what should be trained$",
        ):
            path(model, problem, GRPO)


def test_training_only_what_the_loss_cannot_reach_is_refused():
    """An indexer chooses keys: no gradient comes back from a choice."""
    model = build("glm_moe_dsa", seed=0).requires_grad_(False)
    model.model.layers[0].self_attn.indexer.requires_grad_(True)
    problem = problem_for(model)
    for path in (full_autograd, functools.partial(longstraw, policy="detach")):
        with pytest.raises(
            InputError,
            match=r"^the loss reaches no parameter that requires a gradient: unfreeze what should be trained$",
        ):
            path(model, problem, GRPO)


# A recomputed chunk that is not the captured one --------------------------------------------------


class Drift:
    """Adds a little more to a layer's output at every call, as a forgotten counter would."""

    def __init__(self, size):
        self.size, self.calls = size, 0

    def __call__(self, module, args, output):
        self.calls += 1
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden + self.size * self.calls
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [1e-9, float("nan")])
def test_state_that_changes_with_every_call_is_noticed(oracle, arch, size):
    model = oracle(arch)
    problem = problem_for(model)
    found = r"prompt tokens 4 to 7: layers\.1\.\S+ differs from its captured value by"
    with hooked(model.model.layers[0], Drift(size)), pytest.raises(SweepMismatch, match=found):
        longstraw(model, problem, GRPO, chunk=4)


def test_drift_is_not_noticed_without_a_sweep(oracle):
    model = oracle("llama")
    with hooked(model.model.layers[0], Drift(1e-9)):
        longstraw(model, problem_for(model), GRPO, policy="detach", chunk=4)


def test_drift_below_the_rounding_of_another_order_is_let_pass(oracle):
    model = oracle("llama")
    with hooked(model.model.layers[0], Drift(1e-15)):
        longstraw(model, problem_for(model), GRPO, chunk=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-autocast"])
def test_a_recomputed_chunk_reproduces_its_state_in_every_precision(dtype):
    model = build("qwen3_5", seed=0, dtype=dtype)
    with computing(model, dtype):
        problem = problem_for(model, prompt_lengths=(12,))
        longstraw(model, problem, GRPO, chunk=5)
        with hooked(model.model.layers[0], Drift(0.5)), pytest.raises(SweepMismatch):
            longstraw(model, problem, GRPO, chunk=5)


def test_dropout_is_noticed(oracle):
    model = copy.deepcopy(build("llama", seed=0))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with pytest.raises(SweepMismatch, match="differs from its captured value"):
            longstraw(model, problem_for(model), GRPO)


def test_experts_that_change_under_recomputation_are_noticed(oracle):
    model = oracle("glm_moe_dsa")
    problem = problem_for(model)
    gate = model.model.layers[3].mlp.gate

    def jitter(module, args):
        # Only the choice moves: the last layer's experts have no part in any state.
        when = torch.is_grad_enabled() and args[0].shape[-2] in lengths
        module.e_score_correction_bias.add_(1.0 * when * torch.arange(8))

    lengths = set(range(1, 30))
    before = gate.e_score_correction_bias.clone()
    handle = gate.register_forward_pre_hook(jitter)
    try:
        with pytest.raises(StalePromptState, match="weights was"):
            longstraw(model, problem, GRPO, chunk=4)
        gate.e_score_correction_bias.copy_(before)
        single = problem_for(model, group_sizes=(1,), rewards="distinct")
        # From here on the bias moves in the chunks of the sweep only.
        lengths -= set(single.response_lengths)
        assert 4 in lengths
        with pytest.raises(SweepMismatch, match="tokens 4 to 7: recomputation chose other experts"):
            longstraw(model, single, preset("reinforce"), chunk=4)
    finally:
        handle.remove()
        gate.e_score_correction_bias.copy_(before)
        take_gradients(model)


def test_a_state_that_grows_a_tensor_is_noticed(oracle):
    model = oracle("llama")

    def add(module, args, kwargs, output):
        if torch.is_grad_enabled():
            kwargs["cache"].layers[0].more = torch.ones(1)

    problem = problem_for(model)
    with (
        hooked(model.model, add, with_kwargs=True),
        pytest.raises(SweepMismatch, match=r"state has \['layers\.0\.more'\] on one side only"),
    ):
        longstraw(model, problem, GRPO)


def test_weights_that_move_between_siblings_make_the_state_stale():
    model = build("llama", seed=0)

    def move(module, args, output):
        if torch.is_grad_enabled():
            module.weight.data.add_(1e-9)

    problem = problem_for(model)
    with hooked(model.lm_head, move), pytest.raises(StalePromptState, match="weights was"):
        longstraw(model, problem, GRPO, policy="detach")


def test_a_sweep_without_cotangents_runs_nothing(oracle):
    model = oracle("llama")
    state = capture(model, problem_for(model).prompt(0), boundary=8, chunk=4, keep_from=0)
    with Watch(model) as watch:
        lsverify.paths._sweep(model, state, {})
    assert watch.events == []


# Scores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("policy", ["detach", parse_policy("tail:20")])
def test_scores_over_a_shared_prompt_are_those_of_whole_passes(oracle, arch, policy):
    model = oracle(arch)
    problem = problem_for(model, **UNEVEN)
    shared = score(model, problem, temperature=0.7, policy=policy, chunk=3)
    assert rows_equal(shared, full_score(model, problem, temperature=0.7))
    assert not any(row.requires_grad for row in shared)
    together = score(model, problem, temperature=0.7, policy=policy, branches=2)
    assert rows_equal(together, shared)
    batched = full_score(model, problem, temperature=0.7, batched=True)
    assert rows_equal(batched, shared)
    assert not any(row.requires_grad for row in batched)


def test_scores_tell_temperatures_apart(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    cold, warm = (score(model, problem, temperature=t) for t in (0.7, 1.0))
    assert not rows_equal(cold, warm, 1e-2)


def without_reference(model):
    return problem_for(model, **UNEVEN, reference=False)


@pytest.mark.parametrize("path", [full_autograd, longstraw])
def test_a_kl_term_without_anything_to_score_the_reference_with_is_refused(oracle, path):
    model = oracle("llama")
    with pytest.raises(InputError, match="give ref_logp, a reference_model, or beta=0"):
        path(model, without_reference(model), KL)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("path", [full_autograd, functools.partial(longstraw, chunk=3)])
def test_the_reference_policy_is_the_model_with_its_adapters_off(adapted, path, kl_in):
    objective = preset("grpo", beta=0.5, kl="k3", kl_in=kl_in)
    problem = without_reference(adapted)
    with adapted.disable_adapter():
        off = full_score(adapted, problem)
    on = full_score(adapted, problem)
    given = [
        gradients(full_autograd, adapted, problem.replace_logps(ref=rows), objective)
        for rows in (off, on)
    ]
    assert distance(given[1], given[0]) > 1e-3
    assert distance(gradients(path, adapted, problem, objective), given[0]) <= 1e-12
    assert rows_equal(full_score(adapted, problem), on)


@pytest.mark.parametrize("policy", ["exact", "detach", "tail:3"])
def test_a_reference_model_is_scored_with_a_state_of_its_own(oracle, policy):
    model, judge = oracle("llama"), build("llama", seed=1)
    problem = without_reference(model)
    with computing(judge, "float64"):
        rows = full_score(judge, problem)
        for path, options in (
            (full_autograd, {}),
            (full_autograd, {"batched": True}),
            (longstraw, {"policy": policy, "chunk": 3}),
        ):
            given = gradients(path, model, problem.replace_logps(ref=rows), KL, **options)
            actual = gradients(path, model, problem, KL, reference_model=judge, **options)
            assert distance(actual, given) <= 1e-12
    assert all(parameter.grad is None for parameter in judge.parameters())


def test_reference_log_probs_of_the_problem_come_first(oracle):
    model, problem = oracle("llama"), problem_for(oracle("llama"))
    with Watch(model) as watch:
        full_autograd(model, problem, KL)
    assert watch.tokens().no_grad == 0


def test_without_a_kl_term_nothing_is_scored(oracle):
    model = oracle("llama")
    problem = without_reference(model)
    with Watch(model) as watch:
        longstraw(model, problem, GRPO)
    assert watch.tokens().no_grad == 8 + 4


def test_a_plain_model_has_no_adapters_to_switch_off():
    with pytest.raises(InputError, match="no adapter to switch off"), adapters_off(nn.Linear(1, 1)):
        pass


def test_the_temperature_of_the_objective_is_the_one_that_is_trained_at(oracle):
    model, objective = oracle("llama"), preset("grpo", temperature=0.7)
    problem = problem_for(model, objective)
    scored = full_score(model, problem, temperature=0.7)
    assert rows_equal(longstraw(model, problem, objective).log_probs, scored)
    for batched in (False, True):
        result = full_autograd(model, problem, objective, batched=batched)
        assert rows_equal(result.log_probs, scored)
    take_gradients(model)
    expected = gradients(full_autograd, model, problem, objective)
    assert distance(gradients(longstraw, model, problem, objective, chunk=4), expected) <= 1e-12

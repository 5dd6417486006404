"""Each equality of suites/test_references.py and suites/test_identities.py has been seen to fail."""

import functools
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lsverify import paths, prompt, references, steps
from lsverify.policies import Policy
from lsverify.problems import Problem
from lsverify.prompt import PromptState

SUITES = Path(__file__).parent.parent / "suites"


@functools.cache
def suite(name):
    spec = importlib.util.spec_from_file_location(f"suite_{name}", SUITES / f"test_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _fresh_references():
    steps._referee.cache_clear()
    yield
    steps._referee.cache_clear()


def window_counted_from_the_prompts_end(patch):
    patch.setattr(Policy, "stop", lambda self, length: max(length - 1 - (self.window or 0), 0))


def no_sweep(patch):
    patch.setattr(paths, "_sweep", lambda *_: None)


def one_state_for_all_siblings(patch):
    def branch(self, leaves):
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return self.cache

    patch.setattr(PromptState, "branch", branch)


def later_responses_count_a_little_more(patch):
    calls = []

    def backward(loss):
        calls.append(loss)
        (loss * (1 + 1e-9 * len(calls))).backward()

    patch.setattr(paths, "_backward", backward)


def scaled(patch):
    patch.setattr(paths, "_backward", lambda loss: (loss * (1 + 1e-9)).backward())
    honest = references.full_reference
    patch.setattr(suite("identities"), "full_reference", lambda *step: unscaled(honest(*step)))


def unscaled(reference):
    gradients = {
        name: None if g is None else g / (1 + 1e-9) for name, g in reference.gradients.items()
    }
    return replace(reference, gradients=gradients)


def no_sharing(patch):
    patch.setattr(Problem, "prompt_hash", lambda self, group: str(group))


def advantages_that_are_almost_zero(patch):
    patch.setattr("lsverify.objective.advantages", lambda kind, rewards, *_: [1e-12] * len(rewards))


def masks_ignored(patch):
    honest = paths.prepare

    def prepare(*given):
        plan = honest(*given)
        return replace(plan, counted=tuple(torch.ones_like(mask) for mask in plan.counted))

    patch.setattr(paths, "prepare", prepare)


def masked_tokens_hidden(patch):
    """Tokens that are not counted are not read either: a hole that attention cannot see."""
    honest = Problem.tokens

    def tokens(self, member):
        found = honest(self, member)
        mask = self.responses[member].mask
        found[-len(mask) :][~mask] = 0
        return found

    patch.setattr(Problem, "tokens", tokens)


def later_chunks_one_position_late(patch):
    honest = prompt.continue_from

    def late(model, tokens, cache, start, keep, spans=()):
        return honest(model, tokens, cache, start + bool(start), keep, spans)

    for module in (prompt, paths):
        patch.setattr(module, "continue_from", late)


def prompts_of_one_length_taken_for_equal(patch):
    honest, kept = paths.capture, {}

    def capture(model, tokens, **options):
        key = (len(tokens), *options.values())
        if key not in kept:
            kept[key] = honest(model, tokens, **options)
        return kept[key]

    patch.setattr(paths, "capture", capture)
    patch.setattr(PromptState, "check", lambda *_: None)


IDENTITIES = [
    (
        window_counted_from_the_prompts_end,
        "policies_that_stop_at_the_same_token_are_equal",
        ("tail:3+window:9", "window:11"),
    ),
    (no_sweep, "response_term_and_state_term_sum_to_full"),
    (one_state_for_all_siblings, "order_of_siblings_is_nothing", "detach"),
    (later_responses_count_a_little_more, "order_of_siblings_is_nothing", "exact"),
    (
        later_responses_count_a_little_more,
        "batch_is_the_sum_over_prompts_under_the_frozen_plan",
        "detach",
    ),
    (no_sharing, "equal_prompts_share_one_capture_and_change_nothing", "exact"),
    (advantages_that_are_almost_zero, "equal_rewards_give_exactly_zero", "grpo"),
    (masks_ignored, "masked_slots_are_not_read"),
    (masks_ignored, "masked_tokens_matter_only_to_later_ones"),
    (masked_tokens_hidden, "masked_tokens_matter_only_to_later_ones"),
    (later_chunks_one_position_late, "chunk_size_changes_nothing", "detach"),
    (scaled, "policies_coincide_on_one_token_prompts"),
    (prompts_of_one_length_taken_for_equal, "every_prompt_token_matters", "detach"),
]


@pytest.mark.parametrize(("fault", "test", "arguments"), [(f, t, a) for f, t, *a in IDENTITIES])
def test_a_fault_breaks_its_identity(monkeypatch, fault, test, arguments):
    run = getattr(suite("identities"), f"test_{test}")
    run("llama", *arguments)
    fault(monkeypatch)
    # What the honest run computed must not stand in for what the broken one would.
    monkeypatch.setattr(suite("identities"), "KEPT", {})
    with pytest.raises(AssertionError):
        run("llama", *arguments)


def positions_that_ignore_the_padding(patch):
    honest = Problem.padded

    def padded(self, *given):
        batch = honest(self, *given)
        # Past the batch's own check.
        object.__setattr__(batch, "position_ids", torch.zeros_like(batch.position_ids))
        return batch

    patch.setattr(Problem, "padded", padded)


def gradient_off_by_a_millionth(patch):
    honest = references.full_reference

    def full(*step):
        found = honest(*step)
        larger = {n: None if g is None else g * (1 + 1e-6) for n, g in found.gradients.items()}
        return replace(found, gradients=larger)

    patch.setattr(suite("references"), "full_reference", full)


def labels_shifted_by_one(patch):
    honest = paths.full_logits
    patch.setattr(paths, "full_logits", lambda *given: honest(*given).roll(1, 0))


def state_term_lost(patch):
    patch.setattr(references, "_sum", lambda response, state: response)


def witness_cut_one_token_later(patch):
    honest = references._split_modules
    patch.setattr(
        references,
        "_split_modules",
        lambda model, constant, live, stop: honest(model, constant, live, stop + 1),
    )


def a_model_that_trains_differently(patch):
    honest = paths.full_logits
    patch.setattr(
        paths,
        "full_logits",
        lambda model, *given: honest(model, *given) * (1 + 1e-12 * model.training),
    )


REFERENCES = [
    (positions_that_ignore_the_padding, "serial_equals_batched"),
    (gradient_off_by_a_millionth, "gradient_is_the_slope_of_the_loss", "gradient"),
    (labels_shifted_by_one, "log_probs_equal_decoding_token_by_token"),
    (state_term_lost, "stopped_terms_sum_to_full", "B"),
    (witness_cut_one_token_later, "stopped_terms_equal_a_witness_without_cache", "half"),
    (a_model_that_trains_differently, "train_equals_eval"),
]


@pytest.mark.parametrize(("fault", "test", "arguments"), [(f, t, a) for f, t, *a in REFERENCES])
def test_a_fault_breaks_its_reference(monkeypatch, fault, test, arguments):
    run = getattr(suite("references"), f"test_{test}")
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run("llama", *arguments)

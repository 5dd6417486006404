from __future__ import annotations

import pytest
import torch
from small_steps import tokens

import lsverify.setting
from lsverify.cases import SMOLLM2, group_sizes
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig
from lsverify.models import build
from lsverify.objective import prepare
from lsverify.paths import full_score
from lsverify.setting import make_setting

SMALL = {"prompt_length": 8, "group_size": 2, "response_lengths": (3, 1)}


def setting(arch="llama", **fields):
    return make_setting(CaseConfig(arch=arch, **(SMALL | fields)))


@pytest.fixture(scope="module")
def made():
    return setting()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_case_follows_from_its_config_alone(made):
    again, other = setting(), setting(seed=1)
    assert torch.equal(weights(again.model), weights(made.model))
    assert not torch.equal(weights(other.model), weights(made.model))
    for name in ("problem", "second"):
        mine, its, others = (getattr(each, name).content_hash() for each in (made, again, other))
        assert mine == its != others


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    setting("glm_moe_dsa", lora=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_problem_has_the_sizes_of_the_config(made):
    assert made.problem.prompt_lengths == (8, 3)
    assert made.problem.group_sizes == group_sizes(made.config) == (2, 1)
    assert made.problem.response_lengths == (3, 1, 3)
    assert setting(prompt_length=2, group_size=1).problem.prompt_lengths == (2, 1)


def test_there_are_holes_in_a_mask(made):
    counted = [response.mask for response in made.problem.responses]
    assert any(not mask.all() for mask in counted)
    assert all(mask.any() for mask in counted)


def test_the_second_step_meets_the_first_ones_prompt_with_other_responses(made):
    first, second = made.problem, made.second
    assert second.prompt_hash(0) == first.prompt_hash(0)
    assert second.prompt_hash(1) != first.prompt_hash(1)
    assert second.response_lengths[: len(first)] == first.response_lengths
    assert not torch.equal(second.tokens(0), first.tokens(0))


def test_the_second_step_has_what_confuses():
    made = setting(response_lengths=(6, 1, 5))
    second = made.second
    prompts = [group.prompt for group in second.groups]
    assert len(prompts[0]) == len(prompts[1])
    assert torch.equal(prompts[0][:-2], prompts[1][:-2])
    assert not torch.equal(prompts[0], prompts[1])
    assert torch.equal(prompts[1], prompts[2])
    vocabulary = made.model.config.get_text_config().vocab_size
    assert prompts[1][-2:].tolist() == [0, vocabulary - 1]
    assert torch.equal(prompts[3], made.problem.groups[1].prompt)
    assert len({response.reward for response in second.groups[3].responses}) == 1
    assert any(response.truncated for response in second.responses)
    assert all(response.sampler_logp is not None for response in second.responses)
    holes = [(r.old_logp, r.ref_logp, r.mask) for r in second.responses if not r.mask.all()]
    assert holes
    for old, reference, mask in holes:
        assert old[~mask].isnan().all()
        assert reference[~mask].isnan().all()
        assert not old[mask].isnan().any()
    assert any(not mask[0] for *_, mask in holes)


@pytest.mark.parametrize("name", ["problem", "second"])
def test_both_steps_are_off_policy_on_both_sides_of_the_clip(name):
    made = setting(group_size=4, response_lengths=(4, 3))
    problem = getattr(made, name)
    with made.computing():
        current = full_score(made.model, problem)
    plan = prepare(made.objective, problem)
    sides = torch.cat([plan.clip_side(i, row) for i, row in enumerate(current)])
    assert set(sides.tolist()) == {-1, 0, 1}


def test_scores_are_made_in_the_precision_of_the_case():
    for dtype in ("float64", "float32", "bfloat16-autocast"):
        made = setting(dtype=dtype)
        with made.computing():
            current = full_score(made.model, made.problem)
        for row, response in zip(current, made.problem.responses, strict=True):
            # Off-policy within the clip's reach, or by the 2 nats of a token that does not count.
            assert (row - response.old_logp).abs().max() < 2.2
            assert response.old_logp.dtype == torch.float64


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_the_configs(training):
    assert setting(training=training).model.training == training


def test_the_oracle_is_the_model_itself_at_oracle_precision(made):
    assert made.oracle is made.model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-autocast"])
def test_the_oracle_is_a_copy_in_float64_of_the_same_weights(dtype):
    made = setting(dtype=dtype)
    assert made.oracle is made.oracle
    assert made.oracle is not made.model
    assert {p.dtype for p in made.oracle.parameters()} == {torch.float64}
    assert torch.equal(weights(made.oracle), weights(made.model).double())
    made.oracle.lm_head.weight.data.zero_()
    assert made.model.lm_head.weight.any()


def test_model_and_oracle_compute_each_in_its_own_precision():
    made, ids = setting(dtype="float32"), tokens(6)[None]
    with made.computing():
        native = made.model(input_ids=ids).logits
        exact = made.oracle(input_ids=ids).logits
        truth = build("llama", seed=0, dtype="float64")
        assert (native.dtype, exact.dtype) == (torch.float32, torch.float64)
        assert 1e-9 < (native - exact).norm() / exact.norm() < 1e-5
    bare = made.oracle(input_ids=ids).logits
    assert 0 < (bare - exact).norm() / exact.norm() < 1e-5
    assert (truth(input_ids=ids).logits - exact).norm() / exact.norm() < 1e-5
    for model in (made.model, made.oracle):
        assert not [name for name, m in model.named_modules() if "forward" in vars(m)]


def test_adapters_are_part_of_the_setting():
    made = setting(lora=True)
    trained = [name for name, p in made.model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name or "modules_to_save" in name for name in trained)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arch": "lama"}, "architecture 'lama' is not known"),
        ({"objective": "ppo"}, "objective 'ppo' is not known"),
        ({"dtype": "float16"}, "dtype 'float16' is not known"),
    ],
)
def test_what_cannot_be_built_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        setting(**fields)


class Characters:
    """A tokenizer of single characters over the tiny vocabulary, with one end-of-text token."""

    all_special_ids = (0,)

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [1 + ord(character) % 96 for character in text]}

    def decode(self, ids):
        return "".join(chr(96 + int(i)) for i in ids)


def test_a_pretrained_model_is_judged_on_text_that_it_continues_itself(monkeypatch):
    monkeypatch.setattr(lsverify.setting, "tokenizer", lambda arch: Characters())
    monkeypatch.setattr(lsverify.setting, "build", lambda arch, **given: build("llama", **given))
    made = setting(SMOLLM2, response_lengths=(3, 2))
    assert made.problem.group_sizes == (2,)
    assert made.problem.response_lengths == (3, 2)
    assert made.second.prompt_hash(0) == made.problem.prompt_hash(0)
    assert made.second.tokens(0).tolist() != made.problem.tokens(0).tolist()
    assert all(0 not in response.tokens for response in made.problem.responses)
    rewards = [response.reward for response in made.problem.responses]
    assert len(set(rewards)) == 2

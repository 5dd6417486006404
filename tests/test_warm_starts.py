import json
from dataclasses import replace

import pytest
import torch

from lsverify import models, warm_starts
from lsverify.cases import Options, expanded, is_warm
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig
from lsverify.fixture_files import fixture, warm_folder
from lsverify.ladder import judge
from lsverify.setting import make_setting
from lsverify.task_problems import edited, mean_reward, task_problem
from lsverify.tasks import ASK, draw
from lsverify.warm_starts import Recipe

ARCHS = tuple(warm_starts.RECIPES)
SHORT = Recipe(pairs=(1, 2), lengths=(16,), words=8, batch=4, most_steps=4, check_every=4)


@pytest.fixture(scope="module")
def policy():
    return models.build("warm:llama", seed=0, dtype="float32")


def rewards_of(arch):
    model = models.build(f"warm:{arch}", seed=0, dtype="float32")
    split = warm_starts.split_of(f"warm:{arch}")
    return mean_reward(model, split, samples=warm_starts.SAMPLES)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_reward_on_the_frozen_split_is_what_is_on_record(arch):
    made = warm_starts.made_of(f"warm:{arch}")
    # Another processor rounds otherwise, and may draw some tokens otherwise.
    assert rewards_of(arch) == pytest.approx(made["reward_after"], abs=0.02)
    assert 0.3 <= made["reward_after"] <= 0.7
    assert made["reward_after"] > made["reward_of_any_pair"]
    assert made["reward_before"] < made["reward_of_any_word"]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_record_is_that_of_the_recipe(arch):
    name = f"warm:{arch}"
    made = warm_starts.made_of(name)
    assert warm_starts.recipe_of(name) == warm_starts.RECIPES[arch]
    assert warm_starts.split_of(name) == warm_starts.RECIPES[arch].split(warm_starts.SPLIT_SEED)
    assert made["steps"] <= made["recipe"]["most_steps"]
    weights = fixture("warm") / arch / "model.safetensors"
    assert weights.stat().st_size < 1_000_000
    assert {file.name for file in weights.parent.iterdir()} == {
        "config.json",
        "model.safetensors",
        "made.json",
        "split.json",
    }


@pytest.mark.parametrize("arch", ARCHS)
def test_a_warm_start_has_the_config_of_its_family(arch):
    warm, cold = (models.build(name, seed=0) for name in (f"warm:{arch}", arch))
    assert {n: p.shape for n, p in warm.named_parameters()} == {
        n: p.shape for n, p in cold.named_parameters()
    }
    for name in ("sliding_window", "layer_types", "index_topk", "num_experts_per_tok"):
        assert getattr(warm.config, name, None) == getattr(cold.config, name, None)


def test_an_untrained_policy_answers_by_chance():
    split = warm_starts.split_of("warm:llama")
    assert mean_reward(models.build("llama", seed=0, dtype="float32"), split) < 0.1


def test_a_scrambled_prompt_lowers_the_reward(policy):
    split = warm_starts.split_of("warm:llama")
    generator = torch.Generator().manual_seed(0)

    def scrambled(task):
        *context, ask, key = task.prompt
        order = torch.randperm(len(context), generator=generator).tolist()
        return replace(task, prompt=(*(context[i] for i in order), ask, key))

    kept = mean_reward(policy, split)
    assert mean_reward(policy, [scrambled(task) for task in split]) < kept / 2


@pytest.mark.parametrize("arch", ["llama", "mamba2"])
def test_exact_is_proven_on_a_warm_start(arch):
    (case,) = Options(archs=(f"warm:{arch}",), policies=("exact",)).cases()
    receipt = judge(case)
    assert receipt.reached
    assert receipt.gradient.rel_l2 <= 1e-12
    assert case.response_lengths == (3,)


def test_detach_loses_something_on_a_warm_start():
    (case,) = Options(archs=("warm:llama",), policies=("detach",), require="gradient").cases()
    receipt = judge(case)
    assert receipt.reached
    assert receipt.bias.rel_l2 > 0.01


def setting(**fields):
    case = {"arch": "warm:llama", "response_lengths": (3,)} | fields
    return make_setting(CaseConfig(**case))


def test_the_problems_are_tasks_with_the_policys_own_answers():
    made, again, other = setting(), setting(), setting(seed=1)
    assert made.problem.prompt_lengths == (24, 19)
    assert made.problem.response_lengths == (3,) * 7
    for one, second in zip(made.problem.groups, made.second.groups, strict=True):
        assert int(one.prompt[-2]) == ASK
        assert torch.equal(one.prompt, second.prompt)
        rewards = {response.reward for response in one.responses}
        assert len(rewards) > 1
        assert rewards <= {0, 1 / 3, 2 / 3, 1}
    assert made.problem.content_hash() == again.problem.content_hash()
    assert made.problem.content_hash() != other.problem.content_hash()
    assert made.second.content_hash() != made.problem.content_hash()


def test_short_prompts_have_fewer_pairs():
    made = setting(prompt_length=9, group_size=2, response_lengths=(3, 1))
    assert made.problem.prompt_lengths == (9, 6)
    with pytest.raises(InputError, match="3 prompt tokens have no room"):
        setting(prompt_length=5, group_size=2)


def test_a_group_of_equal_rewards_gets_an_edited_response(policy):
    (task,) = draw("recall", (24,), 1, seed=0, width=3)
    right, wrong = torch.tensor(task.answer), torch.tensor([ASK] * 3)
    assert task.reward(edited(task, right)) == 0 < task.reward(edited(task, wrong)) == 1
    assert task.reward(edited(task, wrong[:1])) > 0 == task.reward(edited(task, right[:1]))
    problem = task_problem(policy, [task], group_sizes=(2,), response_lengths=(1,), seed=3)
    assert len({response.reward for response in problem.responses}) == 2


def test_lessons_count_the_answers_alone():
    recipe = replace(SHORT, pairs=(2,), short_steps=1)
    for step, length in ((0, 10), (1, 16)):
        tokens, answers = warm_starts.lessons(recipe, torch.Generator().manual_seed(0), step)
        assert tokens.shape == (4, length - 2 + 2 * 5)
        assert answers.sum(dim=1).tolist() == [6] * 4
        asked = (tokens == ASK).nonzero()
        for row, at in asked.tolist():
            assert answers[row, at : at + 5].tolist() == [False, False, True, True, True]


def test_a_warm_start_is_the_same_from_the_same_seed(tmp_path):
    first, second = (warm_starts.warmed("llama", SHORT, seed=1) for _ in range(2))
    other, _ = warm_starts.warmed("llama", SHORT, seed=2)
    assert first[1] == second[1]
    assert first[1]["steps"] == 4
    head = [model.lm_head.weight for model in (first[0], second[0], other)]
    assert torch.equal(head[0], head[1])
    assert not torch.equal(head[0], head[2])
    warm_starts.write(tmp_path / "new", *first, SHORT.split(0))
    loaded = models.build(str(tmp_path / "new"), seed=0, dtype="float32")
    assert torch.equal(loaded.lm_head.weight, head[0])
    assert json.loads((tmp_path / "new" / "made.json").read_text())["loss"] == first[1]["loss"]


def test_names_of_warm_starts():
    assert is_warm("warm:llama")
    assert not is_warm("llama")
    assert expanded(("warm:llama",)) == ("warm:llama",)
    assert not models.is_small("warm:llama")
    for ask in (
        lambda: warm_folder("warm:gpt5"),
        lambda: models.build("warm:gpt5", seed=0),
        lambda: Options(archs=("warm:gpt5",)).cases(),
    ):
        with pytest.raises(InputError, match=r"'warm:gpt5' is not known: use one of warm:.*llama"):
            ask()
    with pytest.raises(InputError, match="tied is for small models"):
        models.build("warm:llama", seed=0, tied=True)


def test_the_command_writes_a_warm_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(warm_starts.RECIPES, "llama", replace(SHORT, most_steps=60))
    with pytest.raises(SystemExit) as ended:
        warm_starts.main(["--arch", "llama", "--seed", "1", "--out", str(tmp_path)])
    assert ended.value.code == 0
    assert "llama: reward" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").is_file()

"""TRL's `GRPOTrainer` as a candidate: its real training step against full autograd, and what it leaves behind."""

import dataclasses
import re

import judged
import pytest
import torch
from trl import GRPOTrainer
from trl_trainings import quiet

from lsverify.candidates import trl_trainer
from lsverify.cases import QUICK
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig
from lsverify.ladder import judge
from lsverify.models import build
from lsverify.norms import distance, total
from lsverify.objective import preset
from lsverify.objective_options import read_objective
from lsverify.paths import full_autograd, score
from lsverify.precision import computing
from lsverify.problems import ProblemSpec, draw, off_policy
from lsverify.put_back import PutBack
from lsverify.references import take_gradients
from lsverify.untouched import Untouched

NAME = "lsverify.candidates.trl_trainer"
OBJECTIVES = [
    "grpo",
    "dapo,entropy_bonus=0.01,temperature=0.7",
    "dr_grpo",
    "bnpo,micro_batch=2",
    "cispo",
    "gspo,beta=0.04,kl_weighted=true",
    "sapo",
    "luspo",
    "vespo",
    "grpo,advantage=batch_std,dual_clip=1.5,off_policy_threshold=0.05",
    "grpo,sampler_correction=sequence_truncate,sampler_clip_max=1.1,beta=0.04",
]


def problem_for(model, objective, sizes=(4, 2), lengths=(7, 4), seed=0):
    """Two groups of different size and length, off-policy, with holes, truncated responses and a sampler's log-probs."""
    spec = ProblemSpec(
        prompt_lengths=lengths,
        group_sizes=sizes,
        response_lengths=(3, 1, 4),
        seed=seed,
        holes=True,
        truncated=True,
    )
    drawn = draw(spec, model.config.get_text_config().vocab_size)
    scores = score(model, drawn, temperature=objective.temperature)
    problem = off_policy(drawn, scores, objective, seed)
    sampler = [each.old_logp + 0.05 for each in problem.responses]
    return problem.replace_logps(sampler=sampler)


def apart(path, model, problem, objective):
    """The distance of a path's gradient from full autograd's, and of its loss."""
    gradients, losses = [], []
    for each in (path, full_autograd):
        losses.append(each(model, problem, objective).loss)
        gradients.append(take_gradients(model))
    actual, expected = gradients
    assert {n for n, g in actual.items() if g is None} == {
        n for n, g in expected.items() if g is None
    }
    pairs = [(actual[n].double(), g.double()) for n, g in expected.items() if g is not None]
    return total(distance(*pair) for pair in pairs).rel_l2, abs(losses[0] - losses[1])


@pytest.fixture(scope="module")
def llama():
    model = build("llama", seed=0)
    with computing(model, "float64"):
        yield model


@pytest.mark.parametrize("text", OBJECTIVES)
def test_step_is_full_autograd_up_to_its_float32(llama, text):
    objective = read_objective(text)
    problem = problem_for(llama, objective)
    exact, loss = apart(trl_trainer.promoted, llama, problem, objective)
    assert exact < 1e-12
    assert loss < 1e-12
    rounded, _ = apart(trl_trainer.step, llama, problem, objective)
    assert 1e-9 < rounded < 1e-5


@pytest.mark.parametrize("arch", ["qwen3", "mistral", "mixtral", "mamba2"])
def test_families_are_full_autograd_in_float32(arch):
    model, objective = build(arch, seed=0, dtype="float32"), preset("grpo")
    assert apart(trl_trainer.step, model, problem_for(model, objective), objective)[0] < 1e-5


@pytest.mark.parametrize(
    ("arch", "even"),
    [
        # TRL passes no positions, and learned ones count the padding.
        ("gpt2", True),
        # The library lets the state run through the padding.
        ("rwkv", True),
        # So here; and TRL's head leaves out the soft cap, whose name it does not know.
        ("xlstm", False),
    ],
)
def test_families_that_padding_on_the_left_moves(arch, even):
    model, objective = build(arch, seed=0, dtype="float32"), preset("grpo")
    alike, ragged = (problem_for(model, objective, lengths=each) for each in ((7, 7), (7, 4)))
    assert (apart(trl_trainer.step, model, alike, objective)[0] < 1e-5) == even
    assert apart(trl_trainer.step, model, ragged, objective)[0] > 0.1


def test_adapters():
    model, objective = build("llama", seed=0, dtype="float32", lora=True), preset("grpo", beta=0.1)
    assert apart(trl_trainer.step, model, problem_for(model, objective), objective)[0] < 1e-5


@pytest.mark.parametrize(
    ("path", "dtype", "last"),
    [
        ("step", "float32", "proven"),
        ("promoted", "float64", "proven"),
        ("step", "float64", "failed"),
    ],
)
def test_ladder(path, dtype, last):
    """Reached in float32; in float64 the fused head's float32 is refused, and nothing else is there to refuse."""
    config = CaseConfig(
        arch="llama", candidate=f"{NAME}:{path}", dtype=dtype, require="gradient", **QUICK
    )
    receipt = judge(config)
    found = judged.statuses(receipt)
    assert found["execution"] == "proven"
    assert (found["forward"], found["gradient"]) == (last, last)
    if last == "failed":
        forward = judged.rung(receipt, "forward")
        assert forward.measure < 1e-6
        assert "every layer's values agree: the difference is made after the last layer" in (
            forward.detail
        )
        assert receipt.gradient.rel_l2 < 1e-5


def doubled(self, model, inputs):
    return 2 * GRPOTrainer._compute_loss(self, model, inputs)


def shortened(self, model, inputs):
    mask = inputs["completion_mask"].clone()
    mask[0, 0] = 0
    return GRPOTrainer._compute_loss(self, model, {**inputs, "completion_mask": mask})


def on_policy(self, model, inputs):
    rest = {name: each for name, each in inputs.items() if name != "old_per_token_logps"}
    return GRPOTrainer._compute_loss(self, model, rest)


def scored_as_zero(self, **_):
    return [0.0 if each is None else each.reward for each in self.rows]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_compute_loss", doubled),
        ("_compute_loss", shortened),
        ("_compute_loss", on_policy),
        ("_rewards", scored_as_zero),
    ],
    ids=["doubled", "shortened", "on policy", "fillers scored"],
)
def test_faults_show(llama, monkeypatch, name, fault):
    objective = preset("grpo")
    problem = problem_for(llama, objective)
    monkeypatch.setattr(trl_trainer.GivenRollouts, name, fault, raising=False)
    assert apart(trl_trainer.step, llama, problem, objective)[0] > 1e-3


def left_changed(model):
    objective = preset("dapo")
    problem = problem_for(model, objective)
    generation = dict(vars(model.generation_config))
    before, around = Untouched(model), PutBack(model)
    trl_trainer.step(model, problem, objective)
    changes = [*before.changes(), *around.noted()]
    changes += ["generation_config"] if vars(model.generation_config) != generation else []
    around.put_back()
    take_gradients(model)
    return changes


@pytest.mark.parametrize("train", [True, False])
def test_nothing_else_is_changed(train):
    assert left_changed(build("llama", seed=0, train=train)) == []


def test_what_a_trainer_changes_shows(monkeypatch):
    monkeypatch.setattr(trl_trainer, "_left_alone", lambda _: quiet())
    with torch.random.fork_rng():
        torch.manual_seed(7)  # not the trainer's own seed, which an earlier test may have left
        changes = left_changed(build("llama", seed=0, train=False))
    told = "\n".join(changes)
    for word in ("forward was", "training was", "pad_token_id was", "random state of torch"):
        assert word in told
    assert "generation_config" in changes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rloo", "TRL has no counterpart of ratio trajectory"),
        ("reinforce", "TRL has no counterpart of none with constant"),
        ("grpo,aux_coef=0.01", "load-balancing loss counts the last token"),
        ("bnpo,micro_batch=4", "micro_batch=4 does not divide the 6 responses"),
    ],
)
def test_objectives_that_it_has_not_are_refused(llama, text, words):
    problem = problem_for(llama, preset("grpo"))
    with pytest.raises(InputError, match=re.escape(words)):
        trl_trainer.step(llama, problem, read_objective(text))


def test_problems_that_it_cannot_take_are_refused(llama):
    problem = problem_for(llama, preset("grpo"))
    bare = replace_all(problem, ref_logp=None, sampler_logp=None)
    with pytest.raises(InputError, match="beta above 0 and the problem no ref_logp"):
        trl_trainer.step(llama, bare, preset("grpo", beta=0.1))
    corrected = preset("grpo", sampler_correction="token_mask")
    with pytest.raises(InputError, match="a sampler_correction and the problem no sampler_logp"):
        trl_trainer.step(llama, bare, corrected)
    first = dataclasses.replace(problem.groups[0], spans=((1, 3),))
    spanned = dataclasses.replace(problem, groups=(first, *problem.groups[1:]))
    with pytest.raises(InputError, match="TRL has no prompts with spans"):
        trl_trainer.step(llama, spanned, preset("grpo"))


def replace_all(problem, **fields):
    return problem.replace_responses([fields for _ in problem.responses])

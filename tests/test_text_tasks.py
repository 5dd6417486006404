import json
import re

import pytest
from letters import lettered_llama, letters
from small_trainings import curve_of, small

from lsverify import models, text_tasks
from lsverify.adapters import begin
from lsverify.checkpoints import read_checkpoint
from lsverify.convergence import train
from lsverify.courses import course_of
from lsverify.errors import InputError
from lsverify.fixture_files import fixture
from lsverify.observe import weights_of
from lsverify.pretrained import SMOLLM2, tokenizer
from lsverify.text_tasks import KINDS, TextTasks, graded

LENGTH = 260


@pytest.fixture(scope="module")
def sources():
    return {kind: TextTasks(kind, letters()) for kind in KINDS}


def read(source, task):
    """The answer, read from the prompt alone."""
    text = "".join(source.tokenizer.convert_ids_to_tokens(list(task.prompt)))
    *_, line = text.split("\n")
    found = re.findall(re.escape(line) + r"(\w+)]]\n", text)
    return found if line != "[[" else re.findall(r"\[\[(.+)]]\n", text)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_as_long_as_asked_for_and_hold_their_answer(sources, kind):
    source = sources[kind]
    for seed in range(20):
        task = source.one(LENGTH, seed)
        assert len(task.prompt) == LENGTH
        assert task == source.one(LENGTH, seed)
        found = read(source, task)
        if kind == "topic":
            assert task.evidence == 0
            assert len(found) == text_tasks.CHOICES
            continue
        assert found == [task.answer]
        # Without the first token of the evidence the note is not whole any more.
        note = "".join(source.tokenizer.convert_ids_to_tokens(list(task.prompt[task.evidence :])))
        assert note.startswith("\n\nThe ")
        assert note.index(f"[[{task.answer}]]") < 40
    assert len({source.one(LENGTH, seed).prompt for seed in range(20)}) == 20


def test_evidence_stands_anywhere(sources):
    distances = [sources["copy"].one(LENGTH, seed).distance for seed in range(40)]
    assert min(distances) < LENGTH / 3
    assert max(distances) > 2 * LENGTH / 3


@pytest.mark.parametrize(
    ("response", "worth"),
    [
        ("word]]\n", 1.0),
        (" word ]] \nmore", 1.0),
        ("word]] and more\n", 0.5),
        ("word", 0.5),
        ("other]]\n", 0.5),
        ("two words]]\n", 0.0),
        ("]]\n", 0.0),
        ("", 0.0),
        ("\nword]]", 0.0),
    ],
)
def test_half_is_for_the_word_and_half_for_the_form(response, worth):
    assert graded(response, "word") == worth


def test_a_line_ends_a_response(sources):
    source = sources["copy"]
    assert source.ends == (0, 2)
    task = source.one(LENGTH, 0)
    ids = source.tokenizer(f"{task.answer}]]\n")["input_ids"]
    assert task.reward(ids) == 1.0
    assert len(ids) <= task.most


def test_the_frozen_splits_are_what_they_say():
    known = tokenizer(SMOLLM2)
    for kind in KINDS:
        found = json.loads(fixture(f"tasks/text-{kind}.json").read_text())
        tasks = TextTasks(kind, known).test(SMOLLM2)
        assert len(tasks) == len(found) == text_tasks.SIZE
        assert text_tasks.rows(tasks) == found
        for task in tasks:
            assert len(task.prompt) == 256
            assert f"[[{task.answer}]]" in known.decode(task.prompt)
            assert task.reward(known(f"{task.answer}]]\n")["input_ids"]) == 1.0


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: small(task="text:copies"), "'text:copies' is not known: use one of text:copy"),
        (lambda: small(task="text:copy"), "needs a policy with a tokenizer, 'warm:llama' has none"),
        (lambda: TextTasks("copy", letters()).one(20, 0), "20 prompt tokens have no room"),
        (lambda: TextTasks("topic", letters()).one(10**6, 0), "0 sections of 1000000 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(ask, said):
    with pytest.raises(InputError, match=said):
        ask()


@pytest.fixture(scope="module")
def arch(tmp_path_factory):
    return lettered_llama(tmp_path_factory.mktemp("model"))


OPTIONS = {
    "task": "text:copy",
    "lora_rank": 2,
    "lengths": (70, 80),
    "test_prompts": 2,
    "lr": 1e-2,
    "steps": 2,
    "test_every": 9,
    "compare_every": 0,
}


@pytest.fixture
def easy(monkeypatch):
    """Rewards and ends that a policy of random weights gets now and then."""
    monkeypatch.setattr(TextTasks, "ends", tuple(range(8)))
    monkeypatch.setattr(
        text_tasks,
        "graded",
        lambda response, answer: sum(c in answer for c in response) / max(len(response), 1),
    )


def test_adapters_train_alike_in_full_autograd_and_exact(arch, tmp_path, easy):
    full, exact, detached = (
        curve_of(tmp_path / arm, arch=arch, arm=arm, serial=arm == "full", **OPTIONS | options)
        for arm, options in (("full", {}), ("exact", {}), ("detach", {"steps": 1}))
    )
    assert full.steps[0].kl_to_start < 1e-20
    assert full.steps[1].kl_to_start > 1e-8
    assert 0 < min(row.reward_sd for row in full.steps)
    assert max(row.response_length for row in full.steps) < text_tasks.MOST
    for one, other in zip(full.steps, exact.steps, strict=True):
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-9)
        assert other.reward == one.reward
    first = full.steps[0].gradient_norm
    assert abs(detached.steps[0].gradient_norm - first) > 1e-3 * first


def test_a_checkpoint_of_adapters_has_the_adapters_alone_and_resumes(arch, tmp_path, easy):
    class Killed(BaseException):
        pass

    def report(row):
        if row.step == 2:
            raise Killed

    whole = curve_of(tmp_path / "whole", arch=arch, **OPTIONS)
    with pytest.raises(Killed):
        train(small(arch=arch, **OPTIONS), tmp_path / "torn", report=report)
    assert read_checkpoint(tmp_path / "torn").step == 1
    assert curve_of(tmp_path / "torn", arch=arch, **OPTIONS).repeatable() == whole.repeatable()
    size = (tmp_path / "whole" / "checkpoint.safetensors").stat().st_size
    assert size < sum(t.numel() * 8 for t in weights_of(models.build(arch, seed=0)).values()) / 2


def test_adapters_begin_without_effect_and_with_a_gradient():
    model = begin(models.build("llama", seed=4), 3, seed=1)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-3] for name in named} == {"lora_A", "lora_B"}
    assert all(bool(p.any()) == (".lora_A." in name) for name, p in named.items())
    other = begin(models.build("llama", seed=4), 3, seed=2)
    assert any(not p.equal(named[name]) for name, p in other.named_parameters() if name in named)


def test_a_course_of_text_has_lengths_in_turn(arch):
    course = course_of(arch, "text:copy", lengths=(70, 80))
    assert [len(course.tasks(0, turn, 1)[0].prompt) for turn in range(3)] == [70, 80, 70]
    assert course.tasks(0, 0, 3)[:2] == course.tasks(0, 0, 2)

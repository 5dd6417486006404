import json
import sys

import make_task_splits
import pytest
import torch

from lsverify import tasks
from lsverify.errors import InputError
from lsverify.fixture_files import fixture
from lsverify.tasks import ASK, COPY, IS, NEEDLE, VOCABULARY, Task, draw

LENGTHS = (32, 48, 200)
KINDS = list(tasks.KINDS)


def after(tokens, key, width):
    """The tokens behind the last `key`; None where there is no such key."""
    places = [i for i, token in enumerate(tokens) if token == key]
    return tuple(tokens[places[-1] + 1 :][:width]) if places else None


def solved(task):
    """The answer read from the prompt alone, by other code than the one that wrote it; None where it cannot be."""
    return SOLVERS[task.name](list(task.prompt), len(task.answer))


def solve_recall(tokens, width):
    *context, _, key = tokens
    return after(context, key, width)


def solve_needle(tokens, width):
    *context, _, _, key = tokens
    starts = [i for i in range(len(context) - 1) if context[i : i + 2] == [NEEDLE, key]]
    return tuple(context[starts[0] + 2 :][:width]) if starts else None


def solve_chain(tokens, width):
    *context, _, word = tokens
    links = {context[i + 1]: context[i + 2] for i, t in enumerate(context[:-2]) if t == IS}
    found = []
    for _ in range(width):
        word = links.get(word)
        found.append(word)
    return tuple(found)


def solve_copy_edited(tokens, width):
    *context, _, old, new = tokens
    if context.count(COPY) < 2:
        return None
    start = context.index(COPY)
    return tuple(new if t == old else t for t in context[start + 1 :][:width])


def solve_count(tokens, _):
    *context, _, word = tokens
    return divmod(context.count(word), 10)


def solve_arithmetic(tokens, _):
    *context, _, one, _, other = tokens
    values = {context[i + 1]: context[i + 2 : i + 4] for i, t in enumerate(context) if t == IS}
    if not {one, other} <= set(values):
        return None
    total = sum(10 * values[name][0] + values[name][1] for name in (one, other))
    return total // 100, total // 10 % 10, total % 10


SOLVERS = {
    "recall": solve_recall,
    "needle": solve_needle,
    "chain": solve_chain,
    "copy_edited": solve_copy_edited,
    "count": solve_count,
    "arithmetic": solve_arithmetic,
}


@pytest.mark.parametrize("name", KINDS)
def test_the_answer_follows_from_the_prompt_alone(name):
    for task in draw(name, LENGTHS, 60, seed=1):
        assert solved(task) == task.answer
        assert len(task.prompt) in LENGTHS
        assert {*task.prompt, *task.answer} <= set(range(VOCABULARY))


@pytest.mark.parametrize("name", KINDS)
def test_the_evidence_is_where_it_is_said_to_be(name):
    for task in draw(name, LENGTHS, 60, seed=2):
        assert task.distance == len(task.prompt) - task.evidence

        def cut(start, task=task):
            return Task(name=name, prompt=task.prompt[start:], answer=task.answer, evidence=0)

        assert solved(cut(task.evidence)) == task.answer
        assert solved(cut(task.evidence + 1)) != task.answer


@pytest.mark.parametrize("name", KINDS)
def test_longer_prompts_have_their_evidence_further_back(name):
    near, far = (
        sum(task.distance for task in draw(name, (length,), 60, seed=3)) / 60
        for length in (40, 400)
    )
    assert far > 3 * near


@pytest.mark.parametrize("name", KINDS)
def test_the_seed_alone_decides(name):
    state = torch.get_rng_state()
    assert draw(name, LENGTHS, 6, seed=4) == draw(name, LENGTHS, 6, seed=4)
    assert draw(name, LENGTHS, 6, seed=4) != draw(name, LENGTHS, 6, seed=5)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", KINDS)
def test_rewards_are_shares(name):
    for task in draw(name, LENGTHS, 12, seed=6):
        assert task.reward(task.answer) == task.reward(torch.tensor(task.answer)) == 1.0
        assert task.reward(()) == task.reward([ASK] * len(task.answer)) == 0.0
        share = 1 / len(task.answer)
        assert task.reward([*task.answer[:-1], ASK]) == pytest.approx(1 - share)
        assert task.reward(task.answer[:1]) == pytest.approx(share)
        assert 0 < task.reward((*task.answer, ASK, ASK)) < 1


def test_words_and_room_of_recall_are_what_was_asked_for():
    for task in draw("recall", (40,), 20, seed=7, pairs=3, width=3, words=12, within=20):
        assert {task.prompt[-1], *task.answer} <= set(tasks.WORDS[:12])
        assert 14 > len(set(task.prompt[-20:-2]) & set(tasks.WORDS[:12])) == 12
        assert not set(task.prompt[:20]) & set(tasks.WORDS[:12])
        assert task.distance <= 20


def test_rows_are_plain_and_come_back():
    some = [task for name in KINDS for task in draw(name, (32,), 2, seed=8)]
    plain = tasks.rows(some)
    assert set(plain[0]) == {"name", "prompt", "answer", "evidence", "distance"}
    assert tasks.from_rows(plain) == some
    plain[3]["distance"] += 1
    with pytest.raises(InputError, match=r"row 3: distance \d+, but the evidence is \d+ tokens"):
        tasks.from_rows(plain)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: draw("sums", (9,), 1, seed=0), "'sums' is not known: use one of recall, chain"),
        (lambda: draw("chain", (), 1, seed=0), "no prompt length"),
        (lambda: draw("chain", (9,), 1, seed=0), "9 prompt tokens have no room.*needs 20"),
        (lambda: draw("recall", (99,), 1, seed=0, pairs=30), "90 different words.*there are 80"),
    ],
)
def test_what_does_not_fit_is_refused(ask, text):
    with pytest.raises(InputError, match=text):
        ask()


@pytest.mark.parametrize("name", KINDS)
def test_the_frozen_splits_are_drawn_as_ever(name):
    frozen = tasks.from_rows(json.loads((fixture("tasks") / f"{name}.json").read_text()))
    assert frozen == draw(name, make_task_splits.LENGTHS, 12, seed=make_task_splits.SEED)


def test_tasks_are_a_dataset_and_come_back(monkeypatch):
    some = [task for name in KINDS for task in draw(name, (32, 40), 2, seed=9)]
    made = tasks.to_dataset(some)
    assert made.column_names == ["name", "prompt", "answer", "evidence", "distance"]
    assert tasks.from_dataset(made) == some
    assert tasks.from_dataset(made.filter(lambda row: row["name"] == "chain")) == some[2:4]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"datasets, which is not installed: pip install 'lsv"):
        tasks.to_dataset(some)

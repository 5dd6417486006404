"""Users' own data: rows, parts, rewards, and a training on them."""

import json
import sys

import pytest
from letters import letters
from small_trainings import curve_of, small

from lsverify import own_tasks
from lsverify.courses import course_of
from lsverify.errors import InputError
from lsverify.own_tasks import OwnTasks
from lsverify.tasks import draw, rows

REWARDS = """
def exact(response, row):
    right = [a == b for a, b in zip(response, row["answer"])]
    row["answer"] = None  # what is written there must not reach the next response
    return sum(right) / len(right)

def by_place(response, row):
    return row["value"]

def broken(response, row):
    raise KeyError("nothing")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with recall tasks in data.jsonl and a module of rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path / "data.jsonl", plain())
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    yield tmp_path
    sys.modules.pop("my_rewards", None)


def plain(number=10):
    sizes = {"pairs": 3, "width": 3, "words": 24}
    return [
        {key: row[key] for key in ("prompt", "answer", "evidence")}
        for row in rows(draw("recall", (24, 20), number, seed=5, **sizes))
    ]


def write(file, some):
    file.write_text("".join(json.dumps(row) + "\n" for row in some))


def course(**options):
    return course_of("warm:llama", "file:data.jsonl", **options)


def test_a_fifth_is_for_the_test_whatever_the_order_of_rows(here):
    first = course()
    assert [len(first.train), len(first.test)] == [8, 2]
    assert first.test[0].most == 3
    assert first.ends == ()
    write(here / "data.jsonl", plain()[::-1])
    assert {task.prompt for task in course().test} == {task.prompt for task in first.test}
    write(here / "data.jsonl", plain() * 2)
    again = course()
    assert len(again.test) == 4
    assert not {task.prompt for task in again.train} & {task.prompt for task in again.test}


def test_rows_may_say_their_part(here):
    split = [row | {"split": "test" if i == 3 else "train"} for i, row in enumerate(plain())]
    write(here / "data.jsonl", split)
    assert [list(task.prompt) for task in course().test] == [split[3]["prompt"]]


def test_every_row_comes_once_before_any_comes_again(here):
    own = course()
    seen = [task.prompt for turn in range(4) for task in own.tasks(0, turn, 4)]
    assert sorted(seen[:8]) == sorted(seen[8:]) == sorted(task.prompt for task in own.train)
    assert seen[:8] != seen[8:]
    assert [task.prompt for turn in range(2) for task in own.tasks(1, turn, 4)] != seen[:8]


def test_rewards_are_the_users_and_default_to_tokens_in_place(here):
    for own in (course(), course(reward="my_rewards:exact")):
        task = own.train[0]
        answer = next(row["answer"] for row in plain() if tuple(row["prompt"]) == task.prompt)
        assert [task.reward(answer), task.reward(answer)] == [1.0, 1.0]
        assert task.reward([*answer[:2], 99]) == pytest.approx(2 / 3)
    assert course(reward="my_rewards:exact", most=5).test[0].most == 5


def test_parquet_is_read_the_same(here):
    from datasets import Dataset

    before = course()
    mixed = plain()
    mixed[2].pop("evidence")
    Dataset.from_list(mixed).to_parquet(here / "data.parquet")
    write(here / "data.jsonl", mixed)
    read = [
        OwnTasks.read(here / name, reward=None, most=None).rows
        for name in ("data.jsonl", "data.parquet")
    ]
    assert read[0] == read[1]
    assert len(before.train) == 8


def test_a_training_learns_from_a_file_and_is_bound_to_its_content(here):
    options = {"task": "file:data.jsonl", "reward": "my_rewards:exact", "steps": 2}
    curve = curve_of(here / "run", **options)
    assert len(curve.end.rewards) == 2
    assert any(row.reward > 0 for row in curve.steps)
    stored = json.loads((here / "run" / "training.json").read_text())
    assert stored["content"] == small(**options).content
    assert hash(small(**options)) == hash(small(**options))
    write(here / "data.jsonl", plain()[:-1])
    assert small(**options).content != stored["content"]
    with pytest.raises(InputError, match="holds another training"):
        curve_of(here / "run", **options)
    with pytest.raises(InputError, match=r"has changed: its content was .*, and is .*: train anew"):
        small(**stored)


def test_the_rewards_source_is_part_of_the_content(here):
    before = small(task="file:data.jsonl", reward="my_rewards:exact").content
    (here / "my_rewards.py").write_text(REWARDS + "\n# other\n")
    assert small(task="file:data.jsonl", reward="my_rewards:exact").content != before


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": []}', r"data\.jsonl, row 3: prompt is \[\]: Value should have at least 1"),
        ('{"prompt": [1.5]}', r"data\.jsonl, row 3: prompt is"),
        ('{"answer": [1]}', r"data\.jsonl, row 3: prompt is .*: Field required"),
        ("[1, 2]", r"data\.jsonl, row 3: \[1, 2\] is no row"),
        ('{"prompt": [1', r"data\.jsonl, row 3: no JSON"),
        ('{"prompt": [1], "answer": [1], "evidence": 1}', r"row 3: evidence 1 is behind"),
        ('{"prompt": [1], "answer": [1], "split": "dev"}', r"row 3: split is 'dev'"),
        ('{"prompt": [1]}', r"row 3: there is nothing to reward by: name a function"),
        ('{"prompt": [1, 100000], "answer": [1]}', r"row 3: prompt has token 100000; the policy"),
        ('{"prompt": "text", "answer": [1]}', r"has prompts of text, and 'warm:llama' no token"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(here, row, said):
    lines = [json.dumps(each) for each in plain(2)]
    (here / "data.jsonl").write_text("\n".join([*lines, row]))
    with pytest.raises(InputError, match=said) as refused:
        course()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1.5, "gave 1.5: return a number from 0 to 1"),
        (float("nan"), "gave nan"),
        (-0.1, "gave -0.1"),
        (True, "gave a bool"),
        ("good", "gave a str"),
    ],
)
def test_a_reward_that_breaks_its_promise_is_named(here, value, said):
    write(here / "data.jsonl", [row | {"value": value} for row in plain()])
    task = course(reward="my_rewards:by_place").train[0]
    with pytest.raises(InputError, match=rf"row \d+: reward 'my_rewards:by_place' {said}"):
        task.reward([1])


def test_what_cannot_be_a_course_is_refused(here):
    with pytest.raises(InputError, match=r"reward 'my_rewards:broken' raised KeyError: 'nothing'"):
        course(reward="my_rewards:broken").train[0].reward([1])
    for options, said in [
        ({"reward": "my_rewards"}, "reward 'my_rewards' is not of the form MODULE:NAME"),
        ({"reward": "nowhere:it"}, "reward 'nowhere:it': no module 'nowhere'"),
        ({"reward": "my_rewards:gone"}, "module 'my_rewards' has no 'gone'"),
        ({"task": "file:gone.jsonl", "reward": None}, r"gone\.jsonl cannot be read"),
        ({"task": "file:my_rewards.py", "reward": None}, r"neither \.jsonl nor \.parquet"),
        ({"task": "recall", "reward": "my_rewards:exact"}, "has its own rewards"),
        ({"lengths": (8,)}, "lengths are those of drawn prompts"),
    ]:
        with pytest.raises(InputError, match=said) as refused:
            small(**{"task": "file:data.jsonl"} | options)
        assert "\n" not in str(refused.value)
    (here / "data.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"data\.parquet is no parquet file"):
        small(task="file:data.parquet")
    write(here / "data.jsonl", plain()[:1])
    with pytest.raises(InputError, match="0 of 1 rows are for the test"):
        course()


def test_text_is_for_a_tokenizer_and_its_evidence_counts_characters(here, monkeypatch):
    known = letters()
    monkeypatch.setattr(own_tasks, "_tokenizer", lambda arch, file: known)
    some = [{"prompt": f"say {word}: ", "answer": word, "evidence": 4} for word in ("ab", "cd")]
    write(here / "data.jsonl", some)
    (here / "my_rewards.py").write_text(
        "def said(response, row):\n    return float(response == row['answer'])\n"
    )
    own = course(reward="my_rewards:said")
    assert own.ends == (known.eos_token_id,)
    (task,) = own.test
    assert [task.evidence, len(task.prompt), task.most] == [4, 8, own_tasks.MOST]
    answer = list(task.prompt[4:6])
    assert task.reward([*answer, known.eos_token_id]) == 1.0
    assert task.reward(answer[::-1]) == 0.0

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_trainings import SMALL, curve_of, shorter_test, small

from lsverify import checkpoints, convergence, rollouts_online
from lsverify.arms import LongStraw
from lsverify.checkpoints import read_checkpoint
from lsverify.convergence import train
from lsverify.curves import NAME, final_rewards, read_curve
from lsverify.errors import InputError, TrainingBroke
from lsverify.optimizers import TorchStep

REUSED = {
    "arm": "stale:2",
    "steps": 6,
    "rollouts_per_prompts": 2,
    "test_every": 4,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    shorter_test(monkeypatch)


class Killed(BaseException):
    """Ends a training where it stands, as a kill would: nothing of ours catches it."""


def numbers(curve, *fields):
    return torch.tensor(
        [[getattr(row, field) for field in fields] for row in curve.steps], dtype=torch.float64
    )


FIELDS = ("loss", "reward", "kl_to_start", "entropy", "gradient_norm")


def apart(one, other):
    """The largest difference of two curves: of what each step was, and of every test reward."""
    steps = (numbers(one, *FIELDS) - numbers(other, *FIELDS)).abs().max()
    tests = [
        abs(a - b)
        for x, y in zip(one.tests, other.tests, strict=True)
        for a, b in zip(x.rewards, y.rewards, strict=True)
    ]
    return max(float(steps), *tests)


def same_policy_apart(folder):
    """How far two trainings are apart that take the same steps under two names."""
    one, other = (curve_of(folder / arm, arm=arm) for arm in ("detach", "tail:1"))
    return apart(one, other), one.repeatable() == other.repeatable()


def test_arms_of_the_same_policy_are_equal_to_the_bit(tmp_path):
    assert same_policy_apart(tmp_path) == (0.0, True)


def test_streamed_random_numbers_would_part_them(tmp_path, monkeypatch):
    stream = torch.Generator().manual_seed(0)

    def streamed(key, step, prompts, members, length):
        size = (len(prompts), members, length)
        return torch.rand(size, generator=stream, dtype=torch.float64)

    monkeypatch.setattr(rollouts_online, "uniforms_of", streamed)
    far, same = same_policy_apart(tmp_path)
    assert far > 1e-3
    assert not same


def test_exact_is_full_autograd_step_by_step(tmp_path):
    full = curve_of(tmp_path / "full", steps=6)
    exact = curve_of(tmp_path / "exact", arm="exact", steps=6)
    detached = curve_of(tmp_path / "detach", arm="detach", steps=6)
    assert apart(full, exact) < 1e-9
    assert apart(full, detached) > 1e-3
    assert full.start.rewards == detached.start.rewards
    found = {
        name: [row.to_full.rel_l2 for row in curve.steps if row.to_full]
        for name, curve in {"full": full, "exact": exact, "detach": detached}.items()
    }
    assert [len(each) for each in found.values()] == [3, 3, 3]
    assert max(found["full"]) < 1e-13
    assert 0 < max(found["exact"]) < 1e-12
    assert min(found["detach"]) > 0.1
    assert full.steps[-1].kl_to_start > 1e-4
    assert full.steps[0].kl_to_start < 1e-12
    assert full.steps[0].tokens_forwarded > 2 * exact.steps[0].tokens_forwarded


def test_control_and_yardstick_differ_from_the_reference_in_their_own_way(tmp_path):
    full, control, yardstick = (
        curve_of(tmp_path / arm, arm=arm) for arm in ("full", "scrambled", "other_seeds")
    )
    assert full.start == control.start == yardstick.start
    first = [curve.steps[0] for curve in (full, control, yardstick)]
    assert first[0].reward == first[1].reward != first[2].reward
    assert first[1].to_full.rel_l2 > 0.5
    # What the control is held to is the reference's own gradient.
    held_to = first[1].gradient_norm / first[1].to_full.norm_ratio
    assert held_to == pytest.approx(first[0].gradient_norm, rel=1e-9)
    assert first[1].kl_to_start < 1e-12
    assert first[2].to_full.rel_l2 < 1e-13
    assert apart(full, control) > 1e-3
    assert apart(full, yardstick) > 1e-3


def test_one_rollout_serves_several_steps_the_later_ones_off_policy(tmp_path):
    curve = curve_of(tmp_path, steps_per_rollout=4, lr=1e-2)
    assert len({row.reward for row in curve.steps}) == 1
    assert curve.steps[0].clip_share == 0 < curve.steps[-1].clip_share
    assert curve.steps[0].tokens_forwarded > curve.steps[1].tokens_forwarded
    assert max(row.to_full.rel_l2 for row in curve.steps if row.to_full) < 1e-13


def test_the_same_prompts_serve_several_rollouts(tmp_path, monkeypatch):
    seen = []
    honest = convergence.rolled_out

    def rolled_out(model, tasks, **options):
        problem, entropy = honest(model, tasks, **options)
        seen.append((problem.prompt(0).tolist(), problem.responses[0].tokens.tolist()))
        return problem, entropy

    monkeypatch.setattr(convergence, "rolled_out", rolled_out)
    curve = curve_of(tmp_path, arm="stale:2", rollouts_per_prompts=2)
    prompts = [prompt for prompt, _ in seen]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert len({tuple(tokens) for _, tokens in seen}) > 2
    assert [row.drift.age for row in curve.steps] == [1, 2, 1, 2]
    assert [row.drift.log_prob > 1e-4 for row in curve.steps] == [True] * 4


def test_comparing_gradients_changes_nothing_else(tmp_path):
    curves = [
        curve_of(tmp_path / str(every), arm="detach", compare_every=every) for every in (0, 1)
    ]
    assert [row.to_full is None for row in curves[0].steps] == [True] * 4
    assert [row.to_full is None for row in curves[1].steps] == [False] * 4
    assert apart(*curves) == 0


@pytest.mark.parametrize(
    ("arm", "tokens"),
    [
        # Two prompts of 24, four responses of 3 each: scored, then trained on; the last tokens are not forwarded.
        ("full", 2 * 8 * (24 + 2)),
        ("scrambled", 2 * 8 * (24 + 2)),
        ("detach", 2 * 2 * (23 + 4 * (1 + 2))),
        ("exact", 2 * 2 * (23 + 4 * (1 + 2)) + 2 * 23),
    ],
)
def test_tokens_are_counted_at_the_embedding(tmp_path, arm, tokens):
    curve = curve_of(tmp_path, arm=arm, steps=1, test_every=5)
    assert curve.steps[0].tokens_forwarded == tokens


def test_every_step_has_a_coin_of_its_own(tmp_path, monkeypatch):
    seeds = []
    honest = LongStraw.step

    def step(self, model, problem, objective):
        seeds.append(problem.seed)
        return honest(self, model, problem, objective)

    monkeypatch.setattr(LongStraw, "step", step)
    curve_of(tmp_path / "0", arm="roulette:0.5", steps_per_rollout=2)
    curve_of(tmp_path / "1", arm="roulette:0.5", seed=1, steps=1)
    assert len(set(seeds)) == len(seeds) == 5


def resumed(folder, **options):
    """The rows that a second process would have after the first was killed."""
    return curve_of(folder, **options).repeatable()


@pytest.mark.parametrize("row", [0, 1, 4, 5, 8])
def test_a_training_killed_after_any_row_goes_on_to_the_same_curve(tmp_path, row, whole):
    made = []

    def report(each):
        made.append(each)
        if len(made) == row + 1:
            raise Killed

    with pytest.raises(Killed):
        train(small(**REUSED), tmp_path, report=report)
    assert resumed(tmp_path, **REUSED) == whole
    assert resumed(tmp_path, **REUSED) == whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        shorter_test(patched)
        rows = curve_of(tmp_path_factory.mktemp("whole"), **REUSED).repeatable()
    assert [row["kind"] for row in rows] == ["test", *["step"] * 4, "test", *["step"] * 2, "test"]
    return rows


def test_a_checkpoint_half_written_is_none(tmp_path, monkeypatch, whole):
    def torn(path, content):
        (path.parent / f".{path.name}.1").write_bytes(content[: len(content) // 2])
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_whole", torn)
        with pytest.raises(Killed):
            train(small(**REUSED), tmp_path)
    assert read_checkpoint(tmp_path) is None
    assert resumed(tmp_path, **REUSED) == whole


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import pytest
from small_trainings import shorter_test, small
from lsverify import convergence

folder = Path(sys.argv[1])

def report(row):
    if row.step == 5:
        with (folder / "curve.jsonl").open("a") as file:
            file.write('{"kind": "step", "st')
        os.kill(os.getpid(), signal.SIGKILL)

with pytest.MonkeyPatch.context() as patched:
    shorter_test(patched)
    convergence.train(small(**eval(sys.argv[3])), folder, report=report)
"""


def test_kill_9_with_a_torn_line(tmp_path, whole):
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", KILLED, str(tmp_path), here, repr(REUSED)]
    done = subprocess.run(command, capture_output=True, cwd=Path(__file__).parents[1])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / NAME).read_text().endswith('"st')
    assert read_checkpoint(tmp_path).step == 4
    assert [row.step for row in read_curve(tmp_path).rows] == [0, 1, 2, 3, 4, 4, 5]
    assert resumed(tmp_path, **REUSED) == whole


@pytest.mark.parametrize("part", ["moments", "weights", "step"])
def test_a_checkpoint_that_loses_a_part_would_be_seen(tmp_path, monkeypatch, whole, part):
    def report(row):
        if row.step == 5:
            raise Killed

    with pytest.raises(Killed):
        train(small(**REUSED), tmp_path, report=report)
    if part == "moments":
        monkeypatch.setattr(TorchStep, "resume", lambda self, moments: None)
    elif part == "weights":
        monkeypatch.setattr(checkpoints, "restore", lambda model, weights: None)
    else:
        standing = read_checkpoint(tmp_path)
        wrong = checkpoints.Checkpoint(step=2, weights=standing.weights, moments=standing.moments)
        monkeypatch.setattr(convergence, "read_checkpoint", lambda folder: wrong)
    assert resumed(tmp_path, **REUSED) != whole


def test_a_line_that_is_no_row_is_refused_by_its_number(tmp_path):
    curve_of(tmp_path, steps=1)
    lines = (tmp_path / NAME).read_text().splitlines()
    lines[1] = lines[1].replace('"loss"', '"lost"')
    (tmp_path / NAME).write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"curve\.jsonl, line 2 is no row of a curve: remove"):
        read_curve(tmp_path)


def test_every_row_is_reported_once_and_is_in_the_file(tmp_path):
    made = []
    curve = train(small(), tmp_path, report=made.append)
    assert tuple(made) == curve.rows == read_curve(tmp_path).rows
    assert final_rewards([curve, curve]).shape == (2, 12)
    assert curve.start.step == 0
    assert curve.end.step == 4 == curve.steps[-1].step
    again = []
    assert train(small(), tmp_path, report=again.append) == curve
    assert not again


def test_a_folder_belongs_to_one_training(tmp_path):
    curve_of(tmp_path, steps=1)
    with pytest.raises(
        InputError, match=r"holds another training than this one: see training\.json"
    ):
        curve_of(tmp_path, steps=2)


def test_a_training_that_breaks_says_where(tmp_path, monkeypatch):
    honest = convergence.full_autograd

    def broken(model, problem, objective, **options):
        result = honest(model, problem, objective, **options)
        next(model.parameters()).grad.fill_(float("inf"))
        return result

    monkeypatch.setattr("lsverify.arms.full_autograd", broken)
    with pytest.raises(TrainingBroke, match="step 1: the gradient's norm is inf; use an lr below"):
        curve_of(tmp_path)
    assert [row.kind for row in read_curve(tmp_path).rows] == ["test"]


REFUSED = [
    (
        {"arm": "exacto"},
        "training: arm 'exacto' is neither full, other_seeds, scrambled nor a policy: policy 'exacto'",
    ),
    (
        {"arm": "stale:4", "steps_per_rollout": 2},
        "training: arm 'stale:4' outlives its prompts, which serve 2 steps: raise rollouts_per_prompts",
    ),
    ({"task": "recal"}, "training: task 'recal' is not known: use one of recall"),
    ({"arch": "warm:lama"}, "training: warm start 'warm:lama' is not known: use one of warm:"),
    ({"objective": "grop"}, "training: objective 'grop' is not known; choose from grpo"),
    ({"steps": 0}, "training: steps is 0: Input should be greater than or equal to 1"),
    ({"lr": float("nan")}, "training: lr is nan: Input should be"),
    ({"responses": 1}, "training: responses is 1: Input should be greater than or equal to 2"),
    (
        {"dtype": "bfloat16"},
        "training: dtype is 'bfloat16': Input should be 'float64' or 'float32'",
    ),
    ({"step": 3}, "training: no option 'step'; there are arch, task, arm, seed, steps"),
    ({"seed": 2**31}, "training: seed is 2147483648: Input should be less than or equal to"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_training_that_cannot_be_is_refused_in_one_line(options, message):
    with pytest.raises(InputError) as refused:
        small(**options)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_other_numbers_never_are_those_of_another_seed():
    assert small(arm="other_seeds").numbers > SMALL["steps"] + small(seed=2**30 - 1).numbers - 4
    assert small(seed=3).numbers == small(seed=3, arm="exact").numbers == 3

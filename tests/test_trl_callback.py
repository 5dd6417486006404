"""`ParityCallback` in tiny real trainings of TRL: what it logs, what it must see, and that it leaves no trace."""

import contextlib
import logging
import re
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl_trainings import OPTIONS, given, quiet

from lsverify.errors import InputError
from lsverify.integrations import trl as integration
from lsverify.integrations.trl import ParityCallback
from lsverify.objective_options import Objective
from lsverify.trl_options import objective_of, trl_options

PAGE = (Path(__file__).parent.parent / "docs" / "trl.md").read_text()
NAMES = {"lsverify/rel_l2", "lsverify/cosine", "lsverify/norm_ratio"}


WAYS = {
    "accumulated": {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2},
    "off-policy": {"num_iterations": 2, "gradient_checkpointing": True, "learning_rate": 1e-2},
    "dapo": {
        "loss_type": "dapo",
        "steps_per_generation": 2,
        "entropy_coef": 0.01,
        "temperature": 0.7,
    },
    "gspo": {"importance_sampling_level": "sequence", "num_iterations": 2},
}
TWO_PROMPTS = {"per_device_train_batch_size": 8}
LARGE_STEPS = {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5}


class Doubled(GRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


class Shortened(GRPOTrainer):
    """Drops the first token of every completion from the loss."""

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"].clone()
        tool_mask = torch.ones_like(mask)
        tool_mask[:, 0] = 0
        return super()._compute_loss(model, {**inputs, "tool_mask": tool_mask})


class NotANumber(GRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * torch.nan


def built(tmp_path, kind=GRPOTrainer, start=None, **options):
    start = start or given()
    with quiet():
        args = GRPOConfig(output_dir=str(tmp_path), max_steps=3, **{**OPTIONS, **options})
        return kind(
            start["model"],
            start["reward"],
            args=args,
            train_dataset=start["dataset"],
            processing_class=start["tokenizer"],
        )


def trained(trainer):
    with quiet():
        trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def checked(tmp_path, kind=GRPOTrainer, start=None, options=None, **callback):
    """The numbers that a training logs, step by step."""
    trainer = built(tmp_path, kind, start, **(options or {}))
    ParityCallback(**{"every": 1, **callback}).attach(trainer)
    return [{name: row.get(name) for name in NAMES} for row in trained(trainer)]


def agree(numbers, limit=1e-5):
    return numbers["lsverify/rel_l2"] < limit and abs(numbers["lsverify/norm_ratio"] - 1) < limit


def test_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    named = {"output_dir", "max_steps", "logging_steps"}
    options = {name: value for name, value in OPTIONS.items() if name not in named}
    space = {**given(), "options": options}
    with quiet():
        exec(code.replace("max_steps=100", "max_steps=3"), space)
    rows = [row for row in space["trainer"].state.log_history if "loss" in row]
    assert [NAMES <= row.keys() for row in rows] == [True, False, False]
    assert agree(rows[0])


@pytest.mark.parametrize("way", WAYS)
def test_trainer_agrees_with_full_autograd(tmp_path, way):
    rows = checked(tmp_path, options=WAYS[way])
    assert len(rows) == 3
    assert all(agree(row) for row in rows), rows


def test_adapters_and_a_reference_agree(tmp_path):
    start = given(lora=True)
    rows = checked(tmp_path, start=start, options={"beta": 0.1, "num_iterations": 2}, max_tokens=3)
    assert all(agree(row) for row in rows), rows


def test_experts_agree_without_their_balance(tmp_path):
    start = given("mixtral")
    start["model"].config.output_router_logits = True
    rows = checked(tmp_path, start=start, options={"router_aux_loss_coef": 0.5}, every=2)
    assert agree(rows[0])
    assert rows[1]["lsverify/rel_l2"] is None


def test_doubled_loss_shows(tmp_path):
    for row in checked(tmp_path, Doubled):
        assert row["lsverify/norm_ratio"] == pytest.approx(2, rel=1e-5)
        assert row["lsverify/rel_l2"] == pytest.approx(1, rel=1e-5)
        assert row["lsverify/cosine"] == pytest.approx(1, rel=1e-5)


def test_dropped_token_shows(tmp_path):
    assert all(row["lsverify/rel_l2"] > 0.1 for row in checked(tmp_path, Shortened))


def test_positions_counted_from_padding_show(tmp_path):
    """TRL passes no positions: in a model that learns them, a prompt padded on the left has those of other tokens."""
    start = given("gpt2")
    rows = checked(tmp_path, start=start, options=TWO_PROMPTS, rows=8)
    assert any(row["lsverify/rel_l2"] > 0.1 for row in rows), rows


def test_undefined_numbers_are_infinite_and_a_breach(tmp_path, caplog):
    trainer = built(tmp_path, NotANumber)
    ParityCallback(every=1, limit=1e-2, stop=True).attach(trainer)
    (row,) = trained(trainer)
    assert row["lsverify/rel_l2"] == torch.inf
    assert trainer.state.global_step == 1
    assert "above the limit 0.01" in caplog.text


@pytest.mark.parametrize(("stop", "steps"), [(False, 3), (True, 1)])
def test_breach_warns_and_ends_the_training_if_asked(tmp_path, caplog, stop, steps):
    trainer = built(tmp_path, Doubled)
    ParityCallback(every=2, limit=0.5, stop=stop).attach(trainer)
    assert len(trained(trainer)) == steps
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "above" in r.message]
    assert len(warned) == (1 if stop else 2)
    assert "step 0: the trainer's gradient is 1 in relative L2" in warned[0].message


def ends(tmp_path, attached, **options):
    trainer = built(tmp_path, **options)
    if attached:
        ParityCallback(every=1, rows=1).attach(trainer)
    rows = trained(trainer)
    noise = {"step_time"} | NAMES
    logs = [{name: value for name, value in row.items() if name not in noise} for row in rows]
    return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(one, other):
    return one[0] == other[0] and all(torch.equal(p, other[1][name]) for name, p in one[1].items())


def test_training_is_the_same_to_the_bit(tmp_path):
    assert same(
        ends(tmp_path, False, **LARGE_STEPS),
        ends(tmp_path, True, **LARGE_STEPS),
    )


def test_the_bit_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(integration, "_set_aside", lambda _: contextlib.nullcontext())
    assert not same(
        ends(tmp_path, False, **LARGE_STEPS),
        ends(tmp_path, True, **LARGE_STEPS),
    )


def test_data_that_cannot_be_replayed_end_no_training(tmp_path, caplog):
    class Masked(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "completion_mask": torch.zeros_like(batch["completion_mask"])}

    rows = checked(tmp_path, Masked)
    assert [row["lsverify/rel_l2"] for row in rows] == [None] * 3
    assert "not checked: no row of the batch has a token that counts" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is 0; give 1 or more"),
        ({"rows": -1}, "rows is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"limit": 0.0}, "limit is 0.0; give a relative L2 above 0"),
        ({"stop": True}, "stop=True has nothing to stop at"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(InputError, match=re.escape(words)):
        ParityCallback(**options)


def test_callback_without_its_trainer_is_refused(tmp_path):
    trainer = built(tmp_path)
    trainer.add_callback(ParityCallback())
    with pytest.raises(InputError, match=r"call ParityCallback\(\.\.\)\.attach\(trainer\)"):
        trained(trainer)


def test_trainers_that_cannot_be_replayed_are_refused(tmp_path, monkeypatch):
    callback, trainer = ParityCallback(max_tokens=3), built(tmp_path)
    with pytest.raises(InputError, match="attaches to a GRPOTrainer, not to a str"):
        callback.attach("trainer")
    trainer.model.config.attention_dropout = 0.1
    with pytest.raises(InputError, match=r"attention_dropout=0\.1 makes every pass another one"):
        callback.attach(trainer)
    trainer.model.config.attention_dropout = 0.0
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(InputError, match="there are 2 processes"):
        callback.attach(trainer)
    monkeypatch.undo()
    trainer.args.use_vllm = True
    with pytest.raises(InputError, match=r"sampler_correction sequence_\w+ is of whole responses"):
        callback.attach(trainer)


SAID = [
    {},
    {"advantage": "batch_std", "dual_clip": 1.5},
    {"aggregation": "constant", "constant_length": 1, "ratio": "sequence"},
    {"clip": "cispo", "epsilon_low": 1.0, "epsilon_high": 4.0, "aggregation": "global_tokens"},
    {"clip": "vespo", "aggregation": "global_tokens", "vespo_k_pos": 1.5},
    {"clip": "sapo", "mask_truncated": True, "off_policy_threshold": 0.1},
    {"aggregation": "local_tokens", "entropy_bonus": 0.1, "beta": 0.1, "kl_weighted": True},
    {"sampler_correction": "token_mask", "sampler_clip_min": 0.5},
]


@pytest.mark.parametrize("fields", SAID)
def test_config_says_the_objective_that_it_came_from(fields):
    said = trl_options(Objective.parse(fields))
    assert trl_options(objective_of(config(**said))) == said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_entropy_quantile": 0.8}, "top_entropy_quantile=0.8 has no counterpart"),
        ({"entropy_coef": 0.1, "loss_type": "grpo"}, "entropy bonus with sequence_mean"),
        ({"delta": 1.1, "epsilon": 0.2}, "dual_clip below"),
        ({"loss_type": "cispo"}, "epsilon_high"),
    ],
)
def test_config_without_a_counterpart_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        objective_of(config(**options))


def config(**options):
    with quiet():
        return GRPOConfig(
            output_dir="unused", report_to="none", use_cpu=True, bf16=False, **options
        )

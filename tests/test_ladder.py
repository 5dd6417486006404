from __future__ import annotations

import warnings

import candidates
import pytest
import torch
from judged import judged, rung, statuses

from lsverify import ladder, referee
from lsverify.cases import QUICK
from lsverify.errors import InputError
from lsverify.evidence import RUNGS, CaseConfig
from lsverify.ladder import judge
from lsverify.references import Stopped

ALL_PROVEN = dict.fromkeys(RUNGS, "proven")


@pytest.mark.parametrize(
    ("policy", "reference"),
    [("exact", "full"), ("detach", "stopped at B"), ("window:3", "stopped at B-3")],
)
def test_each_policy_reaches_the_reference_it_claims(policy, reference):
    receipt = judged(policy=policy)
    assert receipt.reached
    assert statuses(receipt) == ALL_PROVEN
    assert receipt.reference == reference
    assert receipt.gradient.rel_l2 <= 1e-12
    assert (receipt.bias.rel_l2 <= 1e-12) == (policy == "exact")
    assert receipt.paper_gate == (policy == "exact")


def test_the_bias_is_told_for_every_parameter_and_never_a_failure():
    receipt = judged(policy="detach")
    assert 0.1 < receipt.bias.rel_l2 < 1
    assert max(p.bias_rel_l2 for p in receipt.parameters) > 0.1
    assert {p.status for p in receipt.parameters} == {"match"}
    assert receipt.bias.worst_parameter in {p.name for p in receipt.parameters}


def test_the_same_path_is_refused_where_full_autograd_is_asked_for():
    receipt = judged(policy="detach", reference="full")
    assert not receipt.reached
    assert receipt.reference == "full"
    assert receipt.policy == "detach"
    assert receipt.gradient == receipt.bias
    assert statuses(receipt) == ALL_PROVEN | {"gradient": "failed", "optimizer_delta": "failed"}
    assert receipt.gradient.rel_l2 > 0.1


@pytest.mark.parametrize("name", ["full", "silent", "past_the_head", "own_update"])
def test_an_honest_candidate_reaches_full(name):
    receipt = judged(candidate=name)
    assert statuses(receipt) == ALL_PROVEN
    assert (receipt.reference, receipt.policy) == ("full", None)
    assert receipt.candidate == f"candidates:{name}"


def test_a_candidate_is_held_to_the_policy_it_declares():
    receipt = judged(candidate="detached")
    assert statuses(receipt) == ALL_PROVEN
    assert (receipt.reference, receipt.policy) == ("stopped at B", "detach")


def test_a_policy_that_the_user_names_is_the_claim_instead():
    receipt = judged(candidate="detached", policy="exact", require="gradient")
    assert rung(receipt, "gradient").status == "failed"
    assert (receipt.reference, receipt.policy) == ("full", "exact")


def test_a_candidate_may_train_an_objective_of_its_own():
    receipt = judged(candidate="own_objective")
    assert statuses(receipt) == ALL_PROVEN
    assert receipt.objective == "dapo"
    assert receipt.config.objective == "grpo"
    told = [text for text in receipt.warnings if "that the path declares, not on grpo" in text]
    assert len(told) == 1
    assert '"temperature":0.8' in told[0]


def test_rungs_that_are_not_asked_for_are_not_run():
    receipt = judged(policy="exact", require="execution")
    assert receipt.reached
    assert [rung(receipt, name).status for name in RUNGS] == ["proven"] * 2 + ["not_run"] * 3
    assert "--require execution" in rung(receipt, "gradient").detail
    only = judged(policy="exact", require="objective")
    assert [found.status for found in only.rungs] == ["proven"] + ["not_run"] * 4


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("raises", "RuntimeError: no such kernel"),
        ("exits", "SystemExit: 0"),
        ("skips", "Skipped: not today"),
        ("returns_a_number", "TypeError: it returned a float: return a StepResult or None"),
    ],
)
def test_whatever_a_candidate_raises_is_evidence_against_it(name, told):
    receipt = judged(candidate=name)
    assert not receipt.reached
    assert statuses(receipt) == {
        "objective": "proven",
        "execution": "error",
        "forward": "not_run",
        "gradient": "not_run",
        "optimizer_delta": "not_run",
    }
    assert told in rung(receipt, "execution").detail
    assert receipt.gradient is None
    assert receipt.bias is None
    assert receipt.paper_gate is None


def test_an_interrupt_is_the_users_and_ends_the_run():
    with pytest.raises(KeyboardInterrupt):
        judged(candidate="interrupts")


def test_an_interrupt_in_the_second_step_is_one_too():
    def step(model, problem, objective):
        raise KeyboardInterrupt

    honest = ladder.recorded(
        candidates.full, *_step_of(CaseConfig(arch="llama", policy="exact", **QUICK))
    )
    judge_of = ladder._referee(CaseConfig(arch="llama", chunk=1, **QUICK))
    claim = referee.claim_of(CaseConfig(arch="llama"), honest.result, judge_of.setting.objective)
    with pytest.raises(KeyboardInterrupt):
        ladder._optimizer(lambda: step, claim, judge_of, honest)


def _step_of(config):
    setting = ladder._referee(config.model_copy(update=ladder._NOT_OF_THE_SETTING)).setting
    return setting.model, setting.problem, setting.objective


def test_a_path_that_fails_only_when_run_again_is_refused():
    candidates.CALLS.clear()
    receipt = judged(candidate="raises_when_run_again")
    assert rung(receipt, "execution").status == "proven"
    gradient = rung(receipt, "gradient")
    assert gradient.status == "error"
    assert "RuntimeError when it ran again: used up" in gradient.detail
    assert receipt.accounting["live_bytes_peak"] is None
    assert not receipt.reached


def test_a_path_that_exits_after_an_update_is_refused():
    candidates.FIRST.clear()
    receipt = judged(candidate="raises_after_an_update")
    assert rung(receipt, "gradient").status == "proven"
    last = rung(receipt, "optimizer_delta")
    assert last.status == "error"
    assert "SystemExit" in last.detail
    assert not receipt.reached


def test_a_fault_of_ours_in_the_second_step_is_not_blamed_on_the_path(monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(ladder, "optimizer_delta", broken)
    with pytest.raises(ZeroDivisionError):
        judge(CaseConfig(arch="llama", policy="exact", **QUICK))


def test_noise_of_one_in_a_million_is_nondeterministic():
    gradient = rung(judged(candidate="noisy", require="gradient"), "gradient")
    assert gradient.status == "nondeterministic"
    assert 5e-7 < gradient.measure < 5e-6
    assert "two runs of the path disagree" in gradient.detail
    assert "to the reference" in gradient.detail


def test_a_path_that_is_never_entered_is_vacuous():
    receipt = judged(candidate="never_enters")
    assert rung(receipt, "execution").status == "vacuous"
    assert rung(receipt, "forward").status == "not_run"
    assert rung(receipt, "gradient").status == "failed"
    assert "no gradient (None) where the reference has one" in rung(receipt, "gradient").detail
    assert receipt.gradient.worst_rel_l2 == 1
    assert not receipt.reached


def test_a_path_that_returns_no_gradient_is_refused():
    receipt = judged(candidate="never_trains", require="gradient")
    assert "0 tokens under autograd for 7 response tokens" in rung(receipt, "execution").detail
    assert rung(receipt, "gradient").status == "failed"


def test_one_dropped_gradient_is_named():
    receipt = judged(candidate="drops_a_gradient")
    assert "model.norm.weight: no gradient" in rung(receipt, "gradient").detail
    assert receipt.gradient.worst_parameter == "model.norm.weight"
    lost = [p for p in receipt.parameters if p.name == "model.norm.weight"]
    assert [p.status for p in lost] == ["no_gradient"]
    assert lost[0].rel_l2 is None


@pytest.mark.parametrize("policy", ["exact", "detach"])
def test_groups_of_one_have_a_gradient_of_exactly_zero(policy):
    receipt = judged(policy=policy, group_size=1)
    assert receipt.reached
    assert rung(receipt, "gradient").status == "proven_zero"
    assert rung(receipt, "gradient").measure == 0
    assert receipt.gradient.worst_parameter is None
    assert any("no prompt is shared by two responses" in text for text in receipt.warnings)


def test_a_reference_whose_terms_do_not_sum_to_full_convicts_itself(monkeypatch):
    real = referee.stopped_reference

    def half(*arguments, **options):
        stopped = real(*arguments, **options)
        state = {n: g if g is None else g / 2 for n, g in stopped.state.items()}
        return Stopped(response=stopped.response, state=state)

    monkeypatch.setattr(referee, "stopped_reference", half)
    monkeypatch.setattr(ladder, "_referee", ladder._referee.__wrapped__)
    receipt = judge(CaseConfig(arch="llama", policy="detach", require="gradient", **QUICK))
    gradient = rung(receipt, "gradient")
    assert gradient.status == "reference_inconsistent"
    assert gradient.measure > 0.01
    assert "do not sum to full autograd" in gradient.detail
    assert not receipt.reached


def test_a_wrong_objective_fails_the_lowest_rung(monkeypatch):
    monkeypatch.setattr(referee, "check_objective", lambda *a: (float("nan"), 1e-12, "planted"))
    monkeypatch.setattr(ladder, "_referee", ladder._referee.__wrapped__)
    receipt = judge(CaseConfig(arch="llama", policy="exact", require="objective", **QUICK))
    assert rung(receipt, "objective").status == "failed"
    assert not receipt.reached


def test_a_clamped_window_is_said():
    receipt = judged(policy="window:9", require="gradient")
    assert receipt.reached
    assert "policy window:9 reaches beyond a prompt of 7 tokens" in " ".join(receipt.warnings)


def test_what_a_path_warns_of_is_in_the_receipt():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        receipt = judged(candidate="warns", require="execution")
    assert receipt.warnings == ("UserWarning: a shape [/bold] of [2, 3] is odd",)


def test_a_precision_too_coarse_to_show_anything_is_called_out():
    receipt = judged(policy="exact", dtype="bfloat16", require="gradient")
    assert any(text.startswith("bfloat16 IS TOO COARSE") for text in receipt.warnings)
    assert all(p.limit <= 0.1 for p in receipt.parameters if p.limit is not None)


def test_float32_limits_are_measured_and_hold():
    receipt = judged(policy="exact", dtype="float32")
    assert receipt.reached
    gradient = rung(receipt, "gradient")
    assert 1e-9 < gradient.measure <= gradient.limit < 1e-2
    assert not any("COARSE" in text for text in receipt.warnings)


def test_adapters_are_judged_alone():
    receipt = judged(policy="exact", lora=True, require="gradient")
    assert receipt.reached
    names = [p.name for p in receipt.parameters]
    assert any("lora_A" in name for name in names)
    assert any("modules_to_save" in name for name in names)
    assert not any("base_layer" in name for name in names)


def test_accounting_is_measured_beside_what_shapes_ask_for():
    exact, detach = judged(policy="exact").accounting, judged(policy="detach").accounting
    # Prompts of 12 and 7 (B = 11 and 6); responses of 3, 1 and 3, each with one live prompt token.
    assert detach["tokens_forwarded"] == 11 + 6 + 3 + 1 + 3
    assert exact["tokens_forwarded"] == exact["tokens_ideal"] == 2 * (11 + 6) + 7
    assert exact["tokens_under_autograd"] == 11 + 6 + 7
    assert exact["tokens_full"] == (12 + 2) + 12 + (7 + 2)
    assert 0 < detach["live_bytes_peak"] < exact["live_bytes_peak"]
    assert min(exact["seconds"], exact["seconds_full"], exact["threads"]) > 0


def test_cases_that_differ_only_in_what_is_judged_share_a_problem():
    assert judged(policy="exact").problem == judged(candidate="full").problem
    assert judged(policy="exact").problem != judged(policy="exact", group_size=1).problem


def test_judging_leaves_the_process_as_it_was():
    before = torch.get_num_threads(), torch.get_rng_state()
    judge(CaseConfig(arch="llama", policy="detach", require="gradient", **QUICK))
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"arch": "lama"}, "architecture 'lama' is not known"),
        ({"objective": "ppo"}, "objective 'ppo' is not known"),
        ({"dtype": "float16"}, "dtype 'float16' is not known"),
        ({"policy": "windows:3"}, "policy 'windows:3' is not known"),
        ({"candidate": "nowhere:step"}, "no module 'nowhere'"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(fields, told):
    with pytest.raises(InputError, match=told):
        judge(CaseConfig(**{"arch": "llama", **QUICK, **fields}))

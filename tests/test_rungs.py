"""The rungs of the ladder: each is tripped by a path that breaks its equality and by nothing less."""

from __future__ import annotations

import functools
from dataclasses import replace

import candidates
import pytest
import torch
from judged import judged, rung

from lsverify import full_autograd, ladder, longstraw
from lsverify.cases import QUICK
from lsverify.evidence import CaseConfig
from lsverify.observe import recorded, timed
from lsverify.referee import Referee, claim_of
from lsverify.rungs.execution import _decided, execution
from lsverify.rungs.forward import Flips, _clip_sides, forward
from lsverify.rungs.gradient import gradient
from lsverify.setting import make_setting
from lsverify.trace import Choice, Place, Site


@pytest.fixture(scope="module")
def judge():
    judge = ladder._referee(CaseConfig(arch="llama", chunk=1, **QUICK))
    with judge.setting.computing():
        yield judge


@pytest.fixture(scope="module")
def chooser():
    """A referee on an architecture with discrete decisions, and a run of `exact` there."""
    judge = Referee(make_setting(CaseConfig(arch="glm_moe_dsa", **QUICK)))
    with judge.setting.computing():
        path = functools.partial(longstraw, chunk=8)
        yield judge, path, record(judge, path)


def record(judge, path, **options):
    setting = judge.setting
    return recorded(path, setting.model, setting.problem, setting.objective, **options)


def looking(judge, path):
    """A rerun that keeps values after a failure; decisions may not be forced in it."""

    def rerun(*, keep_values):
        return record(judge, path, keep_values=keep_values)

    return rerun


def claim(judge, run, **config):
    return claim_of(CaseConfig(arch="llama", **config), run.result, judge.setting.objective)


def executed(judge, path, **config):
    run = record(judge, path)
    given = CaseConfig(arch="llama", **{**QUICK, **config})
    return execution(given, claim(judge, run, **config), judge.setting.problem, run)


def test_our_own_schedule_is_held_pass_by_pass(judge):
    config = {"policy": "exact", "chunk": 5}
    assert executed(judge, functools.partial(longstraw, chunk=5), **config).status == "proven"
    other = executed(judge, functools.partial(longstraw, chunk=4), **config)
    assert other.status == "failed"
    assert "they part at pass 0: (4, False) instead of (5, False)" in other.detail


def test_a_pass_more_than_scheduled_is_seen(judge):
    def twice(model, problem, objective):
        longstraw(model, problem, objective, policy="detach", chunk=8)
        for parameter in model.parameters():
            parameter.grad = None
        return longstraw(model, problem, objective, policy="detach", chunk=8)

    found = executed(judge, twice, policy="detach", chunk=8)
    assert found.status == "failed"
    assert "12 forward passes where the policy asks for 6" in found.detail


def test_passes_after_the_schedule_and_missing_ones_are_seen(judge):
    def one_more(model, problem, objective):
        result = longstraw(model, problem, objective, policy="detach", chunk=8)
        with torch.no_grad():
            model(input_ids=problem.tokens(0)[None])
        return result

    found = executed(judge, one_more, policy="detach", chunk=8)
    assert "they part at pass 6: (15, False) instead of None (tokens, autograd)" in found.detail
    found = executed(
        judge, functools.partial(longstraw, policy="detach", chunk=8), policy="exact", chunk=8
    )
    assert "instead of (" in found.detail


def test_a_shared_step_taken_again_and_again_is_not_shared(judge):
    def five_times(model, problem, objective):
        for _ in range(5):
            for parameter in model.parameters():
                parameter.grad = None
            result = longstraw(model, problem, objective, policy="detach", chunk=8)
        return result

    found = executed(judge, five_times, candidate="m:n")
    assert found.status == "failed"
    assert "tokens forwarded where sharing the prompt needs at most" in found.detail


def test_sparse_gradients_are_gradients():
    assert judged(candidate="sparse").reached


def test_a_dense_path_that_claims_to_share_is_refused():
    found = rung(judged(candidate="dense_that_claims_to_share", require="execution"), "execution")
    assert found.status == "failed"
    assert "the shared path was not entered" in found.detail


def test_side_effects_are_refused_by_name():
    found = rung(judged(candidate="update_not_declared", require="execution"), "execution")
    assert found.status == "failed"
    assert "parameter model.embed_tokens.weight changed" in found.detail
    assert found.measure >= 1
    assert found.limit == 0


def test_an_update_that_is_declared_may_move_parameters_and_nothing_else(judge):
    assert rung(judged(candidate="own_update"), "execution").status == "proven"

    def also_reseeds(model, problem, objective):
        torch.manual_seed(3)
        return candidates.own_update(model, problem, objective)

    state = torch.get_rng_state()
    found = executed(judge, also_reseeds, candidate="m:n")
    torch.set_rng_state(state)
    assert found.status == "failed"
    assert "random state of torch was advanced or reseeded" in found.detail
    assert "parameter" not in found.detail


@pytest.mark.parametrize(("margin", "status"), [(1e-3, "failed"), (1e-17, "proven")])
def test_decisions_that_change_between_passes_by_more_than_rounding_are_refused(
    chooser, margin, status
):
    judge, _, run = chooser
    first, choice = next(iter(run.trace.choices.items()))
    run.trace.unstable.append((*first, replace(choice, margin=margin, scale=1.0)))
    try:
        given = CaseConfig(arch="glm_moe_dsa", policy="exact", **QUICK)
        found = execution(given, claim(judge, run, policy="exact"), judge.setting.problem, run)
    finally:
        run.trace.unstable.clear()
    assert found.status == status
    told = "1 decisions changed between passes over the same token, first in " + first[0].module
    assert (told in found.detail) == (status == "failed")


def test_log_probs_seen_at_the_head_come_first():
    assert "seen at the head" in rung(judged(candidate="full"), "forward").detail
    assert "reported by the path" in rung(judged(candidate="past_the_head"), "forward").detail


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("wrong_log_probs", "failed", "the log-probs it reports are not the ones it computed"),
        ("wrong_loss", "failed", "loss is "),
        ("other_temperature", "failed", "loss is "),
        ("past_the_head_and_silent", "not_run", "return them in StepResult.log_probs"),
        ("past_the_head_one_short", "failed", "for 2 responses, the problem has 3"),
        ("past_the_head_misshapen", "failed", r"response 0 have shape (2,), expected (3,)"),
    ],
)
def test_wrong_values_are_refused_and_named(name, status, told):
    receipt = judged(candidate=name, require="forward")
    found = rung(receipt, "forward")
    assert found.status == status
    assert told in found.detail
    assert not receipt.reached
    assert found.measure is None or found.measure > found.limit


def test_the_first_wrong_token_is_told_with_both_values(judge):
    def shifted(model, problem, objective):
        with model.model.embed_tokens.register_forward_hook(lambda m, i, out: out * (1 + 1e-7)):
            return full_autograd(model, problem, objective)

    run = record(judge, shifted)
    found = forward(claim(judge, run), run, judge, looking(judge, shifted))
    assert found.status == "failed"
    assert "values part first in layers.0, at position 0" in found.detail
    assert "token " in found.detail
    assert " instead of " in found.detail
    assert found.measure > 1e-12


def test_values_that_are_not_finite_are_refused(judge):
    def poisoned(model, problem, objective):
        result = candidates.past_the_head(model, problem, objective)
        rows = tuple(row * float("nan") for row in result.log_probs)
        return replace(result, log_probs=rows)

    run = record(judge, poisoned)
    found = forward(claim(judge, run), run, judge, looking(judge, poisoned))
    assert found.status == "failed"
    assert not found.holds


def test_a_clip_side_that_differs_is_told(judge):
    run = record(judge, full_autograd)
    held, rows = claim(judge, run), run.trace.log_probs
    assert list(_clip_sides(held, rows, judge)) == []
    told = [line for by in (-5, 5) for line in _clip_sides(held, [row + by for row in rows], judge)]
    assert any(line.startswith("clip side differs at response 0 token ") for line in told)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_clip_side_in_a_coarser_precision_may_differ_by_rounding_and_by_no_more(dtype):
    judge = Referee(make_setting(CaseConfig(arch="llama", dtype=dtype, chunk=1, **QUICK)))
    with judge.setting.computing():
        run = record(judge, full_autograd)
        held, rows = claim(judge, run), run.trace.log_probs
        assert list(_clip_sides(held, rows, judge)) == []
        moved = [[row + by for row in rows] for by in (-5, 5)]
        assert any(line for rows in moved for line in _clip_sides(held, rows, judge))


def test_a_decided_change_counts_unless_it_reads_a_token_whose_choice_was_undecided():
    site, clear, close = Site("layers.1", 0), Choice((0,), 1.0, 1.0), Choice((0,), 0.0, 1.0)

    def told(*changes):
        return list(_decided([(site, place, choice) for place, choice in changes], 1e-16))

    early, late, other = Place("a", -1, 3), Place("a", 1, 9), Place("b", -1, 9)
    assert told((late, clear)) == [(site, late)]
    assert told((early, close), (late, clear)) == []
    assert told((late, close), (early, clear)) == [(site, early)]
    assert told((early, close), (other, clear)) == [(site, other)]
    assert told((Place("a", 2, 3), close), (late, clear)) == [(site, late)]


def test_equal_decisions_are_no_flips(chooser):
    judge, _, run = chooser
    flips = Flips(run, judge)
    assert (flips.real, flips.undecided) == ([], [])
    assert flips.compared > 100


def flipped(judge, run, margin):
    """`run` with one decision changed, and the reference's margin there set to `margin`. Undo by calling the second."""
    key = next(k for k, c in judge.full_run.trace.choices.items() if "mlp" in k[0].module)
    own, theirs = run.trace.choices[key], judge.full_run.trace.choices[key]
    others = tuple(i for i in range(8) if i not in own.chosen)[: len(own.chosen)]
    run.trace.choices[key] = replace(own, chosen=others)
    if margin is not None:
        judge.full_run.trace.choices[key] = replace(theirs, margin=margin)

    def undo():
        run.trace.choices[key], judge.full_run.trace.choices[key] = own, theirs

    return key, undo


def test_a_flip_beyond_its_margin_is_a_failure(chooser):
    judge, path, run = chooser
    key, undo = flipped(judge, run, None)
    try:
        found = forward(claim(judge, run), run, judge, looking(judge, path))
    finally:
        undo()
    assert found.status == "failed"
    assert (found.measure, found.limit) == (1, 0)
    assert f"{key[0].module} chose" in found.detail
    assert f"at position {key[1].position}" in found.detail


def test_a_flip_inside_its_margin_is_undecidable_where_values_agree_under_forced_decisions(chooser):
    judge, path, run = chooser
    _, undo = flipped(judge, run, 1e-16)
    asked = []

    def rerun(forced):
        asked.append(forced)
        return record(judge, path, forced=forced)

    try:
        found = forward(claim(judge, run), run, judge, rerun)
    finally:
        undo()
    assert found.status == "undecidable"
    assert found.holds
    assert "inside their margin" in found.detail
    assert "equal under the reference's decisions" in found.detail
    assert len(asked[0]) > 100


def test_a_flip_inside_its_margin_does_not_excuse_other_values(chooser):
    judge, _, run = chooser
    _, undo = flipped(judge, run, 1e-16)

    def other(model, problem, objective):
        with model.model.embed_tokens.register_forward_hook(lambda m, i, out: out * (1 + 1e-7)):
            return full_autograd(model, problem, objective)

    try:
        found = forward(
            claim(judge, run), run, judge, lambda **given: record(judge, other, **given)
        )
    finally:
        undo()
    assert found.status == "failed"


def never(**_):
    raise AssertionError("run again though no decision flipped")


def test_a_second_run_decides_whether_a_path_repeats_itself(judge):
    setting = judge.setting
    step = (setting.model, setting.problem, setting.objective)
    run, again = record(judge, full_autograd), timed(full_autograd, *step)
    held = claim(judge, run)
    same = judge.compared(held, run.gradients)
    assert gradient(held, run, (again,), judge, same, never).status == "proven"

    name = "model.norm.weight"
    other = replace(again, gradients=again.gradients | {name: again.gradients[name] * (1 + 1e-6)})
    found = gradient(held, run, (other,), judge, same, never)
    assert found.status == "nondeterministic"
    assert found.measure > found.limit
    assert "to the reference" not in found.detail

    missing = replace(again, gradients=again.gradients | {name: None})
    assert gradient(held, run, (missing,), judge, same, never).status == "nondeterministic"


def test_a_gradient_that_is_not_finite_is_a_failure_and_not_noise(judge):
    run = record(judge, full_autograd)
    name = "model.norm.weight"
    bad = replace(run, gradients=run.gradients | {name: run.gradients[name] * float("nan")})
    held = claim(judge, bad)
    found = gradient(held, bad, (bad,), judge, judge.compared(held, bad.gradients), never)
    assert found.status == "failed"
    assert f"{name}: 48 of 48 values are not finite" in found.detail


def test_a_path_that_does_not_capture_again_after_an_update_is_refused():
    candidates.STATES.clear()
    receipt = judged(candidate="keeps_its_capture")
    statuses = [found.status for found in receipt.rungs]
    assert statuses == ["proven"] * 4 + ["failed"]
    assert "after 3 sgd steps" in rung(receipt, "optimizer_delta").detail


@pytest.mark.parametrize("name", ["own_update_with_another_clip", "own_update_not_taken"])
def test_an_update_that_is_not_the_declared_one_is_refused(name):
    receipt = judged(candidate=name)
    assert [found.status for found in receipt.rungs] == ["proven"] * 4 + ["failed"]
    assert rung(receipt, "optimizer_delta").measure > 0.1


def test_an_update_that_moves_nothing_proves_nothing():
    receipt = judged(candidate="own_update_of_nothing")
    found = rung(receipt, "optimizer_delta")
    assert found.status == "vacuous"
    assert "3 sgd steps of lr 0 move no parameter" in found.detail
    assert not receipt.reached


def test_where_the_gradient_is_zero_no_movement_is_proof(judge):
    assert rung(judged(policy="exact", group_size=1), "optimizer_delta").holds


def test_both_probes_must_hold():
    found = rung(judged(policy="exact"), "optimizer_delta")
    assert found.status == "proven"
    assert 0 < found.measure <= found.limit <= 1e-6
    assert "furthest under" in found.detail


def test_a_factor_that_adam_would_hide_is_seen_under_sgd(judge):
    def half(model, problem, objective):
        result = full_autograd(model, problem, objective)
        for parameter in model.parameters():
            parameter.grad *= 0.5
        return result

    run = record(judge, half)
    held = claim(judge, run)
    found = ladder._optimizer(lambda: half, held, judge, run)
    assert found.status == "failed"
    assert "after 3 sgd steps" in found.detail

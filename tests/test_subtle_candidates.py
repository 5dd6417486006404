"""Candidates that are right on an easy problem: each needs something particular in the data, or a later run, to show."""

import copy
import functools

import pytest
import torch

from lsverify import StepResult, Update, full_autograd, prepare
from lsverify.cache import map_state, new_cache
from lsverify.evidence import CaseConfig
from lsverify.ladder import judge
from lsverify.objective import token_logp
from lsverify.prompt import continue_from

CALLS: dict[str, int] = {}


@pytest.fixture(autouse=True)
def _uncalled():
    CALLS.clear()
    STATES.clear()


def verdict(path, arch="llama", **fields):
    return judge(CaseConfig(arch=arch, candidate=f"{__name__}:{path.__name__}", **fields))


def ppo(x, advantage, objective):
    clipped = x.exp().clamp(1 - objective.epsilon_low, 1 + objective.epsilon_high)
    return -torch.minimum(x.exp() * advantage, clipped * advantage)


def own_loss(
    model,
    problem,
    objective,
    *,
    mask=None,
    old=lambda r: r.old_logp,
    rewards=None,
    temperature=None,
):
    """GRPO written out, without the objective's own `member`; what is given replaces the right thing."""
    plan, loss = prepare(objective, problem), 0.0
    for i, response in enumerate(problem.responses):
        logits = model(input_ids=problem.tokens(i)[None, :-1], use_cache=False).logits[0]
        logp = token_logp(
            logits[-len(response.tokens) :], response.tokens, temperature or objective.temperature
        )
        counted = plan.counted[i] if mask is None else mask(response)
        advantage = plan.advantages[i] if rewards is None else rewards[i]
        # What is not counted may be NaN, which a product with zero would keep.
        terms = ppo(logp[counted] - old(response)[counted], advantage, objective)
        member = terms.sum() / plan.denominators[i]
        member.backward()
        loss += member.item()
    return StepResult(loss=loss)


def written_out(model, problem, objective):
    return own_loss(model, problem, objective)


# What the data must have ---------------------------------------------------------------------------


def multiplies_by_the_mask(model, problem, objective):
    plan, loss = prepare(objective, problem), 0.0
    for i, response in enumerate(problem.responses):
        logits = model(input_ids=problem.tokens(i)[None, :-1], use_cache=False).logits[0]
        logp = token_logp(logits[-len(response.tokens) :], response.tokens, objective.temperature)
        terms = ppo(logp - response.old_logp, plan.advantages[i], objective) * plan.counted[i]
        member = terms.sum() / plan.denominators[i]
        member.backward()
        loss += member.item()
    return StepResult(loss=loss)


def ends_always_count(model, problem, objective):
    def mask(response):
        forced = response.mask.clone()
        forced[[0, -1]] = True
        return forced

    return own_loss(model, problem, objective, mask=mask)


def trusts_the_sampler(model, problem, objective):
    return own_loss(
        model,
        problem,
        objective,
        old=lambda r: r.old_logp if r.sampler_logp is None else r.sampler_logp,
    )


def counts_the_truncated(model, problem, objective):
    return own_loss(model, problem, objective, mask=lambda response: response.mask)


def ignores_the_temperature(model, problem, objective):
    return own_loss(model, problem, objective, temperature=1.0)


def shared(model, problem, objective, key):
    """`detach` with its prompts' states kept by `key`, within the step."""
    states, plan, loss = {}, prepare(objective, problem), 0.0
    for i, response in enumerate(problem.responses):
        prompt = problem.prompt(i)
        boundary = len(prompt) - 1
        if key(prompt) not in states:
            with torch.no_grad():
                states[key(prompt)] = continue_from(
                    model, prompt[:-1], new_cache(model.config), 0, keep=1
                )[1]
        cache = map_state(states[key(prompt)], lambda _, tensor: tensor)
        branch = problem.tokens(i)[boundary:-1]
        logits, _ = continue_from(model, branch, cache, boundary, keep=len(response.tokens))
        member = plan.member(i, logits)
        member.loss.backward()
        loss += member.loss.item()
    return StepResult(loss=loss, reference="detach")


def kept_by_content(model, problem, objective):
    return shared(model, problem, objective, lambda prompt: tuple(prompt.tolist()))


def kept_by_length(model, problem, objective):
    return shared(model, problem, objective, len)


def kept_by_beginning(model, problem, objective):
    return shared(model, problem, objective, lambda prompt: tuple(prompt[:16].tolist()))


STATES: dict[str, object] = {}


def kept_while_the_batch_is_the_same(model, problem, objective):
    batch = tuple(tuple(group.prompt.tolist()) for group in problem.groups)
    if STATES.get("batch") != batch:
        STATES.clear()
        STATES["batch"] = batch
        for group in problem.groups:
            with torch.no_grad():
                STATES[tuple(group.prompt.tolist())] = continue_from(
                    model, group.prompt[:-1], new_cache(model.config), 0, keep=1
                )[1]
    plan, loss = prepare(objective, problem), 0.0
    for i, response in enumerate(problem.responses):
        boundary = len(problem.prompt(i)) - 1
        cache = map_state(STATES[tuple(problem.prompt(i).tolist())], lambda _, tensor: tensor)
        branch = problem.tokens(i)[boundary:-1]
        logits, _ = continue_from(model, branch, cache, boundary, keep=len(response.tokens))
        member = plan.member(i, logits)
        member.loss.backward()
        loss += member.loss.item()
    return StepResult(loss=loss, reference="detach")


def pads_with_the_last_token(model, problem, objective):
    rows = [problem.tokens(i)[:-1] for i in range(len(problem))]
    width, plan = max(map(len, rows)), prepare(objective, problem)
    last = model.config.vocab_size - 1
    ids = torch.stack(
        [torch.nn.functional.pad(row, (width - len(row), 0), value=last) for row in rows]
    )
    mask = (ids != last).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).logits
    loss = sum(
        plan.member(i, logits[i, -len(r.tokens) :]).loss for i, r in enumerate(problem.responses)
    )
    loss.backward()
    return StepResult(loss=loss.item())


def test_the_loss_written_out_passes():
    for objective in ("grpo", "dapo", "grpo,temperature=0.7"):
        assert verdict(written_out, objective=objective).reached
    assert verdict(kept_by_content).reached


@pytest.mark.parametrize(
    "path",
    [
        multiplies_by_the_mask,
        ends_always_count,
        trusts_the_sampler,
        kept_by_length,
        kept_by_beginning,
        kept_while_the_batch_is_the_same,
        pads_with_the_last_token,
        functools.partial(counts_the_truncated, objective="dapo"),
        functools.partial(ignores_the_temperature, objective="grpo,temperature=0.7"),
    ],
    ids=lambda path: getattr(path, "func", path).__name__,
)
def test_what_the_data_must_have_is_there(path):
    fields = getattr(path, "keywords", {})
    receipt = verdict(getattr(path, "func", path), **fields)
    assert not receipt.reached


# What shows only later ------------------------------------------------------------------------------


def _nth(name):
    CALLS[name] = CALLS.get(name, 0) + 1
    return CALLS[name]


def leaves_eval_mode_the_second_time(model, problem, objective):
    result = full_autograd(model, problem, objective)
    model.train(_nth("eval") != 2)
    return result


def raises_the_third_time(model, problem, objective):
    if _nth("raises") == 3:
        raise RuntimeError("no memory left")
    return full_autograd(model, problem, objective)


def is_wrong_the_third_time(model, problem, objective):
    result = full_autograd(model, problem, objective)
    if _nth("wrong") == 3:
        model.lm_head.weight.grad.mul_(2.0)
    return result


@pytest.mark.parametrize(
    ("path", "rung", "told"),
    [
        (leaves_eval_mode_the_second_time, "execution", "in run 2: training was True and is False"),
        (
            raises_the_third_time,
            "gradient",
            "raised RuntimeError when it ran again: no memory left",
        ),
        (is_wrong_the_third_time, "gradient", "two runs of the path disagree"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_run_is_looked_at(path, rung, told):
    receipt = verdict(path)
    (refused,) = (found for found in receipt.rungs if found.name == rung)
    assert not refused.holds
    assert told in refused.detail


# Copies of the model --------------------------------------------------------------------------------


def on_a_copy(model, problem, objective):
    other = copy.deepcopy(model)
    result = full_autograd(other, problem, objective)
    for own, its in zip(model.parameters(), other.parameters(), strict=True):
        own.grad = its.grad
    return result


def on_a_copy_with_other_weights(model, problem, objective):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    result = full_autograd(other, problem, objective)
    for own, its in zip(model.parameters(), other.parameters(), strict=True):
        own.grad = its.grad
    return result


@pytest.mark.parametrize("lora", [False, True])
def test_a_copy_of_the_model_is_judged_on_its_own_weights(lora):
    assert verdict(on_a_copy, lora=lora).reached
    receipt = verdict(on_a_copy_with_other_weights, lora=lora)
    assert next(rung.name for rung in receipt.rungs if rung.status == "failed") == "forward"


# Optimizers of one's own ------------------------------------------------------------------------------

ADAMW = Update(kind="adamw", lr=0.01, eps=1e-3, weight_decay=0.1)


class StepsItself:
    """AdamW whose moments live as long as the path."""

    def __init__(self):
        self.optimizer = None

    def __call__(self, model, problem, objective):
        result = full_autograd(model, problem, objective)
        self.optimizer = self.optimizer or torch.optim.AdamW(
            model.parameters(), lr=ADAMW.lr, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay
        )
        self.optimizer.step()
        return StepResult(loss=result.loss, update=ADAMW)


def moves_frozen_weights(model, problem, objective):
    result = full_autograd(model, problem, objective)
    frozen = next(p for p in model.parameters() if not p.requires_grad)
    with torch.no_grad():
        frozen.add_(1e-3)
    return StepResult(loss=result.loss, update=Update(kind="sgd", lr=0.0))


@pytest.mark.parametrize(
    "field", [{"lr": None}, {"lr": "x"}, {"betas": (1.0, 1.0)}, {"kind": "lion"}]
)
def test_an_update_without_sense_is_an_error_of_the_path(field, monkeypatch):
    def step(model, problem, objective):
        fields = {"kind": "sgd", "lr": 0.1} | field
        return StepResult(
            loss=full_autograd(model, problem, objective).loss, update=Update(**fields)
        )

    monkeypatch.setitem(globals(), "step", step)
    receipt = verdict(step)
    assert "StepResult.update is a Update" in receipt.rungs[1].detail


def test_a_class_begins_anew_for_each_training():
    assert verdict(StepsItself).reached


def test_an_update_does_not_excuse_what_is_frozen():
    receipt = verdict(moves_frozen_weights, lora=True)
    assert "changed" in receipt.rungs[1].detail
    assert receipt.rungs[1].status == "failed"


# What cannot be read any more -------------------------------------------------------------------------


def cuts_a_weight(model, problem, objective):
    result = full_autograd(model, problem, objective)
    model.lm_head.weight.data = model.lm_head.weight.data[:3]
    return result


def speaks_on_no_device(model, problem, objective):
    result = full_autograd(model, problem, objective)
    return StepResult(loss=result.loss, log_probs=tuple(row.to("meta") for row in result.log_probs))


@pytest.mark.parametrize("path", [cuts_a_weight, speaks_on_no_device])
def test_what_cannot_be_read_any_more_is_refused_and_the_next_case_is_judged(path):
    assert not verdict(path).reached
    assert verdict(written_out).reached


def test_bfloat16_weights_are_not_asked_for_an_update_that_they_round_away():
    receipt = verdict(written_out, dtype="bfloat16")
    assert receipt.reached
    assert receipt.rungs[4].status == "not_applicable"

"""Paths to be judged: honest ones, and one for each way in which a path can be refused."""

import sys
import warnings
from dataclasses import replace

import pytest
import torch

from lsverify import StepResult, Update, full_autograd, longstraw, preset
from lsverify.objective import prepare, token_logp
from lsverify.optimizers import TorchStep
from lsverify.paths import full_logits, shared_prompts
from lsverify.prompt import capture, continue_from

SGD = Update(kind="sgd", lr=0.05, max_grad_norm=0.5)
not_callable = 3


def full(model, problem, objective):
    return full_autograd(model, problem, objective)


def silent(model, problem, objective):
    """Honest, and says nothing of itself."""
    full_autograd(model, problem, objective)


def detached(model, problem, objective):
    return longstraw(model, problem, objective, policy="detach", chunk=5)


def dense_that_claims_to_share(model, problem, objective):
    """The gradient of `exact`, by forwarding every prompt once per response, and once more to score."""
    with torch.no_grad():
        full_autograd_tokens = [full_logits(model, problem, i) for i in range(len(problem))]
    assert full_autograd_tokens
    return replace(full_autograd(model, problem, objective), reference="exact")


def noisy(model, problem, objective):
    result = full_autograd(model, problem, objective)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=GENERATOR, dtype=parameter.dtype)
        parameter.grad += 1e-6 * parameter.grad.norm() * noise / noise.norm()
    return result


GENERATOR = torch.Generator().manual_seed(0)


def never_enters(model, problem, objective):
    return StepResult(loss=0.0)


def never_trains(model, problem, objective):
    with torch.no_grad():
        rows = [full_logits(model, problem, i) for i in range(len(problem))]
    pairs = zip(rows, problem.responses, strict=True)
    return StepResult(loss=0.0, log_probs=tuple(token_logp(r, y.tokens, 1.0) for r, y in pairs))


def sparse(model, problem, objective):
    result = full_autograd(model, problem, objective)
    weight = model.model.embed_tokens.weight
    weight.grad = weight.grad.to_sparse()
    return result


def drops_a_gradient(model, problem, objective):
    result = full_autograd(model, problem, objective)
    model.model.norm.weight.grad = None
    return result


def raises(model, problem, objective):
    raise RuntimeError("no such kernel")


def exits(model, problem, objective):
    raise SystemExit(0)


def skips(model, problem, objective):
    pytest.skip("not today")


def interrupts(model, problem, objective):
    raise KeyboardInterrupt


CALLS = []


def raises_when_run_again(model, problem, objective):
    CALLS.append(1)
    if len(CALLS) > 1:
        raise RuntimeError("used up")
    return full_autograd(model, problem, objective)


def raises_after_an_update(model, problem, objective):
    first = model.model.norm.weight.detach().clone()
    if not torch.equal(FIRST.setdefault("norm", first), first):
        raise SystemExit(0)
    return full_autograd(model, problem, objective)


FIRST = {}


def returns_a_number(model, problem, objective):
    return full_autograd(model, problem, objective).loss


def wrong_loss(model, problem, objective):
    result = full_autograd(model, problem, objective)
    return replace(result, loss=result.loss + 1e-6)


def wrong_log_probs(model, problem, objective):
    result = full_autograd(model, problem, objective)
    first, *others = result.log_probs
    return replace(result, log_probs=(first + 1e-6, *others))


def _past_the_head(model, problem, objective):
    """The honest step with logits that no hook on the model sees."""
    plan, rows, loss = prepare(objective, problem), [], 0.0
    for i, response in enumerate(problem.responses):
        hidden = model.model(input_ids=problem.tokens(i)[None, :-1], use_cache=False)[0]
        member = plan.member(i, model.lm_head(hidden)[0, -len(response.tokens) :])
        member.loss.backward()
        rows.append(member.logp.detach())
        loss += member.loss.item()
    return loss, tuple(rows)


def past_the_head(model, problem, objective):
    loss, rows = _past_the_head(model, problem, objective)
    return StepResult(loss=loss, log_probs=rows)


def past_the_head_and_silent(model, problem, objective):
    _past_the_head(model, problem, objective)


def past_the_head_one_short(model, problem, objective):
    loss, rows = _past_the_head(model, problem, objective)
    return StepResult(loss=loss, log_probs=rows[1:])


def past_the_head_misshapen(model, problem, objective):
    loss, rows = _past_the_head(model, problem, objective)
    return StepResult(loss=loss, log_probs=(rows[0][:-1], *rows[1:]))


def other_temperature(model, problem, objective):
    return full_autograd(model, problem, objective.model_copy(update={"temperature": 1.25}))


def own_objective(model, problem, objective):
    used = preset("dapo", temperature=0.8)
    return replace(full_autograd(model, problem, used), objective=used)


def own_update(model, problem, objective):
    return _updated(model, problem, objective, SGD)


def own_update_with_another_clip(model, problem, objective):
    return _updated(model, problem, objective, replace(SGD, max_grad_norm=0.4))


def own_update_not_taken(model, problem, objective):
    return replace(full_autograd(model, problem, objective), update=SGD)


def own_update_of_nothing(model, problem, objective):
    return replace(full_autograd(model, problem, objective), update=replace(SGD, lr=0.0))


def update_not_declared(model, problem, objective):
    return replace(_updated(model, problem, objective, SGD), update=None)


def _updated(model, problem, objective, update):
    """Full autograd and one optimizer step, said to be `SGD`; the gradients stay where they were."""
    result = full_autograd(model, problem, objective)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    TorchStep(model, update).step()
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    return replace(result, update=SGD)


STATES = {}


def keeps_its_capture(model, problem, objective):
    """`detach` that captures a prompt once and for all: stale after an update."""
    plan, loss = prepare(objective, problem), 0.0
    for prompt, members in shared_prompts(problem):
        boundary, key = len(prompt) - 1, tuple(prompt.tolist())
        if key not in STATES:
            STATES[key] = capture(model, prompt, boundary=boundary, chunk=5, keep_from=boundary)
        for i in members:
            branch, keep = problem.tokens(i)[boundary:-1], len(problem.responses[i].tokens)
            state = STATES[key].branch({})
            logits, _ = continue_from(model, branch, state, boundary, keep=keep)
            member = plan.member(i, logits)
            member.loss.backward()
            loss += member.loss.item()
    return StepResult(loss=loss, reference="detach")


def chatty(model, problem, objective):
    sys.stdout.write("what I print is not part of the receipt\n")
    return full_autograd(model, problem, objective)


def warns(model, problem, objective):
    warnings.warn("a shape [/bold] of [2, 3] is odd", stacklevel=1)
    return full_autograd(model, problem, objective)


def wants_a_reference(model, problem, objective):
    bare = problem.replace_responses([{"ref_logp": None} for _ in problem.responses])
    return full_autograd(model, bare, preset("grpo", beta=0.1))

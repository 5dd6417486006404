"""Faults of the load-balancing loss: over which tokens it counts and sums, and where its gradient ends."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lsverify.auxiliary import Balance, Routed, Tally, routers_of, token_weights
from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import one_token_live
from lsverify.objective import Objective, prepare
from lsverify.paths import StepResult, full_autograd, full_logits
from lsverify.problems import Problem
from lsverify.scoring import frozen_balance

EXPERTS = ("mixtral", "qwen3_moe")
ASKED = {"objective": "grpo,aux_coef=0.01"}


def step(
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    with_part: Callable[[int, Tensor, Routed], Tensor],
) -> StepResult:
    """One pass per response; `with_part(i, loss, routed)` adds the balancing loss of its tokens to that of the rest."""
    plan, routers = prepare(objective, problem), routers_of(model)
    total, log_probs = 0.0, []
    for i in range(len(problem)):
        routed = Routed()
        with routers.watched(routed.keep):
            member = plan.member(i, full_logits(model, problem, i))
        loss = with_part(i, member.loss, routed)
        loss.backward()
        total += loss.detach().item()
        log_probs.append(member.logp)
    return StepResult(loss=total, log_probs=tuple(log_probs), reference="full")


def honest(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """What the faults below are made of, with nothing wrong."""
    balance = frozen_balance(model, problem, objective)
    return step(
        model,
        problem,
        objective,
        lambda i, loss, own: balance.added_to(loss, own, balance.whole(i)),
    )


def mean_over_responses(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Each response balances its own tokens and the losses are averaged, where all tokens are one batch."""
    routers, weights = routers_of(model), token_weights(problem, objective.aux_prompt)

    def with_part(i: int, loss: Tensor, routed: Routed) -> Tensor:
        tally = Tally(routers=routers)
        for logits in routed.layers():
            tally.add(logits, weights[i])
        part = Balance(tally, objective, problem).part(routed, weights[i])
        return loss + part / len(problem)

    return step(model, problem, objective, with_part)


def replayed_tokens_only(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The loss is that of the tokens in the branches; the prompt's, which were captured, are forgotten."""
    tally, weights = Tally(routers=routers_of(model)), []
    for i, own in enumerate(token_weights(problem, objective.aux_prompt)):
        own[: one_token_live(len(problem.prompt(i)))] = 0
        weights.append(own)
        with tally.adding(own):
            full_logits(model, problem, i)
    balance = Balance(tally, objective, problem)
    return step(
        model, problem, objective, lambda i, loss, own: balance.added_to(loss, own, weights[i])
    )


def prompt_counted_once(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A prompt that is run once counts once, where an ordinary batch has it in every row."""
    asked = objective.model_copy(update={"aux_prompt": "once"})
    return full_autograd(model, problem, asked)


def prompts_part_not_swept(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The sweep carries what the branches sent and not the prompt's own part of the loss: a constant."""
    balance = frozen_balance(model, problem, objective)

    def with_part(i: int, loss: Tensor, routed: Routed) -> Tensor:
        branch = balance.whole(i).clone()
        branch[: one_token_live(len(problem.prompt(i)))] = 0
        return balance.added_to(loss, routed, balance.whole(i), differentiated=branch)

    return step(model, problem, objective, with_part)


FAULTS = (
    *(
        Fault(
            path=path,
            report="",
            rung="forward",
            points_at=r"loss is \S+ instead of",
            architectures=EXPERTS,
            options=ASKED,
        )
        for path in (mean_over_responses, replayed_tokens_only, prompt_counted_once)
    ),
    Fault(
        path=prompts_part_not_swept,
        report="",
        rung="gradient",
        points_at=r"relative L2 \S+, cosine 0\.9999.*\n.*counted: \d+ match, \d+ mismatch",
        architectures=EXPERTS,
        options=ASKED,
    ),
)

"""Two honest paths as a user might write them: `lsverify gate --candidate my_path:step` and `my_path:share`."""

import torch

from lsverify import StepResult, prepare
from lsverify.cache import map_state, new_cache


def step(model, problem, objective):
    """Ordinary GRPO: every response together with its prompt."""
    plan, loss = prepare(objective, problem), 0.0
    for i, response in enumerate(problem.responses):
        logits = model(input_ids=problem.tokens(i)[None, :-1], use_cache=False).logits[0]
        member = plan.member(i, logits[-len(response.tokens) :])
        member.loss.backward()
        loss += member.loss.item()
    return StepResult(loss=loss, reference="full")


def share(model, problem, objective):
    """LongStraw's `detach`: every prompt once and without a graph, then its responses from copies of its state."""
    plan, loss, states = prepare(objective, problem), 0.0, []
    for group in problem.groups:
        state = new_cache(model.config)
        with torch.no_grad():
            model(input_ids=group.prompt[None, :-1], cache=state, use_cache=True)
        states.append(state)
    for i, response in enumerate(problem.responses):
        boundary = len(problem.prompt(i)) - 1
        branch = problem.tokens(i)[boundary:-1]
        logits = model(
            input_ids=branch[None],
            position_ids=torch.arange(boundary, boundary + len(branch))[None],
            cache=map_state(states[problem.group_of[i]], lambda slot, tensor: tensor),
            use_cache=True,
        ).logits[0]
        member = plan.member(i, logits[-len(response.tokens) :])
        member.loss.backward()
        loss += member.loss.item()
    return StepResult(loss=loss, reference="detach")

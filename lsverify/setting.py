"""From a case's config to the model, the problems and the objective that it stands for; all from its seed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lsverify.auxiliary import routers_of
from lsverify.cases import group_sizes, is_warm
from lsverify.errors import PrecisionRefused
from lsverify.evidence import CaseConfig
from lsverify.models import build, derive
from lsverify.objective import Objective
from lsverify.objective_options import read_objective
from lsverify.paths import score
from lsverify.precision import computing, weight_dtype
from lsverify.pretrained import SMOLLM2, tokenizer
from lsverify.problem_types import Response
from lsverify.problems import Problem, ProblemSpec, draw, off_policy
from lsverify.span_masks import require_seen
from lsverify.spans import drawn_spans


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One case made concrete.

    `problem` is the step that is compared; `second` a later one, which shares a prompt with the first but not its
    responses, so that a state kept from before the update is met again. It has what confuses: another prompt of the same
    length and beginning that two groups answer, a group of equal rewards, truncated responses, ragged masks, a sampler's
    log-probs, and NaN wherever nobody is to read.
    """

    config: CaseConfig
    model: nn.Module
    objective: Objective
    problem: Problem
    second: Problem

    @cached_property
    def oracle(self) -> nn.Module:
        """The same weights in float64: the model itself at oracle precision, else a copy of it."""
        if self.config.dtype == "float64":
            return self.model
        oracle = copy.deepcopy(self.model).to(weight_dtype("float64"))
        derive(oracle)
        return oracle

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, the model computes in the case's precision and the oracle in float64."""
        oracle = self.oracle
        with computing(self.model, self.config.dtype):
            if oracle is self.model:
                yield
            else:
                with computing(oracle, "float64"):
                    yield


def make_setting(config: CaseConfig) -> Setting:
    """Build everything that a case needs. Raises `InputError` for what cannot be built."""
    objective = read_objective(config.objective)
    model = build(
        config.arch,
        seed=config.seed,
        dtype=config.dtype,
        lora=config.lora,
        quantised=config.quantised,
        tied=config.tied,
    )
    if objective.aux_coef:
        routers_of(model)  # a type that has no such loss is refused before anything runs
    model.train(config.training)
    with computing(model, config.dtype):
        _require_running(model, config)
        if config.arch == SMOLLM2:
            drawn = _text_problems(config, model)
        elif is_warm(config.arch):
            drawn = _task_problems(config, model)
        else:
            drawn = _drawn_problems(config, model.config.get_text_config().vocab_size)
        for problem in drawn if config.spans != "none" else ():
            for group in problem.groups:
                require_seen(model, group.prompt, group.spans)
        first, second = (
            # Only how far the data are off-policy rests on these scores, so the cheaper ones do.
            off_policy(
                problem,
                score(model, problem, temperature=objective.temperature),
                objective,
                config.seed + step,
            )
            for step, problem in enumerate(drawn)
        )
    return Setting(
        config=config, model=model, objective=objective, problem=first, second=_unread(second)
    )


def _require_running(model: nn.Module, config: CaseConfig) -> None:
    """Raises `PrecisionRefused` where the library's own code does not run in the precision: some mix dtypes in one product."""
    if not config.dtype.startswith("bfloat16"):
        return
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, config.prompt_length, dtype=torch.long), use_cache=False)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise PrecisionRefused(
            f"{config.arch} does not run in {config.dtype}: its forward pass in transformers raises {said!r}: "
            "use --dtype float64 or float32"
        ) from None


def _drawn_problems(config: CaseConfig, vocab_size: int) -> tuple[Problem, Problem]:
    """Two groups of different size and prompt length, so that a fault at a group's edge has an edge to show at."""
    length = config.prompt_length
    spec = ProblemSpec(
        prompt_lengths=(length, max(length - 5, 1)),
        group_sizes=group_sizes(config),
        response_lengths=config.response_lengths,
        seed=config.seed,
        holes=True,
        spans=config.spans,
    )
    first = draw(spec, vocab_size)
    longer, shorter = first.groups
    alike = replace(longer, prompt=_almost(longer.prompt, vocab_size))
    change = {
        "seed": config.seed + 1_000_003,
        "prompt_lengths": (length, length, length, len(shorter.prompt)),
        "group_sizes": (*group_sizes(config), 2, 2),
        "truncated": True,
    }
    other = draw(spec.model_copy(update=change), vocab_size)
    groups = [
        replace(like, responses=tuple(map(_ragged, group.responses)))
        for group, like in zip(other.groups, (longer, alike, alike, shorter), strict=True)
    ]
    level = tuple(replace(response, reward=1.0) for response in groups[-1].responses)
    groups[-1] = replace(groups[-1], responses=level)
    return first, replace(other, groups=tuple(groups))


def _ragged(response: Response) -> Response:
    """The response with a sampler's log-probs, and where it is long a mask that begins and ends with what does not count."""
    mask = response.mask.clone()
    if len(mask) >= 5:
        mask[[0, 2, -1]] = False
    return replace(response, mask=mask, sampler_logp=response.old_logp + 0.25)


def _almost(prompt: Tensor, vocab_size: int) -> Tensor:
    """A prompt as long as this one that begins alike and ends in the vocabulary's last tokens, else its first."""
    other = prompt.clone()
    ends = torch.tensor([0, vocab_size - 1])[-len(prompt) :]
    other[-len(ends) :] = ends
    if torch.equal(other, prompt):
        other[-1] = 0
    return other


def _unread(problem: Problem) -> Problem:
    """The problem with NaN where the mask says that nobody reads."""

    def poisoned(values: Tensor, mask: Tensor) -> Tensor:
        return values.masked_fill(~mask, torch.nan)

    groups = [
        replace(
            group,
            responses=tuple(
                replace(
                    one,
                    old_logp=poisoned(one.old_logp, one.mask),
                    ref_logp=None if one.ref_logp is None else poisoned(one.ref_logp, one.mask),
                )
                for one in group.responses
            ),
        )
        for group in problem.groups
    ]
    return replace(problem, groups=tuple(groups))


def _text_problems(config: CaseConfig, model: nn.Module) -> tuple[Problem, Problem]:
    """Real text with responses sampled from the model itself; the second step has the first one's prompt."""
    from lsverify.text import text_problem

    words = tokenizer(config.arch)
    first, second = (
        text_problem(
            model,
            words,
            prompt_length=config.prompt_length,
            group_size=config.group_size,
            response_lengths=config.response_lengths,
            seed=config.seed + step,
        )
        for step in range(2)
    )
    prompt = first.groups[0].prompt
    spans = drawn_spans(config.spans, len(prompt), config.seed)
    one, other = (replace(p.groups[0], prompt=prompt, spans=spans) for p in (first, second))
    return (
        replace(first, groups=(one, *first.groups[1:])),
        replace(second, groups=(other, *second.groups[1:])),
    )


def _task_problems(config: CaseConfig, model: nn.Module) -> tuple[Problem, Problem]:
    """Key-value recall of the kind that the policy was warmed with, answered by itself; two prompts in both steps."""
    from lsverify.task_problems import task_problem
    from lsverify.warm_starts import recipe_of

    recipe = recipe_of(config.arch)
    length = config.prompt_length
    tasks = [
        recipe.task(prompt_length, config.seed * 1_000_003 + number)
        for number, prompt_length in enumerate((length, max(length - 5, recipe.shortest)))
    ]
    first, second = (
        task_problem(
            model,
            tasks,
            group_sizes=group_sizes(config),
            response_lengths=config.response_lengths,
            seed=config.seed + step * 1_000_003,
        )
        for step in range(2)
    )
    return _spanned(first, config), _spanned(second, config)


def _spanned(problem: Problem, config: CaseConfig) -> Problem:
    groups = [
        replace(group, spans=drawn_spans(config.spans, len(group.prompt), config.seed + number))
        for number, group in enumerate(problem.groups)
    ]
    return replace(problem, groups=tuple(groups))

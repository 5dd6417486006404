"""A Problem is one step's data: tokens, lengths, masks, rewards, old and reference log-probs, seed.

The data types live in `problem_types`, are made from a trainer's rows in `rollouts` and `padding`,
and are stored by `problem_files`. Here problems are drawn from a seed: `draw` makes the contents,
`off_policy` the log-probs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from torch import Generator, Tensor

from lsverify.errors import InputError
from lsverify.problem_types import Group, Problem, Response
from lsverify.ratio_zones import zone_order
from lsverify.spans import SpanKind, drawn_spans

if TYPE_CHECKING:
    from lsverify.objective import Objective

__all__ = ["Group", "Problem", "ProblemSpec", "Response", "draw", "off_policy"]

# Outside what the objective counts: far beyond every usual clip, yet finite.
UNCOUNTED_LOG_RATIO = 2.0


class ProblemSpec(BaseModel):
    """What a drawn problem looks like. Frozen; raises InputError with one line for a value it
    cannot use.

    The defaults are uneven groups and uneven responses, one of them of a single token, with members
    of both advantage signs in numbers that let a clip per token and a clip per sequence act on both
    sides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt_lengths: tuple[PositiveInt, ...] = Field((21, 13), min_length=1, strict=False)
    """Tokens, per group."""
    group_sizes: tuple[PositiveInt, ...] = Field((4, 3), min_length=1, strict=False)
    """Responses, per group; one number serves all groups."""
    response_lengths: tuple[PositiveInt, ...] = Field((6, 1, 9, 4, 7), min_length=1, strict=False)
    """Tokens, per member, flat over groups; started again from the front when
    there are more members; what is left over when there are fewer is not used."""
    seed: int = Field(0, ge=0, lt=2**63)
    holes: bool = False
    """Drill mask holes into some responses of three tokens or more (surely into the first of
    them)."""
    rewards: Literal["distinct", "ties", "equal"] = "distinct"
    """Within a group: all different; 0 or 1 with both present from two members on; all the same."""
    truncated: bool = False
    """Mark the longest response of each group of two or more, and of the problem, as cut at the
    limit."""
    reference: bool = True
    """Whether there are reference log-probs."""
    spans: SpanKind = "none"
    """Whether prompt tokens see each other both ways: those of images, or all but the last."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            got = f"{name} is {first['input']!r}: " if name else ""
            raise InputError(
                f"problem: {got}{first['msg'].removeprefix('Value error, ')}"
            ) from None

    @model_validator(mode="after")
    def _sizes_fit(self) -> ProblemSpec:
        if len(self.group_sizes) not in (1, len(self.prompt_lengths)):
            raise ValueError(
                f"{len(self.group_sizes)} group_sizes for {len(self.prompt_lengths)} prompt_lengths; "
                "give one size or one per prompt"
            )
        return self

    def sizes(self) -> tuple[int, ...]:
        """Responses per group, one entry for each group."""
        if len(self.group_sizes) == 1:
            return self.group_sizes * len(self.prompt_lengths)
        return self.group_sizes


SETTLING_DRAWS = 8


def draw(spec: ProblemSpec, vocab_size: int) -> Problem:
    """A problem of random tokens below vocab_size, with all log-probs zero until `off_policy` sets
    them.

    No two prompts are equal, nor two responses of one group as long as the vocabulary allows.
    Raises InputError when it has too few tokens for different prompts. The same spec and vocabulary
    give the same problem.
    """
    if vocab_size < 2:
        raise InputError(f"vocab_size is {vocab_size}; at least 2 tokens are needed")
    generator = torch.Generator().manual_seed(spec.seed)
    prompts: set[tuple[int, ...]] = set()
    groups: list[Group] = []
    first = 0
    for prompt_length, size in zip(spec.prompt_lengths, spec.sizes(), strict=True):
        prompt = _distinct_tokens(prompt_length, vocab_size, prompts, generator)
        if prompt is None:
            raise InputError(
                f"vocab_size {vocab_size} has too few tokens for {len(spec.prompt_lengths)} different prompts; "
                f"lengthen the prompts of {prompt_length} or take a larger vocabulary"
            )
        rewards = _draw_rewards(spec.rewards, size, generator)
        taken: set[tuple[int, ...]] = set()
        responses = []
        for member, reward in zip(range(first, first + size), rewards, strict=True):
            length = spec.response_lengths[member % len(spec.response_lengths)]
            tokens = _distinct_tokens(length, vocab_size, taken, generator)
            if tokens is None:
                tokens = torch.randint(vocab_size, (length,), generator=generator)
            zeros = torch.zeros(length, dtype=torch.float64)
            responses.append(
                Response(
                    tokens=tokens,
                    mask=torch.ones(length, dtype=torch.bool),
                    reward=reward,
                    old_logp=zeros,
                    ref_logp=zeros if spec.reference else None,
                )
            )
        # From a generator of its own: a problem with spans has the tokens of the one without.
        spans = drawn_spans(spec.spans, prompt_length, spec.seed * 1_000_003 + len(groups))
        groups.append(Group(prompt=prompt, responses=tuple(responses), spans=spans))
        first += size
    problem = Problem(groups=tuple(groups), seed=spec.seed)
    changes: list[dict[str, Any]] = [{} for _ in problem.responses]
    if spec.holes:
        for member, mask in _drill(problem, generator).items():
            changes[member]["mask"] = mask
    if spec.truncated:
        for member in _longest(problem):
            changes[member]["truncated"] = True
    return problem.replace_responses(changes)


def _distinct_tokens(
    length: int, vocab_size: int, taken: set[tuple[int, ...]], generator: Generator
) -> Tensor | None:
    """[length] tokens not in `taken`, which they join; None when every sequence of this length is
    taken."""
    tokens = torch.randint(vocab_size, (length,), generator=generator)
    same_length = sum(len(other) == length for other in taken)
    if same_length >= vocab_size**length:
        return None
    while (key := tuple(tokens.tolist())) in taken:
        # Count up like an odometer: ends after at most len(taken) steps, unlike drawing again.
        for position in reversed(range(length)):
            tokens[position] = (tokens[position] + 1) % vocab_size
            if tokens[position] != 0:
                break
    taken.add(key)
    return tokens


def _draw_rewards(kind: str, size: int, generator: Generator) -> list[float]:
    if kind == "equal":
        return [float(torch.rand(1, generator=generator))] * size
    order = torch.randperm(size, generator=generator)
    if kind == "ties":
        return (order % 2).double().tolist()
    # Steps of one plus less than a half: distinct, and no member sits on the group's mean but by
    # chance.
    return (order + 0.5 * torch.rand(size, generator=generator, dtype=torch.float64)).tolist()


def _drill(problem: Problem, generator: Generator) -> dict[int, Tensor]:
    """Masks with one hole inside, first and last token kept: the first response that is long
    enough, then some."""
    masks: dict[int, Tensor] = {}
    for member, length in enumerate(problem.response_lengths):
        coin, start, stop = torch.rand(3, generator=generator).tolist()
        if length < 3 or (masks and coin < 0.5):
            continue
        begin = 1 + int(start * (length - 2))
        mask = torch.ones(length, dtype=torch.bool)
        mask[begin : begin + 1 + int(stop * (length - 1 - begin))] = False
        masks[member] = mask
    return masks


def _longest(problem: Problem) -> set[int]:
    """The longest member of each group of two or more and of the problem; never all members."""
    lengths = problem.response_lengths
    pools = [
        [member for member, its in enumerate(problem.group_of) if its == group]
        for group in range(len(problem.groups))
    ]
    pools.append(list(range(len(problem))))
    return {max(pool, key=lambda member: lengths[member]) for pool in pools if len(pool) > 1}


def off_policy(
    problem: Problem, current_logp: Sequence[Tensor], objective: Objective, seed: int
) -> Problem:
    """The problem with old (and reference) log-probs that put the current policy off-policy.

    current_logp: N tensors [R_i], the log-probs under the policy about to be trained. old_logp is
    current_logp minus a drawn log-ratio, so it may exceed zero; ref_logp, where the problem has it,
    is current_logp with noise of 0.1 to 0.3 either way. sampler_logp, given where the objective reads
    it, is old_logp with such noise.

    The log-ratio visits every zone that `objective.edges()` cuts, at least 5% of
    `ratio_zones.edge_width` away from every edge. Members whose advantage has one sign take turns:
    with a ratio per token their counted tokens, with one per response (`sequence`, `trajectory`)
    whole responses, whose tokens still differ. The first turn is inside, where the gradient lives,
    the second where the clip cuts this sign's gradient. So a positive advantage meets the high edge
    and a negative one the low edge as soon as members of that sign have two counted tokens (per
    response: as there are two such members with a counted token), not before.

    Slots that the objective does not count get a ratio of exp(2): a path that counts them is off.

    Where a KL term in the reward keeps turning a member's advantage over, that member's zones do not follow its sign.
    Raises InputError when the log-probs do not fit.
    """
    if len(current_logp) != len(problem):
        raise InputError(
            f"current_logp has {len(current_logp)} members, the problem {len(problem)}"
        )
    generator = torch.Generator().manual_seed(seed)
    current = [logp.detach().to("cpu", torch.float64) for logp in current_logp]
    problem = problem.replace_logps(old=current)
    if problem.responses[0].ref_logp is not None:
        noisy = [logp + _noise(logp.numel(), generator) for logp in current]
        problem = problem.replace_logps(ref=noisy)
    drift: list[Tensor] | None = None
    if objective.sampler_correction != "none" or objective.off_policy_threshold is not None:
        drift = [_noise(logp.numel(), generator) for logp in current]
        problem = problem.replace_logps(sampler=current)
    signs, counted = _signs_and_counted(problem, objective)
    restless: set[int] = set()
    draws = 0
    while True:
        draws += 1
        settled = [0 if i in restless else sign for i, sign in enumerate(signs)]
        log_ratios = _draw_log_ratios(objective, settled, counted, generator)
        old = [logp - drawn for logp, drawn in zip(current, log_ratios, strict=True)]
        sampler = drift and [logp + noise for logp, noise in zip(old, drift, strict=True)]
        problem = problem.replace_logps(old=old, sampler=sampler)
        # A KL term in the reward reads old_logp, so what was drawn for these signs can change them.
        used, (signs, counted) = signs, _signs_and_counted(problem, objective)
        turned = {i for i, sign in enumerate(signs) if sign != used[i]} - restless
        if not turned:
            return problem
        # One whose advantage is about zero can turn at every draw: then it takes zones without regard to sign,
        # so that each further draw settles a member and the loop ends.
        restless |= turned if draws > SETTLING_DRAWS else set()


def _signs_and_counted(
    problem: Problem, objective: Objective
) -> tuple[list[int], tuple[Tensor, ...]]:
    """Per member the sign of the advantage (-1, 0, 1) and the [R_i] bool tokens that count."""
    from lsverify.objective import prepare

    plan = prepare(objective, problem)
    return plan.advantages.sign().int().tolist(), plan.counted


def _draw_log_ratios(
    objective: Objective, signs: Sequence[int], counted: Sequence[Tensor], generator: Generator
) -> list[Tensor]:
    """Per member [R_i] float64, the zones taken in turn by the members of one sign."""
    turns = {sign: itertools.cycle(zone_order(objective.edges(), sign)) for sign in (-1, 0, 1)}
    drawn = []
    for sign, mask in zip(signs, counted, strict=True):
        log_ratio = torch.full(mask.shape, UNCOUNTED_LOG_RATIO, dtype=torch.float64)
        count = int(mask.sum())
        if objective.ratio in ("sequence", "trajectory") and count:
            whole = next(turns[sign]).draw(1, generator)
            mean = whole if objective.ratio == "sequence" else whole / count
            noise = _noise(count, generator)
            log_ratio[mask] = mean + noise - noise.mean()
        elif count:
            log_ratio[mask] = torch.cat(
                [next(turns[sign]).draw(1, generator) for _ in range(count)]
            )
        drawn.append(log_ratio)
    return drawn


def _noise(count: int, generator: Generator) -> Tensor:
    """[count] float64: sizes from 0.1 to 0.3, either sign."""
    size = 0.1 + 0.2 * torch.rand(count, generator=generator, dtype=torch.float64)
    return size * (2 * torch.randint(2, (count,), generator=generator) - 1)

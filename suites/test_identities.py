"""What must come out equal by the mathematics alone, whatever the numbers are.

    window:B = layers:all = kinds:all = roulette:1 = exact
    window:0 = tail:1 = the first step of stale:n = detach
    tail:k = window:(k-1)            tail:k + window:m = window:(m+k-1)
    response term + state term = full
    state terms of a partition of layers, or of kinds, sum to the whole
    p roulette:p with its coin up + (1 - p) with it down = exact
    siblings permuted = siblings in order
    a batch of prompts = the sum over prompts, with the batch's advantages and denominators
    one capture for equal prompts = a capture each
    all rewards equal, group baseline, no KL: exactly zero
    anything at masked slots = anything else there
    any chunk size = any other, any number of responses replayed together = one at a time
    B = 0: every policy = full
    the model's own experts and keys, forced on it = its step

Most of these need no reference, so they hold where `full` and the path could share a fault. Guards against gradients
that depend on what they must not: order, chunking, batch mates, masked data, the way a term is computed. And the
opposite guards: the prompt does matter, and so do the experts and keys that are chosen. With `test_parity`: one reference for one policy is one for all that equal it.
"""

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lsverify import policies
from lsverify.compare import Limits, compare
from lsverify.objective import prepare, preset
from lsverify.observe import recorded
from lsverify.paths import full_autograd, full_score, longstraw, shared_prompts
from lsverify.problems import ProblemSpec, off_policy
from lsverify.prompt import capture
from lsverify.references import full_reference, stopped_reference, take_gradients
from lsverify.steps import Step, hold_equal, hold_log_probs
from lsverify.watch import Watch

# One prompt of B = 19 captured tokens, beyond window and top-k of 8.
B = 19
ONE = Step(
    spec=ProblemSpec(prompt_lengths=(B + 1,), group_sizes=(2,), response_lengths=(4, 1), seed=11),
    chunk=8,
)
# Advantages and denominators that couple all prompts.
MANY = Step(
    spec=ProblemSpec(
        prompt_lengths=(14, 1, 9),
        group_sizes=(2, 1, 2),
        response_lengths=(5, 1, 3, 4),
        seed=12,
        holes=True,
    ),
    objective=preset("dapo", advantage="batch_std", beta=0.04),
    chunk=4,
)


def gradient(setting, policy="exact", problem=None, **how):
    """LongStraw's gradient; `how` it runs is chunk, 8 if nothing is said, and branches.

    On the setting's own problem it is computed once: many identities have a side in common.
    """
    how = {"policy": policy, "chunk": 8} | how
    if problem is not None:
        return computed(setting, problem, how)
    if KEPT and next(iter(KEPT))[0] != setting.config:
        KEPT.clear()
    key = setting.config, setting.problem.content_hash(), setting.objective, *sorted(how.items())
    if key not in KEPT:
        KEPT[key] = computed(setting, setting.problem, how)
    return dict(KEPT[key])


KEPT = {}


def computed(setting, problem, how):
    take_gradients(setting.model)
    longstraw(setting.model, problem, setting.objective, **how)
    return take_gradients(setting.model)


def plus(left, right):
    """The sum of two terms of a gradient, of which either may be absent."""
    return left if right is None else right if left is None else left + right


def minus(left, right):
    return left if right is None else left - right


def distance(expected, actual):
    return compare(expected, actual, limits=Limits()).rel_l2


EQUAL = [
    ("exact", f"window:{B}", "window:300", "layers:all", "kinds:all", "roulette:1"),
    ("detach", "window:0", "tail:1", "stale:3"),
    *((f"tail:{k}", f"window:{k - 1}") for k in (2, 9, B, B + 1, B + 9)),
    *(
        (f"tail:{k}+window:{m}", f"window:{m + k - 1}")
        for k, m in ((2, 1), (4, 0), (3, 9), (8, 30))
    ),
]


@pytest.mark.parametrize("specs", EQUAL, ids=" = ".join)
def test_policies_that_stop_at_the_same_token_are_equal(arch, specs):
    with ONE.running(arch) as setting:
        found = [gradient(setting, spec) for spec in specs]
    for (left, right), (expected, actual) in zip(pairwise(specs), pairwise(found), strict=True):
        assert hold_equal(expected, actual, f"{arch} {left} = {right}").status == "proven"


def test_response_term_and_state_term_sum_to_full(arch):
    with ONE.running(arch) as setting:
        step = setting.model, setting.problem, setting.objective
        full, detach, exact = (
            full_reference(*step).gradients,
            gradient(setting, "detach"),
            gradient(setting, "exact"),
        )
        state = stopped_reference(*step, lambda length: length - 1).state
    by_path = {name: minus(g, detach[name]) for name, g in exact.items()}
    for case, term in (("reference", state), ("sweep", by_path)):
        whole = {name: plus(g, term.get(name)) for name, g in detach.items()}
        assert hold_equal(full, whole, f"{arch} state term of the {case}").status == "proven"
    # Neither term alone would do, so the sum has shown something.
    assert distance(full, detach) > 1e-2


def parts(setting, by):
    """The policies that carry one layer's state each, or one kind's: together a partition of the state."""
    prompt = setting.problem.prompt(0)
    rows = capture(setting.model, prompt, boundary=B, chunk=8, keep_from=B).inventory()
    numbers = {row.layer for row in rows if row.layer is not None and row.kind != "index"}
    kinds = {row.kind for row in rows} - {"index"}
    return [f"{by}:{one}" for one in sorted(numbers if by == "layers" else kinds)]


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("by", ["layers", "kinds"])
def test_state_terms_of_a_partition_sum_to_the_whole(arch, by, chunk):
    with ONE.running(arch) as setting:
        detach, exact = gradient(setting, "detach"), gradient(setting, "exact")
        found = [gradient(setting, policy, chunk=chunk) for policy in parts(setting, by)]
    total = dict(detach)
    for one in found:
        for name, g in one.items():
            if g is not None:
                total[name] = plus(total[name], minus(g, detach[name]))
    assert hold_equal(exact, total, f"{arch} {by} at chunk {chunk}").status == "proven"


@pytest.mark.parametrize("probability", [0.25, 0.9])
def test_roulette_is_exact_in_expectation_over_its_coin(arch, probability, monkeypatch):
    with MANY.running(arch) as setting:
        exact, found = gradient(setting, "exact"), {}
        for up in (True, False):
            monkeypatch.setattr(policies, "coin_up", lambda *_, up=up: up)
            found[up] = gradient(setting, f"roulette:{probability}", setting.problem)
    expected = {
        name: g if g is None else probability * g + (1 - probability) * down
        for (name, g), down in zip(found[True].items(), found[False].values(), strict=True)
    }
    assert hold_equal(exact, expected, f"{arch} roulette:{probability}").status == "proven"
    assert distance(exact, found[True]) > 1e-3


@pytest.mark.parametrize("policy", ["exact", "detach"])
def test_order_of_siblings_is_nothing(arch, policy):
    with ONE.running(arch) as setting:
        (group,) = setting.problem.groups
        turned = replace(setting.problem, groups=(replace(group, responses=group.responses[::-1]),))
        expected, actual = gradient(setting, policy), gradient(setting, policy, problem=turned)
    assert hold_equal(expected, actual, f"{arch} {policy}").status == "proven"


def part(plan, members):
    """The plan of some members: the batch's advantages and denominators, frozen."""
    one_each = {
        name: tuple(getattr(plan, name)[i] for i in members)
        for name in ("denominators", "counted", "tokens", "old_logp", "ref_logp")
    }
    return replace(plan, advantages=plan.advantages[list(members)], **one_each)


def one_by_one(setting, problem, plan, policy):
    """The sum of LongStraw's gradients over the groups, each run alone under its part of the plan."""
    total = {}
    with pytest.MonkeyPatch.context() as patch:
        for group in range(len(problem.groups)):
            members = [i for i, its in enumerate(problem.group_of) if its == group]
            patch.setattr("lsverify.paths.prepare", lambda *_, own=members: part(plan, own))
            for name, g in gradient(setting, policy, problem=problem.select([group])).items():
                total[name] = plus(total.get(name), g)
    return total


@pytest.mark.parametrize("policy", ["exact", "detach"])
def test_batch_is_the_sum_over_prompts_under_the_frozen_plan(arch, policy):
    with MANY.running(arch) as setting:
        plan = prepare(setting.objective, setting.problem)
        whole = gradient(setting, policy)
        total = one_by_one(setting, setting.problem, plan, policy)
        alone = [
            gradient(setting, policy, problem=setting.problem.select([group]))
            for group in range(len(setting.problem.groups))
        ]
    assert hold_equal(whole, total, f"{arch} {policy}").status == "proven"
    # With plans of their own the prompts do not add up: what is frozen matters.
    free = {name: functools.reduce(plus, [each[name] for each in alone]) for name in whole}
    assert distance(whole, free) > 1e-2


@pytest.mark.parametrize("policy", ["exact", "detach"])
def test_equal_prompts_share_one_capture_and_change_nothing(arch, policy):
    with MANY.running(arch) as setting:
        first, *_, last = setting.problem.groups
        groups = (first, replace(last, prompt=first.prompt.clone()))
        shared = replace(setting.problem, groups=groups)
        current = full_score(setting.model, shared)
        shared = off_policy(shared, current, setting.objective, seed=13)
        with Watch(setting.model) as watch:
            actual = gradient(setting, policy, problem=shared)
        plan = prepare(setting.objective, shared)
        expected = one_by_one(setting, shared, plan, policy)
        full = full_reference(setting.model, shared, setting.objective).gradients
    assert hold_equal(expected, actual, f"{arch} {policy}").status == "proven"
    if policy == "exact":
        assert hold_equal(full, actual, f"{arch} {policy}").status == "proven"
    assert len(list(shared_prompts(shared))) == 1
    boundary, replayed = len(first.prompt) - 1, sum(shared.response_lengths)
    swept = boundary if policy == "exact" else 0
    assert (watch.tokens().no_grad, watch.tokens().grad) == (boundary, replayed + swept)


ZERO = {
    **dict.fromkeys(("dr_grpo", "dapo", "bnpo", "cispo", "gspo", "rloo"), ("exact",)),
    "grpo": ("exact", "detach", "window:3", "tail:3"),
}


@pytest.mark.parametrize("name", ZERO)
def test_equal_rewards_give_exactly_zero(arch, name):
    spec = ProblemSpec(
        prompt_lengths=(9, 4), group_sizes=(2, 3), response_lengths=(2, 1), seed=14, rewards="equal"
    )
    with Step(spec=spec, objective=preset(name, beta=0.0)).running(arch) as setting:
        full = full_reference(setting.model, setting.problem, setting.objective).gradients
        assert compare(full, gradient(setting), limits=Limits()).status == "proven_zero"
        for policy in ZERO[name]:
            held = [g for g in gradient(setting, policy).values() if g is not None]
            assert held, policy
            assert not any(g.any() for g in held), policy


def test_masked_slots_are_not_read(arch):
    with MANY.running(arch) as setting:
        wild = setting.problem.replace_logps(
            old=[spoilt(each.old_logp, each.mask) for each in setting.problem.responses],
            ref=[spoilt(each.ref_logp, each.mask) for each in setting.problem.responses],
        )
        assert wild.content_hash() != setting.problem.content_hash()
        expected, actual = gradient(setting), gradient(setting, problem=wild)
    for name, g in expected.items():
        assert (g is None and actual[name] is None) or torch.equal(g, actual[name]), name


def spoilt(logp, mask):
    return torch.where(mask, logp, float("nan"))


def test_masked_tokens_matter_only_to_later_ones(arch):
    with ONE.running(arch) as setting:
        (group,) = setting.problem.groups
        longest = max(range(len(group)), key=lambda i: len(group.responses[i]))

        def problem(masked, changed):
            response = group.responses[longest]
            mask, tokens = response.mask.clone(), response.tokens.clone()
            mask[masked] = False
            tokens[changed] = (tokens[changed] + 1) % 97
            responses = list(group.responses)
            responses[longest] = replace(response, mask=mask, tokens=tokens)
            return replace(setting.problem, groups=(replace(group, responses=tuple(responses)),))

        hole, end = slice(1, 2), slice(2, None)
        found = {
            name: [gradient(setting, problem=problem(part, changed)) for changed in ([], part)]
            for name, part in (("hole", hole), ("end", end))
        }
    assert hold_equal(*found["end"], f"{arch} masked end").status == "proven"
    # A token in a hole is not counted, but it is read by those after it.
    assert distance(*found["hole"]) > 1e-3


CHUNKS = {
    "exact": (1, 3, 8, B - 1, B),
    "window:7": (1, 8),
    "tail:3+window:6": (5, 8),
    "detach": (1, 8),
}


@pytest.mark.parametrize("policy", CHUNKS)
def test_chunk_size_changes_nothing(arch, policy):
    with ONE.running(arch) as setting:
        whole = gradient(setting, policy, chunk=512)
        for chunk in CHUNKS[policy]:
            found = gradient(setting, policy, chunk=chunk)
            assert hold_equal(whole, found, f"{arch} {policy} chunk {chunk}").status == "proven"


@pytest.mark.parametrize("policy", CHUNKS)
def test_responses_replayed_together_change_nothing(arch, policy):
    three = replace(ONE, spec=ONE.spec.model_copy(update={"group_sizes": (3,)}))
    with three.running(arch) as setting:
        singly = gradient(setting, policy)
        for branches in (2, 300):
            found = gradient(setting, policy, branches=branches)
            label = f"{arch} {policy} {branches} branches"
            assert hold_equal(singly, found, label).status == "proven"


def test_policies_coincide_on_one_token_prompts(arch):
    spec = ProblemSpec(prompt_lengths=(1, 1), group_sizes=(3, 2), response_lengths=(3, 1), seed=15)
    with Step(spec=spec).running(arch) as setting:
        full = full_reference(setting.model, setting.problem, setting.objective).gradients
        for policy in ("exact", "detach", "window:0", "window:5", "tail:1", "tail:6+window:2"):
            same = hold_equal(full, gradient(setting, policy), f"{arch} {policy}")
            assert same.status == "proven"


@pytest.mark.parametrize("policy", ["exact", "detach"])
def test_every_prompt_token_matters(arch, policy):
    # Four layers of an eight-token window see 28 tokens back; gates that forget leave 1e-4 of the first token.
    least = {0: 1e-6}
    with ONE.running(arch) as setting:
        (group,) = setting.problem.groups
        before = longstraw(setting.model, setting.problem, setting.objective, policy=policy)
        expected = take_gradients(setting.model)
        for place in (0, B // 2, B - 1, B):
            prompt = group.prompt.clone()
            prompt[place] = (prompt[place] + 1) % 97
            other = replace(setting.problem, groups=(replace(group, prompt=prompt),))
            after = longstraw(setting.model, other, setting.objective, policy=policy)
            moved = distance(expected, take_gradients(setting.model))
            assert moved > least.get(place, 1e-3), place
            with pytest.raises(AssertionError, match="log-probs differ"):
                hold_log_probs(before.log_probs, after.log_probs, arch)


def test_choices_are_read_and_forced_ones_are_taken(arch):
    """Under its own choices a step is itself; under those of another token it is another step."""
    with ONE.running(arch) as setting:
        step = setting.model, setting.problem, setting.objective
        run = recorded(full_autograd, *step)
        own = run.trace.choices
        assert bool(own) == ONE.referee(arch).chooses
        same = recorded(full_autograd, *step, forced=own)
        hold_equal(run.gradients, same.gradients, arch)
        if own:
            others = of_other_tokens(own)
            assert others
            wrong = recorded(full_autograd, *step, forced=own | others)
            assert distance(run.gradients, wrong.gradients) > 1e-3


def of_other_tokens(choices):
    """For each place the choice of an earlier token that its own row has, where there is another one as large."""
    found = {}
    for (site, place), choice in choices.items():
        for (other_site, other), its in choices.items():
            earlier = other.position < place.position and other.member in (-1, place.member)
            alike = len(its.chosen) == len(choice.chosen) and its.chosen != choice.chosen
            if other_site == site and earlier and alike:
                found[site, place] = its
    return found

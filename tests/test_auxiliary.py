from __future__ import annotations

import functools

import pytest
import torch
from small_steps import distance, gradients, problem_for

from lsverify.auxiliary import LIBRARY, Balance, Routed, Routers, Tally, library_loss, routers_of
from lsverify.balance_oracle import check_balance
from lsverify.cases import QUICK
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig
from lsverify.faults import FAULTS
from lsverify.ladder import judge
from lsverify.models import build
from lsverify.objective import monolithic, preset
from lsverify.paths import full_autograd, longstraw
from lsverify.policies import parse_policy
from lsverify.precision import computing, promoting
from lsverify.problems import Problem, ProblemSpec, draw
from lsverify.references import central_difference, full_reference, take_gradients
from lsverify.setting import make_setting
from lsverify.steps import Step, hold
from lsverify.watch import Watch

EXACT = 1e-12
COEF = 0.05
COUNTED = ("per_response", "once")
# The second and third group answer one prompt, which is met twice.
RAGGED = {"prompt_lengths": (9, 6, 6), "group_sizes": (3, 2, 1), "response_lengths": (3, 1, 4)}


def balanced(aux_prompt="per_response", **options):
    return preset("grpo", aux_coef=COEF, aux_prompt=aux_prompt, **options)


def ragged(model, objective, **spec):
    problem = problem_for(model, objective, **(RAGGED | spec))
    first, second, third = problem.groups
    same = type(third)(prompt=second.prompt, responses=third.responses)
    return Problem(groups=(first, second, same), seed=problem.seed)


def routers(experts=6, top_k=2):
    return Routers(modules=(), experts=experts, top_k=top_k)


# The formula against the library's ---------------------------------------------------------------


@pytest.mark.parametrize("aux_prompt", COUNTED)
@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (4, 1), (3, 3)])
def test_parts_sum_to_the_librarys_loss(oracle, aux_prompt, experts, top_k):
    problem = draw(ProblemSpec(**RAGGED), 97)
    found = check_balance(
        library_loss(oracle("mixtral")), routers(experts, top_k), balanced(aux_prompt), problem, 0
    )
    assert found[0] <= EXACT
    assert "balancing loss against the library's" in found[2]


def test_a_wrong_formula_is_not_the_librarys(oracle):
    library = library_loss(oracle("mixtral"))
    problem = draw(ProblemSpec(**RAGGED), 97)

    def per_layer(gate_logits, experts, top_k, mask):
        """Switch's own: a loss for each layer."""
        parts = [library((layer,), experts, top_k, mask) for layer in gate_logits]
        return torch.stack(parts).mean()

    assert check_balance(per_layer, routers(), balanced(), problem, 0)[0] > 1e-4


def library_step(model, problem, objective, padding):
    """Loss and gradient of one padded pass, with the library's own function over its mask."""
    batch = problem.padded(padding)
    mask = batch.attention_mask.double()
    prompts = [problem.prompt_hash(group) for group in problem.group_of]
    for i, start in enumerate(batch.first_column.tolist()):
        if objective.aux_prompt == "once":
            mask[i, start : start + len(problem.prompt(i))] /= prompts.count(prompts[i])
        mask[i, start + len(problem.tokens(i)) - 1] = 0
    take_gradients(model)
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
        output_router_logits=True,
    )
    with promoting():
        balance = library_loss(model)(
            output.router_logits, model.num_experts, model.num_experts_per_tok, mask
        )
    logits = [
        row[start - 1 : start - 1 + length]
        for row, start, length in zip(
            output.logits, batch.response_start.tolist(), problem.response_lengths, strict=True
        )
    ]
    loss = monolithic(objective, problem, logits) + objective.aux_coef * balance
    loss.backward()
    return loss.item(), take_gradients(model)


# Both paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("aux_prompt", COUNTED)
@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
def test_full_autograd_is_the_library_on_a_padded_batch(oracle, arch, aux_prompt):
    model, objective = oracle(arch), balanced(aux_prompt)
    problem = ragged(model, objective)
    full = full_reference(model, problem, objective)
    for padding in ("left", "right"):
        loss, expected = library_step(model, problem, objective, padding)
        assert full.loss == pytest.approx(loss, rel=EXACT)
        assert distance(full.gradients, expected) <= EXACT
        batched = functools.partial(full_autograd, batched=True, padding=padding)
        assert batched(model, problem, objective).loss == pytest.approx(loss, rel=EXACT)
        assert distance(gradients(batched, model, problem, objective), expected) <= EXACT
    without = full_reference(model, problem, preset("grpo"))
    assert distance(full.gradients, without.gradients) > 1e-3


def test_the_loss_is_the_one_that_the_library_shows():
    """As shipped, in float32: its own aux_loss, of a batch without padding."""
    model = build("mixtral", seed=0, dtype="float32")
    prompt = torch.arange(12)[None]
    with torch.no_grad():
        shown = model(input_ids=prompt, use_cache=False, output_router_logits=True).aux_loss.item()
    tally = Tally(routers=routers_of(model))
    with tally.adding(1.0):
        model(input_ids=prompt, use_cache=False)
    loss = 8 * float((tally.choices * tally.probabilities).sum()) / tally.size**2
    assert loss == pytest.approx(shown, rel=1e-6)
    assert tally.size == 12 * model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("aux_prompt", "chunk", "branches"),
    [
        ("per_response", 1, 3),
        ("per_response", 5, 1),
        ("per_response", 64, 1),
        ("once", 5, 3),
    ],
)
def test_longstraw_has_the_gradient_and_the_loss_of_full_autograd(
    oracle, aux_prompt, chunk, branches
):
    model, objective = oracle("mixtral"), balanced(aux_prompt)
    problem = ragged(model, objective)
    full = full_reference(model, problem, objective)
    result = longstraw(model, problem, objective, chunk=chunk, branches=branches)
    assert distance(take_gradients(model), full.gradients) <= EXACT
    assert result.loss == pytest.approx(full.loss, rel=EXACT)


def step(policy, chunk=5, branches=1, lengths=(9, 6), aux_prompt="per_response", seed=0):
    spec = ProblemSpec(
        prompt_lengths=lengths, group_sizes=(3, 2), response_lengths=(3, 1, 4, 2, 1), seed=seed
    )
    return Step(
        spec=spec,
        objective=balanced(aux_prompt),
        policy=policy,
        chunk=chunk,
        branches=branches,
    )


@pytest.mark.parametrize(
    ("policy", "aux_prompt"),
    [
        ("detach", "per_response"),
        ("detach", "once"),
        ("window:3", "per_response"),
        ("tail:3+window:2", "once"),
        ("layers:1,2", "per_response"),
        ("window:3+kinds:attention", "once"),
        ("roulette:0.6", "per_response"),
        ("roulette:0.6+window:4", "once"),
    ],
)
def test_a_policy_has_the_gradient_of_its_reference(policy, aux_prompt):
    """The reference's two terms sum to full autograd's gradient, the balancing loss included."""
    hold("mixtral", step(policy, branches=3, aux_prompt=aux_prompt))


def test_a_coin_decides_over_the_prompts_part_too():
    """One prompt's coin is up, where its part counts 1/p times, the other's down, where it is a constant."""
    tossed = step("roulette:0.5", seed=0)
    policy, problem = parse_policy(tossed.policy), tossed.referee("mixtral").setting.problem
    coins = {policy.scale(problem.prompt_hash(group), 0) for group in range(2)}
    assert coins == {0.0, 2.0}
    hold("mixtral", tossed)


def test_a_prompt_of_one_token_has_nothing_to_sweep():
    hold("mixtral", step("exact", lengths=(1, 2)))


@pytest.mark.parametrize(
    ("arch", "policy"),
    [
        ("qwen3_moe", "exact"),
        ("qwen3_moe", "detach"),
        ("qwen3_next", "exact"),
        ("gpt_oss", "window:3"),
        ("olmoe", "exact"),
    ],
)
def test_other_families(arch, policy):
    hold(arch, step(policy, chunk=4))


def test_equal_rewards_leave_the_balancing_loss(oracle):
    model, objective = oracle("mixtral"), balanced()
    problem = problem_for(model, objective)
    level = problem.replace_responses([{"reward": 1.0}] * len(problem))
    full = full_reference(model, level, objective)
    assert any(g is not None and bool(g.any()) for g in full.gradients.values())
    longstraw(model, level, objective, chunk=4)
    assert distance(take_gradients(model), full.gradients) <= EXACT


def test_adapters_over_experts():
    model = build("mixtral", seed=0, lora=True)
    with computing(model, "float64"):
        objective = balanced()
        problem = problem_for(model, objective)
        full = full_reference(model, problem, objective)
        longstraw(model, problem, objective, chunk=4)
        assert distance(take_gradients(model), full.gradients) <= EXACT
        without = full_reference(model, problem, preset("grpo"))
        assert distance(full.gradients, without.gradients) > 1e-4


def test_central_differences_agree(oracle):
    model, objective = oracle("mixtral"), balanced()
    problem = problem_for(model, objective)
    full = full_reference(model, problem, objective)
    size = sum(float(g.square().sum()) for g in full.gradients.values() if g is not None) ** 0.5
    direction = {name: g / size for name, g in full.gradients.items() if g is not None}
    slope, error = central_difference(model, problem, objective, direction)
    assert slope == pytest.approx(size, abs=max(1e-8, 10 * error))


def test_scoring_is_one_round_more_and_nothing_without_the_loss(oracle):
    model = oracle("mixtral")
    problem = problem_for(model)  # a prompt of 9, responses of 3 and 1
    counts = {}
    for coef in (0.0, COEF):
        with Watch(model) as watch:
            longstraw(model, problem, preset("grpo", aux_coef=coef), chunk=4)
        counts[coef] = watch.tokens()
    take_gradients(model)
    assert counts[COEF].no_grad - counts[0.0].no_grad == 8 + 3 + 1
    assert counts[COEF].grad == counts[0.0].grad


def test_without_the_loss_no_router_is_looked_for(oracle, monkeypatch):
    def never(*_):
        raise AssertionError("looked for routers")

    for module in ("auxiliary", "scoring"):
        monkeypatch.setattr(f"lsverify.{module}.routers_of", never)
    model = oracle("mixtral")
    problem = problem_for(model)
    longstraw(model, problem, preset("grpo"))
    full_autograd(model, problem, preset("grpo"), batched=True)
    take_gradients(model)


def test_an_empty_balance_adds_nothing():
    balance, loss = Balance(), torch.ones(())
    assert not balance
    with balance.watched() as routed:
        assert balance.added_to(loss, routed, balance.whole(0)) is loss
    assert balance.branches([0, 1], 3).numel() == 0
    assert (balance.captured, balance.of_prompt([0])) == (0.0, 0.0)


def test_hooks_are_removed(oracle):
    model = oracle("mixtral")
    found = routers_of(model)
    before = [dict(module._forward_hooks) for module, _ in found.modules]
    with pytest.raises(RuntimeError), found.watched(lambda *_: None):
        raise RuntimeError
    assert [dict(module._forward_hooks) for module, _ in found.modules] == before


def test_a_router_that_misses_tokens_is_told():
    tally = Tally(routers=routers())
    with pytest.raises(InputError, match="a router was called for 3 tokens in a pass over 4"):
        tally.add(torch.randn(3, 6), torch.ones(4))


def test_routed_passes_are_joined_router_by_router():
    routed = Routed()
    for router, rows in ((0, 2), (1, 2), (0, 3), (1, 3)):
        routed.keep(router, torch.full((rows, 4), float(router)))
    assert [(len(layer), float(layer.mean())) for layer in routed.layers()] == [(5, 0.0), (5, 1.0)]


# Refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("llama", "'llama' has no router whose logits the library records"),
        ("glm_moe_dsa", "'glm_moe_dsa' balances its experts by a correction bias"),
        ("deepseek_v3", "'deepseek_v3' balances its experts by a correction bias"),
    ],
)
def test_a_type_without_the_loss_is_refused_by_name(arch, reason):
    with pytest.raises(InputError, match=reason) as refused:
        make_setting(CaseConfig(arch=arch, objective="grpo,aux_coef=0.01", **QUICK))
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith("use aux_coef=0")


@pytest.mark.parametrize("path", [full_autograd, longstraw])
def test_both_paths_refuse(oracle, path):
    model = oracle("llama")
    with pytest.raises(InputError, match="model type 'llama' has no router"):
        path(model, problem_for(model), balanced())


def test_a_type_whose_class_has_another_loss_is_refused(oracle, monkeypatch):
    model = oracle("mixtral")
    module = __import__("sys").modules[type(model).__module__]
    monkeypatch.setattr(module, LIBRARY, lambda gate_logits, num_experts, num_keys: None)
    with pytest.raises(InputError, match=f"'mixtral' has a {LIBRARY} of its own kind"):
        routers_of(model)
    monkeypatch.delattr(module, LIBRARY)
    with pytest.raises(InputError, match=f"'mixtral' has no {LIBRARY} in the library: use"):
        routers_of(model)
    monkeypatch.setattr(model.config, "router_z_loss_coef", 0.001, raising=False)
    with pytest.raises(InputError, match="in the library, but router_z_loss_coef"):
        routers_of(model)


def test_a_state_kept_over_steps_is_refused(oracle):
    model = oracle("mixtral")
    with pytest.raises(InputError, match="'stale:2' keeps the prompt's routing of older"):
        longstraw(model, problem_for(model), balanced(), policy="stale:2")


# In the gate -------------------------------------------------------------------------------------


def test_the_gate_proves_it_with_the_objective_held_to_the_library():
    case = CaseConfig(arch="mixtral", policy="exact", objective="grpo,aux_coef=0.01", **QUICK)
    receipt = judge(case)
    assert receipt.reached, [rung.detail for rung in receipt.rungs if not rung.holds]
    assert "balancing loss against the library's" in receipt.rungs[0].detail
    assert receipt.accounting["tokens_forwarded"] == receipt.accounting["tokens_ideal"]


@pytest.mark.parametrize("name", [name for name, f in FAULTS.items() if f.kind == "balance"])
def test_a_planted_fault_is_refused_by_its_rung(name):
    fault = FAULTS[name]
    missed = list(fault.missed(judge(fault.config("mixtral", **QUICK))))
    assert not missed, "\n".join(missed)


def test_a_fault_of_the_loss_is_none_without_it(oracle):
    """With `aux_coef=0` there is nothing to count: the same wrong step is right."""
    model = oracle("mixtral")
    problem, path = problem_for(model), FAULTS["prompt_counted_once"].path
    expected = gradients(full_autograd, model, problem)
    assert distance(gradients(path, model, problem), expected) == 0


def test_the_honest_step_of_the_faults_is_right(oracle):
    from lsverify.faults.balance import honest

    model, objective = oracle("mixtral"), balanced()
    problem = ragged(model, objective)
    full = full_reference(model, problem, objective)
    found = gradients(honest, model, problem, objective)
    assert distance(found, full.gradients) <= EXACT

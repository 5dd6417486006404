from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from small_steps import GRPO, problem_for, tokens

import lsverify.trace
from lsverify.cache import map_state, new_cache
from lsverify.models import build
from lsverify.paths import full_autograd, full_logits, full_score, longstraw, score
from lsverify.problems import Group, Problem, Response
from lsverify.prompt import capture, continue_from
from lsverify.references import take_gradients
from lsverify.trace import Choice, Place, Site, Trace

PATHS = {
    "batched left": functools.partial(full_autograd, batched=True, padding="left"),
    "batched right": functools.partial(full_autograd, batched=True, padding="right"),
    "token by token": functools.partial(longstraw, chunk=1),
    "in chunks": functools.partial(longstraw, chunk=4),
    "live tail": functools.partial(longstraw, policy="tail:3", chunk=4),
}


def problem_of(*groups):
    """A problem from lists of tokens: each group is its prompt and then its responses."""

    def response(i, row):
        zeros = torch.zeros(len(row), dtype=torch.float64)
        return Response(
            tokens=torch.tensor(row),
            mask=torch.ones(len(row), dtype=torch.bool),
            reward=float(i),
            old_logp=zeros,
        )

    return Problem(
        groups=tuple(
            Group(
                prompt=torch.tensor(prompt),
                responses=tuple(response(i, row) for i, row in enumerate(rows)),
            )
            for prompt, *rows in groups
        )
    )


def trace_of(path, model, problem, **options):
    with Trace(model, problem, **options) as trace:
        path(model, problem, GRPO)
    take_gradients(model)
    return trace


def near(rows, expected):
    return all(
        torch.allclose(row, other, rtol=0, atol=1e-12)
        for row, other in zip(rows, expected, strict=True)
    )


def sets(trace):
    return {key: choice.chosen for key, choice in trace.choices.items()}


# Whatever way the sequences were cut ---------------------------------------------------------------


@pytest.fixture(scope="module")
def serial():
    """Full autograd's trace of one problem, by architecture."""
    return functools.cache(
        lambda model: (
            problem := problem_for(model, prompt_lengths=(11, 10), response_lengths=(3, 1, 2, 1)),
            trace_of(full_autograd, model, problem, keep_values=True),
        )
    )


@pytest.mark.parametrize(
    ("arch", "path"),
    [
        ("llama", "batched right"),
        ("llama", "live tail"),
        ("llama", "token by token"),
        ("mistral", "in chunks"),
        ("qwen3_5", "batched left"),
        ("qwen3_5", "in chunks"),
        ("glm_moe_dsa", "batched left"),
        ("glm_moe_dsa", "batched right"),
        ("glm_moe_dsa", "token by token"),
    ],
)
def test_tokens_are_found_however_a_path_cuts_the_sequences(oracle, serial, arch, path):
    model = oracle(arch)
    problem, expected = serial(model)
    found = trace_of(PATHS[path], model, problem, keep_values=True)
    assert found.unplaced == 0
    assert found.unstable == []
    assert found.complete()
    assert near(found.log_probs, full_score(model, problem))
    # A batch also forwards the last token of its shorter rows, which predicts nothing.
    assert sets(expected).items() <= sets(found).items()
    assert expected.values.keys() <= found.values.keys()
    last = {
        problem.prompt_lengths[g] + n - 1
        for g, n in zip(problem.group_of, problem.response_lengths, strict=True)
    }
    more = {place.position for _, place in found.values.keys() - expected.values.keys()}
    assert more <= (last if path.startswith("batched") else set())
    for place, value in expected.values.items():
        assert torch.allclose(value, found.values[place], rtol=0, atol=1e-11)


def test_every_token_but_the_last_has_its_values_at_every_layer(oracle, serial):
    problem, trace = serial(oracle("llama"))
    places = {Place(problem.prompt_hash(g), -1, p) for g in (0, 1) for p in range((11, 10)[g])}
    for i, length in enumerate(problem.response_lengths):
        group = problem.group_of[i]
        first = problem.prompt_lengths[group]
        places |= {Place(problem.prompt_hash(group), i, first + t) for t in range(length - 1)}
    assert trace.values.keys() == {(f"layers.{n}", place) for n in range(4) for place in places}
    assert all(value.shape == (48,) for value in trace.values.values())


def test_values_are_kept_only_when_asked_for(oracle):
    model = oracle("llama")
    assert trace_of(full_autograd, model, problem_for(model)).values == {}


def test_decisions_are_named_by_module_call_and_token(oracle, serial):
    _, trace = serial(oracle("glm_moe_dsa"))
    sites = {site for site, _ in trace.choices}
    indexers = {Site(f"layers.{n}.self_attn.indexer", 0) for n in (0, 2)}
    # Experts are chosen by the two best of each group, the best group, then the best two of all.
    routers = {Site(f"layers.{n}.mlp.gate", call) for n in (1, 2, 3) for call in range(3)}
    assert sites == indexers | routers
    chosen = {place.position: c for (s, place), c in trace.choices.items() if s in indexers}
    assert chosen[0].chosen == (0,)
    assert chosen[4].chosen == (0, 1, 2, 3, 4)
    assert len(chosen[10].chosen) == 8
    assert chosen[4].margin == math.inf
    assert 0 < chosen[10].margin < chosen[10].scale < math.inf


def test_passes_are_counted_with_and_without_autograd(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    prompt = problem.prompt_hash(0)
    full = trace_of(full_autograd, model, problem).passes
    ours = trace_of(functools.partial(longstraw, chunk=4), model, problem).passes
    for position in range(8):
        place = Place(prompt, -1, position)
        assert (full[place, True], full[place, False]) == (2, 0)
        assert (ours[place, True], ours[place, False]) == (1, 1)
    for passes in (full, ours):
        assert passes[Place(prompt, -1, 8), True] == 2
        assert passes[Place(prompt, 0, 9), True] == 1
    assert sum(full.values()) == 11 + 9


def test_passes_without_autograd_are_scores(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    trace = trace_of(lambda m, p, o: score(m, p, chunk=4), model, problem)
    assert near(trace.scored, full_score(model, problem))
    assert all(row.isnan().all() for row in trace.log_probs)
    assert not trace.complete()


def test_log_probs_are_at_the_temperature(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    trace = trace_of(full_autograd, model, problem, temperature=0.7)
    assert near(trace.log_probs, full_score(model, problem, temperature=0.7))


def test_a_response_that_was_left_out_is_not_complete(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    trace = trace_of(lambda m, p, o: full_logits(m, p, 0), model, problem)
    assert not trace.complete()
    assert not trace.log_probs[0].isnan().any()
    assert trace.log_probs[1].isnan().all()


def test_identical_responses_are_both_seen(oracle):
    model = oracle("llama")
    problem = problem_of(([1, 2, 3], [4, 5], [4, 5], [4, 6]))
    trace = trace_of(lambda m, p, o: [full_logits(m, p, i) for i in (0, 2)], model, problem)
    assert near(trace.log_probs, full_score(model, problem))
    assert trace.log_probs[0].tolist() == trace.log_probs[1].tolist()


def test_groups_with_one_prompt_share_its_places(oracle):
    model = oracle("llama")
    problem = problem_of(([1, 2, 3], [4, 5]), ([1, 2, 3], [6, 7]))
    trace = trace_of(full_autograd, model, problem, keep_values=True)
    hashes = {problem.prompt_hash(0)}
    assert {place.prompt for _, place in trace.values} == hashes
    assert {place.member for _, place in trace.values} == {-1, 0, 1}


# Where tokens are not the problem's ---------------------------------------------------------------


def test_foreign_tokens_are_counted(oracle):
    model, problem = oracle("llama"), problem_of(([1, 2, 3], [4, 5]))
    with Trace(model, problem) as trace, torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3], [1, 2, 9], [1, 2, 3]]))
    assert trace.unplaced == 3
    with Trace(model, problem) as trace, torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]]))
    assert trace.unplaced == 6


def test_padding_is_not_foreign(oracle):
    model, problem = oracle("llama"), problem_of(([1, 2, 3], [4, 5]))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    with Trace(model, problem) as trace, torch.no_grad():
        model(input_ids=torch.tensor([[9, 9, 1, 2, 3], [1, 2, 3, 4, 9]]), attention_mask=mask)
    assert trace.unplaced == 0
    assert trace.scored[0][:2].isnan().tolist() == [False, False]


def test_positions_that_are_off_by_one_do_not_fit(oracle):
    model, problem = oracle("llama"), problem_of(([1, 2, 3], [4, 5]))
    with Trace(model, problem) as trace, torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]), position_ids=torch.tensor([[1, 2, 3]]))
    assert trace.unplaced == 3
    assert trace.scored[0].isnan().all()


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_positions_follow_from_the_cache_where_none_are_given(oracle, arch):
    model, problem = oracle(arch), problem_of(([1, 2, 3], [4, 5, 6]))
    cache = new_cache(model.config)
    with Trace(model, problem) as trace, torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]), cache=cache, use_cache=True)
        model(input_ids=torch.tensor([[3, 4, 5]]), cache=cache, use_cache=True)
    assert trace.unplaced == 0
    assert near(trace.scored, full_score(model, problem))


def test_a_cache_that_cannot_tell_its_length_counts_from_zero():
    class Recurrent:
        def get_seq_length(self):
            raise ValueError("recurrent states only")

    assert lsverify.trace._past_length({"past_key_values": Recurrent()}) == 0
    assert lsverify.trace._past_length({}) == 0


def test_one_of_several_position_axes_is_the_tokens(oracle):
    model, problem = oracle("qwen3_5"), problem_of(([1, 2, 3], [4, 5]))
    with Trace(model, problem) as trace, torch.no_grad():
        model(
            input_ids=torch.tensor([[1, 2, 3, 4]]),
            position_ids=torch.arange(4).expand(3, 1, 4),
        )
    assert trace.unplaced == 0
    assert near(trace.scored, full_score(model, problem))


def test_embeddings_without_tokens_are_not_placed(oracle):
    model, problem = oracle("llama"), problem_of(([1, 2, 3], [4, 5]))
    with Trace(model, problem) as trace:
        model(inputs_embeds=model.get_input_embeddings()(torch.tensor([[1, 2, 3, 4]])))
    assert (trace.passes, trace.unplaced, trace.complete()) == ({}, 0, False)


def test_a_path_that_calls_the_head_itself_is_not_seen_at_it(oracle):
    model, problem = oracle("llama"), problem_of(([1, 2, 3], [4, 5]))
    with Trace(model, problem, keep_values=True) as trace:
        hidden = model.model(input_ids=torch.tensor([[1, 2, 3, 4]])).last_hidden_state
        model.lm_head(hidden)
        model.model.layers[0].mlp(hidden[0])
        cos_sin = model.model.rotary_emb(hidden, torch.arange(4)[None])
        model.model.layers[0](hidden.expand(2, -1, -1), position_embeddings=cos_sin)
    assert trace.unplaced == 0
    assert not trace.complete()
    assert len(trace.values) == 4 * 4


@pytest.mark.parametrize("kept", [2, torch.tensor([2, 3]), torch.tensor([3, 2])])
def test_only_some_logits_may_be_asked_for(oracle, kept):
    model, problem = oracle("llama"), problem_of(([1, 2, 3], [4, 5]))
    with Trace(model, problem) as trace:
        model(input_ids=torch.tensor([[1, 2, 3, 4]]), logits_to_keep=kept)
    assert near(trace.log_probs, full_score(model, problem))


def test_a_wrong_log_prob_is_seen_as_it_is(oracle):
    """A branch that lost its prompt: every token is in place, the log-probs are not."""
    model, problem = oracle("llama"), problem_of(([1, 2, 3], [4, 5, 6]))
    with Trace(model, problem) as trace:
        continue_from(model, torch.tensor([3, 4, 5]), new_cache(model.config), 2, keep=3)
    assert trace.unplaced == 0
    assert trace.complete()
    assert not near(trace.log_probs, full_score(model, problem))


# Where tokens alone do not tell -------------------------------------------------------------------


@pytest.fixture
def alike():
    """Two prompts with the same tokens at most positions, the last included, and one-token responses."""
    prompt = tokens(12).tolist()
    other = [*prompt[:2], 50, *prompt[3:7], 51, *prompt[8:]]
    return problem_of((prompt, [1], [2, 3]), (other, [4], [1], [2, 5]))


@pytest.mark.parametrize("policy", ["exact", "tail:2"])
def test_a_token_that_two_prompts_share_belongs_to_the_one_it_continues(oracle, alike, policy):
    model = oracle("glm_moe_dsa")
    expected = trace_of(full_autograd, model, alike, keep_values=True)
    path = functools.partial(longstraw, policy=policy, chunk=1)
    found = trace_of(path, model, alike, keep_values=True)
    assert near(found.log_probs, expected.log_probs)
    assert found.unstable == []
    assert sets(found) == sets(expected)
    for place, value in found.values.items():
        assert torch.allclose(value, expected.values[place], rtol=0, atol=1e-11)
    third = Place(alike.prompt_hash(0), -1, 3)
    assert found.passes[third, True] + found.passes[third, False] <= 3


def test_captures_may_all_come_first(oracle, alike):
    model = oracle("llama")

    def path(model, problem, objective):
        prompts = [problem.prompt(0), problem.prompt(2)]
        states = [capture(model, p, boundary=11, chunk=4, keep_from=11) for p in prompts]
        for i in (4, 0, 3, 1, 2):
            state = states[problem.group_of[i]].branch({})
            # Copies of a state are as good as the state.
            state = map_state(state, lambda slot, tensor: tensor.clone())
            row = problem.responses[i].tokens
            continue_from(model, problem.tokens(i)[11:-1], state, 11, keep=len(row))

    trace = trace_of(path, model, alike)
    assert near(trace.log_probs, full_score(model, alike))


def test_without_the_state_a_shared_token_would_belong_to_both(oracle, alike, monkeypatch):
    monkeypatch.setattr(lsverify.trace, "_pasts", lambda cache, rows: [None] * rows)
    model = oracle("llama")
    trace = trace_of(functools.partial(longstraw, chunk=1), model, alike)
    assert not near(trace.log_probs, full_score(model, alike))


def test_a_state_of_the_wrong_prompt_is_not_taken_for_a_foreign_token(oracle):
    model = oracle("llama")
    problem = problem_of(([1, 2, 3], [4, 5]), ([6, 7, 8], [9, 1]))

    def path(model, problem, objective):
        wrong = capture(model, problem.prompt(1), boundary=2, chunk=2, keep_from=2)
        continue_from(model, problem.tokens(0)[2:-1], wrong.branch({}), 2, keep=2)

    trace = trace_of(path, model, problem)
    assert trace.unplaced == 0
    assert not trace.log_probs[0].isnan().any()
    assert not near(trace.log_probs[:1], full_score(model, problem)[:1])


def test_a_state_is_known_by_the_cache_that_a_pass_returns(oracle, alike):
    model = oracle("llama")
    with Trace(model, alike) as trace, torch.no_grad():
        for prompt in (alike.prompt(0), alike.prompt(2)):
            cache = model(input_ids=prompt[None, :-1], use_cache=True).cache
            model(input_ids=prompt[None, -1:], cache=cache, use_cache=True)
    expected = full_score(model, alike)
    for i in (0, 2, 3):
        assert near([trace.scored[i]], [expected[i]])


# Decisions in padded rows ---------------------------------------------------------------------------


def test_experts_are_no_keys_where_there_are_as_many(oracle):
    """Eight columns and eight experts: what a padded row chose may not be renumbered."""
    model = oracle("glm_moe_dsa")
    problem = problem_of(([1, 2, 3, 4, 5], [6, 7, 8]), ([9, 8, 7], [6, 5, 4]))
    batched = trace_of(PATHS["batched left"], model, problem)
    expected = trace_of(full_autograd, model, problem)
    assert sets(expected).items() <= sets(batched).items()


def test_forcing_the_models_own_decisions_changes_nothing(oracle, serial):
    model = oracle("glm_moe_dsa")
    problem, expected = serial(model)
    for path in (full_autograd, PATHS["batched left"], PATHS["in chunks"]):
        found = trace_of(path, model, problem, forced=expected.choices)
        assert near(found.log_probs, expected.log_probs)
        assert sets(expected).items() <= sets(found).items()


@pytest.mark.parametrize(("kind", "call"), [("self_attn.indexer", 0), ("mlp.gate", 2)])
def test_forced_decisions_change_what_follows_alike_in_every_form(oracle, serial, kind, call):
    model = oracle("glm_moe_dsa")
    problem, honest = serial(model)
    forced = {}
    for (site, place), choice in honest.choices.items():
        late = place.prompt == problem.prompt_hash(1) and place.position >= 9
        if late and site.module.endswith(kind) and site.call == call:
            # As many others, all of them allowed: the first ones that were not chosen, then the rest.
            allowed = range(8 if "gate" in kind else place.position + 1)
            other = sorted(allowed, key=lambda n, c=choice: (n in c.chosen, n))
            forced[site, place] = replace(choice, chosen=tuple(other[: len(choice.chosen)]))
    expected = trace_of(full_autograd, model, problem, forced=forced).log_probs
    assert near(expected[:2], honest.log_probs[:2])
    assert not near(expected[2:], honest.log_probs[2:])
    for path in (PATHS["batched left"], PATHS["in chunks"]):
        assert near(trace_of(path, model, problem, forced=forced).log_probs, expected)


def test_a_choice_of_another_size_forces_nothing(oracle, serial):
    model = oracle("glm_moe_dsa")
    problem, honest = serial(model)
    forced = {key: Choice((0,), 0.0, 1.0) for key in honest.choices}
    found = trace_of(full_autograd, model, problem, forced=forced)
    kept = {key: chosen for key, chosen in sets(found).items() if len(chosen) > 1}
    assert kept
    assert all(chosen == honest.choices[key].chosen for key, chosen in kept.items())


def test_a_decision_that_changes_between_passes_is_unstable(oracle):
    model = oracle("glm_moe_dsa")
    problem = problem_for(model)
    bias = model.model.layers[2].mlp.gate.e_score_correction_bias
    before = bias.clone()

    def path(model, problem, objective):
        with torch.no_grad():
            full_logits(model, problem, 1)
            bias[3] += 5.0
            full_logits(model, problem, 0)

    trace = trace_of(path, model, problem)
    bias.copy_(before)
    assert {"2"} <= {site.module.split(".")[1] for site, _, _ in trace.unstable} <= {"2", "3"}
    assert trace_of(full_autograd, model, problem).unstable == []


def test_choices_outside_the_model_or_of_another_size_are_not_the_models(oracle):
    model, problem = oracle("llama"), problem_of(([1, 2, 3], [4, 5]))

    def other(module, args, output):
        torch.ones(3, 5).topk(2)

    with Trace(model, problem) as trace:
        torch.ones(4, 5).topk(2)
        handle = model.model.layers[0].mlp.register_forward_hook(other)
        model(input_ids=torch.tensor([[1, 2, 3, 4]]))
        handle.remove()
        torch.ones(4, 5).argmax(-1)
    assert trace.choices == {}


# Coming and going -----------------------------------------------------------------------------------


def test_nothing_is_left_behind_not_even_by_a_pass_that_raises():
    model, problem = build("llama", seed=0), problem_of(([1, 2, 3], [4, 5]))

    def stop(module, args, output):
        raise KeyError("stop")

    with Trace(model, problem) as trace:
        handle = model.model.layers[1].mlp.register_forward_hook(stop)
        with pytest.raises(KeyError, match="stop"):
            model(input_ids=torch.tensor([[1, 2]]))
        handle.remove()
        torch.ones(2, 5).topk(2)  # outside of every module, though one of them never returned
        model(input_ids=torch.tensor([[1, 2, 3, 4]]))
    assert trace.complete()
    assert trace.choices == {}
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_watching_changes_no_bit(oracle):
    model = oracle("glm_moe_dsa")
    problem = problem_for(model)
    longstraw(model, problem, GRPO, chunk=4)
    expected = take_gradients(model)
    with Trace(model, problem, keep_values=True):
        longstraw(model, problem, GRPO, chunk=4)
    found = take_gradients(model)
    assert all(
        g is None if expected[name] is None else torch.equal(g, expected[name])
        for name, g in found.items()
    )

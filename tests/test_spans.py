"""Prompts whose tokens see each other both ways: the rule against other ways to it, exactness, and what is refused."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from judged import judged, statuses
from small_steps import GRPO, VOCABULARY, distance, gradients, problem_for

from lsverify import models
from lsverify.cases import QUICK, Options
from lsverify.errors import InputError, StalePromptState
from lsverify.families import TINY
from lsverify.faults import FAULTS
from lsverify.ladder import judge
from lsverify.ledger import Shared, expected_schedule, pieces
from lsverify.paths import full_autograd, full_logits, longstraw, score
from lsverify.policies import parse_policy
from lsverify.precision import computing
from lsverify.problems import Group, Problem, ProblemSpec, draw
from lsverify.prompt import capture
from lsverify.references import full_reference, split_gradient, stopped_reference
from lsverify.sharing import check_shareable
from lsverify.span_masks import require_seen, seen, span_arguments
from lsverify.spans import check_spans, drawn_spans, require_uncut, whole_pieces
from lsverify.stale import StaleStates

SPANS = ((2, 7), (7, 11), (12, 13))
ATTENDING = ("llama", "mistral", "gemma3", "mixtral")


PRECISION = ExitStack()


@functools.cache
def model_of(arch):
    """A tiny model at oracle precision."""
    model = models.build(arch, seed=0)
    PRECISION.enter_context(computing(model, "float64"))
    return model


@pytest.fixture(scope="module", autouse=True)
def _models_are_left_as_they_were():
    yield
    PRECISION.close()
    model_of.cache_clear()


def marked(problem, spans):
    """The problem with spans of its prompts, one entry per group."""
    groups = [replace(g, spans=own) for g, own in zip(problem.groups, spans, strict=True)]
    return replace(problem, groups=tuple(groups))


@functools.cache
def step(arch="llama", spans=(SPANS,), **sizes):
    """An off-policy problem for the model; how far off it is was scored without spans, which is nothing to them."""
    return marked(problem_for(model_of(arch), **({"prompt_lengths": (16,)} | sizes)), spans)


@functools.cache
def full_gradient(arch="llama", spans=(SPANS,), **sizes):
    return gradients(full_autograd, model_of(arch), step(arch, spans, **sizes))


# The rule


@pytest.mark.parametrize(("arch", "window"), [("llama", None), ("mistral", 8)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_layer_reads_the_tokens_that_the_rule_names_and_no_others(arch, window, attention):
    config = TINY[arch]()
    config.num_hidden_layers = 1
    model = models.tiny(config, seed=0, dtype="float64", attention=attention)
    spans, length = ((1, 4), (5, 17)), 20
    embeds = model.get_input_embeddings()(torch.arange(length))[None].detach()
    masked = span_arguments(model, spans, length)

    def logits(inputs):
        positions = torch.arange(length)[None]
        return model(inputs_embeds=inputs, position_ids=positions, use_cache=False, **masked).logits

    moved = torch.autograd.functional.jacobian(lambda x: logits(x).sum((0, 2)), embeds)
    read = moved[:, 0].abs().sum(-1) > 0
    for q in range(length):
        for k in range(length):
            together = any(a <= q < b and a <= k < b for a, b in spans)
            causal = k <= q and (window is None or q - k < window)
            assert bool(read[q, k]) == (together or causal), (q, k)


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3"])
def test_the_truth_equals_masks_that_the_library_makes_of_block_numbers(arch, monkeypatch):
    model, problem = model_of(arch), step(arch)
    expected = full_logits(model, problem, 0).detach()
    blocks = torch.full((1, len(problem.tokens(0)) - 1), -1)
    for number, (start, end) in enumerate(SPANS):
        blocks[0, start:end] = number
    library = sys.modules[type(model.base_model).__module__]
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        if hasattr(library, name):
            made = functools.partial(getattr(library, name), block_sequence_ids=blocks)
            monkeypatch.setattr(library, name, made)
    plain = full_logits(model, marked(problem, ((),)), 0).detach()
    assert float((plain - expected).norm() / expected.norm()) < 1e-13


def test_the_order_of_a_spans_tokens_is_nothing_when_their_positions_go_with_them():
    model, tokens = model_of("llama"), step().tokens(0)
    order = torch.arange(len(tokens))
    order[2:7] = torch.tensor([5, 2, 6, 4, 3])
    masked = span_arguments(model, SPANS, len(tokens))
    one, other = (
        model(input_ids=tokens[o][None], position_ids=o[None], use_cache=False, **masked).logits[0]
        for o in (torch.arange(len(tokens)), order)
    )
    torch.testing.assert_close(other, one[order], rtol=0, atol=1e-12)


def test_a_model_that_does_not_see_by_its_mask_is_noticed(monkeypatch):
    model, prompt = model_of("llama"), step().prompt(0)
    require_seen(model, prompt, SPANS)
    monkeypatch.setattr("lsverify.span_masks.span_arguments", lambda *given: {})
    with pytest.raises(InputError, match=r"does not see by it \(span \(2, 7\)\)"):
        require_seen(model, prompt, SPANS)


# Exactness


@pytest.mark.parametrize("chunk", [1, 3, 5, 6, 7, 13, 64])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_exact_is_full_autograd_at_every_chunk(arch, chunk):
    found = gradients(longstraw, model_of(arch), step(arch), chunk=chunk, branches=1 + chunk % 2)
    assert distance(found, full_gradient(arch)) < 1e-13


@pytest.mark.parametrize(
    "spans",
    [
        ((0, 2),),
        ((0, 15),),
        ((13, 15),),
        ((0, 1), (1, 2)),
        ((0, 9), (9, 15)),
        ((7, 9),),
        ((8, 10),),
    ],
)
def test_exact_is_full_autograd_wherever_the_spans_stand(spans):
    found = gradients(longstraw, model_of("mistral"), step("mistral", (spans,)), chunk=4)
    assert distance(found, full_gradient("mistral", (spans,))) < 1e-13


@pytest.mark.parametrize("arch", ["mixtral", "qwen3", "deepseek_v3", "glm_moe_dsa", "gpt_oss"])
def test_exact_is_full_autograd_on_other_kinds_of_attention(arch):
    assert (
        distance(gradients(longstraw, model_of(arch), step(arch), chunk=4), full_gradient(arch))
        < 1e-13
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_batched_with_padding_on_either_side_equals_serial(arch, side):
    sizes = {"prompt_lengths": (16, 5, 9), "group_sizes": (2, 1, 1)}
    spans = (SPANS, ((1, 4),), ())
    found = gradients(
        full_autograd, model_of(arch), step(arch, spans, **sizes), batched=True, padding=side
    )
    assert distance(found, full_gradient(arch, spans, **sizes)) < 1e-13


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("policy", ["tail:4+window:12", "tail:9+window:7", "tail:40"])
def test_a_whole_span_may_stand_in_the_live_tail(policy, branches):
    spans, sizes = ((2, 6), (13, 16)), {"group_sizes": (3,)}
    problem = step("gemma3", (spans,), **sizes)
    found = gradients(
        longstraw, model_of("gemma3"), problem, policy=policy, chunk=3, branches=branches
    )
    assert distance(found, full_gradient("gemma3", (spans,), **sizes)) < 1e-13


@pytest.mark.parametrize("arch", ["llama", "mistral"])
@pytest.mark.parametrize("policy", ["detach", "window:4", "window:8", "tail:3+window:2"])
def test_stopped_at_a_spans_edge_equals_the_reference_and_a_witness_without_cache(arch, policy):
    model, problem, stop = model_of(arch), step(arch), parse_policy(policy).stop
    found = gradients(longstraw, model, problem, policy=policy, chunk=3)
    reference = stopped_reference(model, problem, GRPO, stop)
    assert distance(found, reference.response.gradients) < 1e-13
    assert distance(reference.total(), full_reference(model, problem, GRPO).gradients) < 1e-13
    witness = split_gradient(model, problem, GRPO, stop)
    assert distance(found, witness.response.gradients) < 1e-13


def test_scores_over_a_captured_prompt_are_those_of_full_passes():
    from lsverify.paths import full_score

    model, problem = model_of("gemma3"), step("gemma3")
    for one, other in zip(score(model, problem, chunk=3), full_score(model, problem), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_equal_tokens_under_other_spans_are_another_prompt():
    model, sizes = model_of("llama"), {"prompt_lengths": (16, 16, 16)}
    drawn = step(spans=(SPANS, (), SPANS), **sizes)
    same = [replace(g, prompt=drawn.groups[0].prompt) for g in drawn.groups]
    problem = replace(drawn, groups=tuple(same))
    assert len({problem.prompt_hash(g) for g in range(3)}) == 2
    found = gradients(longstraw, model, problem, chunk=3)
    assert distance(found, gradients(full_autograd, model, problem)) < 1e-13
    states = StaleStates(2)
    longstraw(model, problem, GRPO, policy="stale:2", states=states)
    assert len(states._states) == 2
    state = capture(model, problem.prompt(0), boundary=15, chunk=4, keep_from=15, spans=SPANS)
    with pytest.raises(StalePromptState, match="tokens was"):
        state.check(model, problem.prompt(0), 15)


# What a cut costs


@pytest.mark.parametrize("arch", ATTENDING)
def test_prompts_with_spans_can_be_shared_and_a_path_that_cuts_them_is_wrong(arch):
    model, problem = model_of(arch), step(arch)
    check_shareable(model, problem)
    cut = marked(problem, (((2, 4), (4, 7), (7, 8), (8, 11)),))
    found = gradients(longstraw, model, cut, chunk=4)
    assert distance(found, full_gradient(arch)) > 0.01


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS.values() if f.kind == "spans"], ids=lambda f: f.name
)
def test_planted_faults_are_refused_by_their_rung(fault):
    assert not [*fault.missed(judge(fault.config("llama", **QUICK)))]


@pytest.mark.parametrize(("arch", "kind"), [("gemma3", "image"), ("llama", "prefix")])
@pytest.mark.parametrize("policy", ["exact", "detach"])
def test_the_gate_proves_every_rung(arch, kind, policy):
    receipt = judged(arch, policy=policy, spans=kind, chunk=4)
    assert set(statuses(receipt).values()) == {"proven"}
    assert receipt.gradient.rel_l2 < 1e-12


@pytest.mark.parametrize("name", ["full_padded_left", "full_padded_right", "dense"])
def test_a_candidates_padded_rows_are_placed_under_a_mask_of_queries_and_keys(name):
    case = FAULTS["span_read_in_order"].config(
        "gemma3", **QUICK
    )  # as judged above, but for the path
    given = {"candidate": f"lsverify.faults.honest:{name}", "require": "gradient"}
    assert judge(case.model_copy(update=given)).reached


# Chunks


def test_pieces_end_in_front_of_a_span_and_a_longer_span_is_a_piece():
    assert whole_pieces(0, 16, 4, ((2, 7), (9, 12))) == [(0, 2), (2, 7), (7, 9), (9, 13), (13, 16)]
    assert whole_pieces(0, 16, 64, SPANS) == [(0, 16)]
    assert whole_pieces(3, 3, 4, SPANS) == []
    assert pieces(0, 16, None, SPANS) == [(0, 16)]
    assert pieces(0, 9, 4) == [(0, 4), (4, 8), (8, 9)]


def test_the_schedule_counts_chunks_as_spans_make_them():
    shape = Shared(16, (3,), spans=((2, 7),))
    plan = expected_schedule("longstraw", [shape], parse_policy("exact"), chunk=4)
    captured = [p.tokens for p in plan if p.phase == "capture"]
    assert captured == [2, 5, 4, 4]
    assert [p.tokens for p in plan if p.phase == "sweep"] == captured[::-1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, 24, 100])
@pytest.mark.parametrize("kind", ["image", "prefix"])
def test_drawn_spans_leave_the_last_token_alone(kind, length, seed):
    spans = drawn_spans(kind, length, seed)
    check_spans(spans, max(length - 1, 0))
    assert bool(spans) == (length >= 3)
    assert any(end - start > 1 for start, end in spans) == (length >= 3)


# The problem


def test_a_problem_carries_its_spans():
    spec = ProblemSpec(prompt_lengths=(16, 9), spans="image")
    problem = draw(spec, VOCABULARY)
    first, second = (group.spans for group in problem.groups)
    assert first != second
    assert problem.spans(0) == first
    assert problem.select([1, 0]).spans(0) == second
    assert problem.replace_logps(old=[r.old_logp for r in problem.responses]).spans(0) == first
    for side in ("left", "right"):
        batch = problem.padded(side)
        assert batch.spans == tuple(problem.spans(i) for i in range(len(problem)))
        again = Problem.from_padded(
            batch,
            rewards=[r.reward for r in problem.responses],
            old_logp=[r.old_logp for r in problem.responses],
            ref_logp=[r.ref_logp for r in problem.responses],
            seed=problem.seed,
        )
        assert again.content_hash() == problem.content_hash()
    plain = draw(spec.model_copy(update={"spans": "none"}), VOCABULARY)
    for name, value in plain.flat().items():
        assert torch.equal(problem.flat()[name], value)


def test_a_problem_without_spans_has_the_hashes_it_always_had():
    plain, prompt = step(spans=((),)), step().prompt(0)
    assert plain.prompt_hash(0) == hashlib.sha256(prompt.numpy().tobytes()).hexdigest()
    assert "spans" not in plain.layout()
    assert plain.padded().spans == ()
    assert step().prompt_hash(0) != plain.prompt_hash(0)
    assert step().content_hash() != plain.content_hash()


def test_spans_are_saved_and_older_files_still_load(tmp_path):
    problem, plain = step(), step(spans=((),))
    for one, version in ((problem, 2), (plain, 1)):
        assert Problem.load(one.save(tmp_path)).content_hash() == one.content_hash()
        assert json.loads((tmp_path / "problem.json").read_text())["schema_version"] == version


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spans": [[[3, 1]]]}, "is empty"),
        ({"spans": [[[0, 99]]]}, "outside its prompt of 16 tokens"),
        ({"spans": []}, "spans has 0 entries"),
        ({"spans": [[[1, 4]]]}, "content does not match"),
        ({"spans": [["x"]]}, "spans.0.0"),
        ({"schema_version": 1}, "spans are for schema_version 2"),
        ({"spans": None}, "spans are for schema_version 2"),
    ],
)
def test_files_with_other_spans_are_refused(tmp_path, change, said):
    step().save(tmp_path)
    layout = json.loads((tmp_path / "problem.json").read_text())
    (tmp_path / "problem.json").write_text(json.dumps(layout | change))
    with pytest.raises(InputError, match=said):
        Problem.load(tmp_path)


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(1, 2)], "spans is a list"),
        (((1, 2, 3),), "not a pair"),
        (((1, True),), "not a pair"),
        (((4, 4),), "is empty"),
        (((-1, 2),), "outside its prompt of 16"),
        (((12, 17),), "outside its prompt of 16"),
        (((4, 8), (7, 9)), "begins before 8"),
        (((8, 9), (4, 5)), "begins before 9"),
    ],
)
def test_spans_that_a_prompt_cannot_have_are_refused(spans, said):
    with pytest.raises(InputError, match=said):
        Group(prompt=step().prompt(0), responses=step().groups[0].responses, spans=spans)


def test_rows_of_one_group_have_the_same_spans():
    batch = replace(step().padded(), spans=(SPANS, ()))
    zeros = [r.old_logp for r in step().responses]
    with pytest.raises(InputError, match="responses of one group must continue the same prompt"):
        Problem.from_padded(batch, rewards=[0.0, 1.0], old_logp=zeros)


# What is refused


@pytest.mark.parametrize(
    ("policy", "spans", "said"),
    [
        ("tail:10", ((2, 7),), r"boundary at 6 .* inside the span \(2, 7\); use tail:9 or tail:14"),
        ("exact", ((2, 16),), r"boundary at 15 .* inside the span \(2, 16\); use tail:14"),
        (
            "window:10",
            ((2, 7),),
            r"stops at 5, inside the span \(2, 7\) .*use window:8 or window:13",
        ),
    ],
)
def test_a_boundary_or_stop_inside_a_span_is_refused_with_what_is_allowed(policy, spans, said):
    for path in (longstraw, score):
        if path is longstraw or policy.startswith("tail"):
            given = () if path is score else (GRPO,)
            with pytest.raises(InputError, match=said):
                path(model_of("llama"), step(spans=(spans,)), *given, policy=policy)
    for allowed in said.rpartition("use ")[2].split(" or "):
        require_uncut(parse_policy(allowed), 16, spans)


def test_a_capture_or_reference_that_cuts_a_span_is_refused():
    model, problem = model_of("llama"), step()
    said = r"token 5 lies inside the span \(2, 7\)"
    for edges in ({"boundary": 5, "keep_from": 5}, {"boundary": 15, "keep_from": 5}):
        with pytest.raises(InputError, match=said):
            capture(model, problem.prompt(0), chunk=4, spans=SPANS, **edges)
    with pytest.raises(InputError, match=said):
        stopped_reference(model, problem, GRPO, lambda length: 5)


@pytest.mark.parametrize(
    ("arch", "layer"),
    [
        ("mamba", "linear_attention"),
        ("qwen3_5", "linear_attention"),
        ("rwkv", "LinearAttentionLayer"),
        ("deepseek_v4", "heavily_compressed_attention"),
    ],
)
def test_layers_that_read_in_order_are_refused_by_name(arch, layer):
    with pytest.raises(InputError, match=f"layer 0 is of type {layer}, which cannot see"):
        span_arguments(model_of(arch), SPANS, 16)


def test_a_model_that_takes_no_mask_is_refused(monkeypatch):
    model = model_of("llama")
    monkeypatch.delattr(sys.modules[type(model.base_model).__module__], "create_causal_mask")
    with pytest.raises(InputError, match="takes no attention mask of our own making"):
        span_arguments(model, SPANS, 16)
    monkeypatch.undo()
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(InputError, match="use sdpa or eager"):
        span_arguments(model, SPANS, 16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"spans": "video"}, "spans 'video' is not known: use one of none, image, prefix"),
        ({"spans": "image", "prompt_length": 2}, "prompt length 2 has no room for spans"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        Options(archs=("llama",), **options).cases()


def test_a_mask_is_made_only_where_a_span_lies():
    model = model_of("llama")
    assert span_arguments(model, SPANS, 3, start=13) == {}
    assert span_arguments(model, (), 16) == {}
    visible = seen(torch.arange(2), torch.arange(3), ((0, 2),), window=1)
    assert visible.tolist() == [[True, True, False], [True, True, False]]

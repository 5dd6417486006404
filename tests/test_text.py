from __future__ import annotations

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from lsverify import models, text
from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError


@pytest.fixture(scope="module")
def letters():
    """One token per character, as many as a tiny model knows; `</s>` is special."""
    signs = ["</s>", "<unk>", *sorted(set(text.corpus()))][: models.VOCABULARY]
    vocabulary = {sign: number for number, sign in enumerate(signs)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def test_corpus_is_the_language_reference():
    assert len(text.corpus()) > 400_000
    assert "The assert statement" in text.corpus().replace('"assert"', "assert")


@pytest.mark.parametrize("length", [1, 2, 17, 512])
def test_prompts_have_exactly_the_length_asked_for(letters, length):
    found = text.prompts(letters, length=length, count=3, seed=0)
    assert [p.shape for p in found] == [(length,)] * 3
    assert {p.dtype for p in found} == {torch.int64}


def test_prompts_follow_from_the_seed_and_differ_from_each_other(letters):
    first, same, other = (
        text.prompts(letters, length=60, count=4, seed=seed) for seed in (3, 3, 4)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert len({tuple(p.tolist()) for p in (*first, *other)}) == 8


def test_a_prompt_may_wrap_around_the_end_of_the_corpus(letters):
    count = len(letters(text.corpus(), add_special_tokens=False)["input_ids"])
    (prompt,) = text.prompts(letters, length=count - 10, count=1, seed=0)
    assert len(prompt) == count - 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"length": 0, "count": 1}, "must be at least 1"),
        ({"length": 1, "count": 0}, "must be at least 1"),
        ({"length": 10_000_000, "count": 1}, "more than the corpus"),
        ({"length": 1, "count": 1_000_000}, "places to start at"),
    ],
)
def test_prompts_that_cannot_be_had_are_refused(letters, arguments, said):
    with pytest.raises(InputError, match=said):
        text.prompts(letters, seed=0, **arguments)


@pytest.mark.parametrize("arch", sorted(DEFAULT_ARCHS))
def test_responses_come_from_the_models_own_distribution(arch):
    model = models.build(arch, seed=2)
    prompt = torch.arange(20)
    # So cold that each draw is the most likely token: then the cache-free model must agree on every one.
    sampled = text.sample_responses(model, prompt, lengths=[6, 1, 9], seed=0, temperature=1e-9)
    assert [len(r) for r in sampled] == [6, 1, 9]
    together = torch.cat([prompt, sampled[2]])
    with torch.no_grad():
        expected = model(input_ids=together[None], use_cache=False).logits[0, 19:-1].argmax(-1)
    assert torch.equal(sampled[2], expected)
    assert torch.equal(sampled[0], expected[:6])


def test_responses_follow_from_the_seed_and_nothing_else():
    model = models.build("llama", seed=2)
    prompt = torch.arange(12)
    before = torch.get_rng_state()
    first, same, other = (
        text.sample_responses(model, prompt, lengths=[8, 8], seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_frequencies_of_a_draw_are_the_models_probabilities():
    model = models.build("llama", seed=2)
    prompt = torch.arange(12)
    sampled = torch.cat(text.sample_responses(model, prompt, lengths=[1] * 4000, seed=0))
    with torch.no_grad():
        expected = model(input_ids=prompt[None], use_cache=False).logits[0, -1].softmax(-1)
    found = torch.bincount(sampled, minlength=models.VOCABULARY) / 4000
    allowed = 5 * (expected * (1 - expected) / 4000).sqrt()
    assert ((found - expected).abs() <= allowed + 1e-3).all()


def test_suppressed_tokens_are_never_drawn():
    model = models.build("llama", seed=2)
    drawn = text.sample_responses(model, torch.arange(5), lengths=[40] * 4, seed=0)
    banned = torch.cat(drawn).unique()[:30].tolist()
    again = text.sample_responses(model, torch.arange(5), lengths=[40] * 4, seed=0, suppress=banned)
    assert not set(torch.cat(again).tolist()) & set(banned)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lengths": []}, "at least one response"),
        ({"lengths": [3, 0]}, "each of 1 token or more"),
        ({"lengths": [3], "temperature": 0.0}, "temperature 0.0"),
        ({"lengths": [3], "temperature": float("nan")}, "temperature nan"),
    ],
)
def test_impossible_sampling_is_refused(arguments, said):
    model = models.build("llama", seed=2)
    with pytest.raises(InputError, match=said):
        text.sample_responses(model, torch.arange(5), seed=0, **arguments)


def test_reward_is_the_share_of_word_characters():
    assert text.reward("plain words_1") == 1.0
    assert text.reward("((()))") == 0.0
    assert text.reward("ab  cd") == pytest.approx(5 / 6)
    assert text.reward("") == 0.0


def test_a_text_problem_is_whole(letters):
    model = models.build("llama", seed=2)
    problem = text.text_problem(
        model,
        letters,
        prompt_length=30,
        group_size=3,
        response_lengths=[7, 1],
        seed=5,
        groups=2,
    )
    assert problem.prompt_lengths == (30, 30)
    assert problem.response_lengths == (7, 1, 7, 1, 7, 1)
    for group in problem.groups:
        rewards = [r.reward for r in group.responses]
        assert len(set(rewards)) == 3
        assert all(r.mask.all() and not r.old_logp.any() for r in group.responses)
    drawn = torch.cat([r.tokens for r in problem.responses])
    assert not torch.isin(drawn, torch.tensor(letters.all_special_ids)).any()


def test_a_text_problem_follows_from_its_seed(letters):
    model = models.build("llama", seed=2)
    first, same, other = (
        text.text_problem(
            model, letters, prompt_length=9, group_size=2, response_lengths=4, seed=seed
        ).content_hash()
        for seed in (0, 0, 1)
    )
    assert first == same != other


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"group_size": 0, "response_lengths": 4}, "group size 0"),
        ({"group_size": 2, "response_lengths": []}, "no response length"),
    ],
)
def test_a_text_problem_that_cannot_be_is_refused(letters, arguments, said):
    model = models.build("llama", seed=2)
    with pytest.raises(InputError, match=said):
        text.text_problem(model, letters, prompt_length=9, seed=0, **arguments)

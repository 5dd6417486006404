"""Problems of real text: prompts from the language reference that CPython ships, responses from the model itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from lsverify.cache import map_state, new_cache
from lsverify.errors import InputError
from lsverify.problems import Group, Problem, Response
from lsverify.prompt import keep_logits, unwrapped


@lru_cache(maxsize=1)
def corpus() -> str:
    """The Python language reference as one text of some 460,000 characters, topics in the order of their names."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def prompts(
    tokenizer: PreTrainedTokenizerBase, *, length: int, count: int, seed: int
) -> tuple[Tensor, ...]:
    """`count` prompts [length] int64 of exactly `length` tokens, from different places of the corpus.

    The places follow from `seed` and start at a line; the text wraps around at its end. Raises `InputError` where
    length or count is below 1, or the corpus has too few tokens for one prompt.
    """
    if length < 1 or count < 1:
        raise InputError(
            f"{count} prompts of {length} tokens were asked for; both must be at least 1"
        )
    text = corpus()
    lines = [0] + [
        i + 1 for i, character in enumerate(text) if character == "\n" and text[i + 1] != "\n"
    ]
    places = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed))
    if count > len(lines):
        raise InputError(
            f"{count} prompts were asked for; the corpus has {len(lines)} places to start at"
        )
    found = []
    for place in places[:count].tolist():
        start = lines[place]
        turned = text[start:] + "\n\n" + text[:start]
        # Six characters a token are plenty in English; code and tables need fewer, so all of it only if they do not do.
        for size in (6 * length + 64, len(turned)):
            ids = tokenizer(turned[:size], add_special_tokens=False)["input_ids"]
            # The last token of a cut text may be half a word.
            if len(ids) > length:
                break
        else:
            raise InputError(
                f"prompt length {length} is more than the corpus of {len(ids)} tokens: ask for less"
            )
        found.append(torch.tensor(ids[:length], dtype=torch.int64))
    return tuple(found)


@torch.no_grad()
def sample_responses(
    model: nn.Module,
    prompt: Tensor,
    *,
    lengths: Sequence[int],
    seed: int,
    temperature: float = 1.0,
    suppress: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """One response [R_i] int64 for each of `lengths`, sampled from `model` after prompt [P].

    The prompt runs once, the responses side by side. Token ids in `suppress` (an end-of-text token, say) are never
    drawn, so that a response has its length. Every draw comes from a generator seeded with `seed`. The model's mode
    is left as it is. Raises `InputError` for a length below 1 or a temperature that is not above zero.
    """
    if not lengths or min(lengths) < 1:
        raise InputError(
            f"response lengths {list(lengths)} must name at least one response, each of 1 token or more"
        )
    if not temperature > 0:
        raise InputError(f"temperature {temperature} must be above 0")
    generator = torch.Generator().manual_seed(seed)
    last = keep_logits(model, 1)
    banned = torch.tensor(list(suppress), dtype=torch.int64)

    def chances(tokens: Tensor, start: int, cache: Cache) -> Tensor:
        positions = torch.arange(start, start + tokens.shape[1], device=prompt.device)
        output = model(
            input_ids=tokens,
            position_ids=positions[None].expand_as(tokens),
            cache=cache,
            use_cache=True,
            **last,
        )
        logits: Tensor = output.logits[:, -1].to("cpu", torch.float64)
        return (logits / temperature).index_fill(-1, banned, -torch.inf).softmax(-1)

    alone = new_cache(unwrapped(model).config)
    first = chances(prompt[None], 0, alone).expand(len(lengths), -1)
    # A layer's count of tokens seen is a tensor without dimensions: the same for every row.
    together = map_state(
        alone,
        lambda _, state: state.repeat_interleave(len(lengths), dim=0) if state.dim() else state,
    )
    drawn = [torch.multinomial(first, 1, generator=generator)]
    for step in range(max(lengths) - 1):
        following = chances(drawn[-1].to(prompt.device), len(prompt) + step, together)
        drawn.append(torch.multinomial(following, 1, generator=generator))
    tokens = torch.cat(drawn, dim=1)
    return tuple(row[:length].clone() for row, length in zip(tokens, lengths, strict=True))


def reward(text: str) -> float:
    """The share of characters that a word is made of: letters, digits, underscores and single spaces; 0 to 1."""
    counted = [
        c.isalnum() or c == "_" or (c == " " and text[i : i + 2] != "  ")
        for i, c in enumerate(text)
    ]
    return sum(counted) / max(len(counted), 1)


def text_problem(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_length: int,
    group_size: int,
    response_lengths: int | Sequence[int],
    seed: int,
    groups: int = 1,
    temperature: float = 1.0,
) -> Problem:
    """A problem of `groups` real-text prompts with `group_size` responses each, sampled from `model`.

    `response_lengths` is one length for all, or a sequence in the order of members, taken from the front again when
    it is shorter than the problem. Rewards are `reward` of the decoded
    response plus a seeded part of at most 0.01 that keeps them distinct. Log-probs are zero until
    `problems.off_policy` sets them.

    Raises `InputError` where a number does not fit.
    """
    if group_size < 1:
        raise InputError(f"group size {group_size} must be at least 1")
    given = [response_lengths] if isinstance(response_lengths, int) else list(response_lengths)
    if not given:
        raise InputError("no response length was given: name at least one, in tokens")
    lengths = itertools.cycle(given)
    generator = torch.Generator().manual_seed(seed)
    special = sorted(set(tokenizer.all_special_ids))
    built = []
    for number, prompt in enumerate(
        prompts(tokenizer, length=prompt_length, count=groups, seed=seed)
    ):
        sampled = sample_responses(
            model,
            prompt,
            lengths=list(itertools.islice(lengths, group_size)),
            seed=seed + 7919 * (number + 1),
            temperature=temperature,
            suppress=special,
        )
        ties = torch.randperm(group_size, generator=generator).tolist()
        built.append(
            Group(
                prompt=prompt,
                responses=tuple(
                    _response(tokens, reward(tokenizer.decode(tokens)) + 0.01 * tie / group_size)
                    for tokens, tie in zip(sampled, ties, strict=True)
                ),
            )
        )
    return Problem(groups=tuple(built), seed=seed)


def _response(tokens: Tensor, value: float) -> Response:
    return Response(
        tokens=tokens,
        mask=torch.ones(len(tokens), dtype=torch.bool),
        reward=value,
        old_logp=torch.zeros(len(tokens), dtype=torch.float64),
        ref_logp=None,
        sampler_logp=None,
    )

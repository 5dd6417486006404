"""The released package prefix-grouper as a candidate: prompt and responses of a group in one row, the prompt once.

The package's own code packs the rows (`PrefixGrouper.concat_input`), stands in for the attention of the model
(`register_attention`: the prompt among itself, each response over the repeated prompt and itself), and takes the output
apart (`split_output`). Ours is what it leaves to its user: positions, the loss, and the attention that it calls. It
calls one as flash-attention has it, which runs on no CPU; `padded_causal` keeps the same contract over sdpa.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lsverify.errors import InputError
from lsverify.objective import Objective, prepare
from lsverify.paths import StepResult
from lsverify.problems import Problem
from lsverify.prompt import unwrapped
from lsverify.scoring import reference_scores, shared_prompts

try:
    from prefix_grouper import PrefixGrouper
    from prefix_grouper.utils.register_transformers import register_attention
except ModuleNotFoundError:
    raise InputError(
        "prefix-grouper is not installed: pip install 'lsverify[prefix-grouper]'"
    ) from None

REGISTERED = "prefix_grouper_attention"
"""The name that the package registers its attention under."""
PADDED_CAUSAL = "lsverify_padded_causal"


def step(
    model: nn.Module, problem: Problem, objective: Objective, *, attention: str = PADDED_CAUSAL
) -> StepResult:
    """All groups in one packed pass and one backward; claims `exact`.

    `attention` is the library's name of the function that the package calls for each of its two parts.
    Raises `InputError` for spans and for a load-balancing loss, of which the package knows nothing.
    """
    if objective.aux_coef or any(problem.spans(i) for i in range(len(problem))):
        raise InputError(
            "prefix-grouper has neither spans nor a load-balancing loss: leave both out"
        )
    plan = prepare(objective, problem, reference_scores(model, problem, objective, None))
    groups = list(shared_prompts(problem))
    members = [i for _, answering in groups for i in answering]
    responses = [problem.responses[i].tokens for i in members]
    prompts, prompt_mask = _padded([prompt for prompt, _ in groups])
    suffixes, suffix_mask = _padded(responses)
    packed = PrefixGrouper.from_ungrouped_masks(
        prompt_mask, suffix_mask, [len(answering) for _, answering in groups]
    )
    with _attending(model, REGISTERED):
        output = model(
            input_ids=packed.concat_input(prompts, prompt_mask, suffixes, suffix_mask),
            position_ids=packed.concat_input(
                positions([0] * len(groups), prompts.shape[1]),
                prompt_mask,
                positions([len(problem.prompt(i)) for i in members], suffixes.shape[1]),
                suffix_mask,
            ),
            use_cache=False,
            prefix_grouper=packed,
            prefix_grouper_attn_func=attention,
        )
    # The prompt's last token predicts the first token of every response.
    _, _, logits, _ = packed.split_output(output.logits, include_prefix_last=1)
    parts = {
        i: plan.member(i, row[: len(own)])
        for i, row, own in zip(members, logits, responses, strict=True)
    }
    loss = torch.stack([part.loss for part in parts.values()]).sum()
    loss.backward()
    log_probs = tuple(parts[i].logp.detach() for i in range(len(problem)))
    return StepResult(loss=loss.detach().item(), log_probs=log_probs, reference="exact")


def positions(starts: Sequence[int], width: int) -> Tensor:
    """Positions [b, width] int64 that count from each row's start."""
    return torch.tensor(starts)[:, None] + torch.arange(width)


def padded_causal(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Flash-attention's contract over the library's sdpa: the last query stands at the last key.

    query [b, h, Q, d], key and value [b, h', K, d], attention_mask [b, K] bool, False at padded keys; a query sees the
    keys up to its own, the last `sliding_window` of them if there is one. Returns [b, Q, h, d] and no weights. Raises
    NotImplementedError for attention sinks, which sdpa has none of.
    """
    if s_aux is not None:
        raise NotImplementedError(
            "attention sinks: sdpa, which takes the place of flash-attention, has none"
        )
    width, keys = query.shape[2], key.shape[2]
    behind = torch.arange(keys - width, keys)[:, None] - torch.arange(keys)
    visible = (behind >= 0) & (behind < (sliding_window or keys))
    mask = visible & attention_mask[:, None, None, :]
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    output, _ = sdpa(module, query, key, value, mask, is_causal=False, **kwargs)
    return output, None


def _padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows padded on the right, [b, T], and where they have tokens, [b, T] bool."""
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool()
    return pad_sequence(rows, batch_first=True), mask


@contextmanager
def _attending(model: nn.Module, name: str) -> Iterator[None]:
    """The model's attention is the registered one of this name, inside."""
    config = unwrapped(model).config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


register_attention()
AttentionInterface.register(PADDED_CAUSAL, padded_causal)

"""The precondition of sharing a prompt, tested: its state must be a function of the prompt alone.

It is not where the RoPE table changes with the total length, where experts drop tokens over a capacity that the whole
batch fills, or where part of the prompt sees what follows. Then every response has a prompt state of its own and one
capture would be wrong for all of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lsverify.errors import NotShareable
from lsverify.paths import shared_prompts
from lsverify.problems import Problem
from lsverify.span_masks import padded_arguments, span_arguments
from lsverify.spans import Spans
from lsverify.watch import decoder_layers, way_to_embedding

# In float64 under promotion the same values come out of another batch or length to a few 1e-15.
LIMIT = 1e-10


@torch.no_grad()
def check_shareable(model: nn.Module, problem: Problem, limit: float = LIMIT) -> None:
    """Hold the values of every layer, and the logits, at the prompt's positions to those of the prompt alone.

    The prompt is run by itself, before its shortest and its longest response, and in a batch of both. `limit` is on
    relative L2 per layer; the model should be at oracle precision. Raises `NotShareable`, naming layer and length.
    """
    for prompt, members in shared_prompts(problem):
        spans = problem.spans(members[0])
        alone = _layers(model, prompt[None], spans)
        by_length = sorted(members, key=lambda i: problem.response_lengths[i])
        for i in dict.fromkeys((by_length[0], by_length[-1])):
            tokens = problem.tokens(i)[None]
            _hold(
                alone,
                _layers(model, tokens, spans),
                0,
                limit,
                f"a total length of {tokens.shape[1]}",
            )
        mates = [problem.tokens(i) for i in (by_length[0], by_length[-1])]
        batch = torch.nn.utils.rnn.pad_sequence(mates, batch_first=True)
        lengths = torch.tensor([len(row) for row in mates])
        mask = (torch.arange(batch.shape[1]) < lengths[:, None]).long()
        together = _layers(model, batch, spans, mask)
        for row in range(len(mates)):
            _hold(alone, together, row, limit, f"batch mates (row {row})")


def _hold(
    alone: dict[str, Tensor], other: dict[str, Tensor], row: int, limit: float, what: str
) -> None:
    for name, expected in alone.items():
        actual = other[name][row, : expected.shape[1]]
        difference, own = (actual - expected[0]).flatten(1), expected[0].flatten(1)
        error = float(difference.norm())
        if not error <= limit * float(own.norm()):
            changed = difference.norm(dim=-1) > limit * own.norm(dim=-1)
            position = int(changed.nonzero()[0]) if bool(changed.any()) else 0
            raise NotShareable(
                f"{name}: the prompt's values change with {what}, first at position {position} of "
                f"{expected.shape[1]} (by {error:.3g}): responses cannot share one capture of this model; "
                "train it with full autograd"
            )


def _layers(
    model: nn.Module, tokens: Tensor, spans: Spans, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """The output [b, T, H] of every decoder layer, by name, and the logits, of an uncached pass over tokens [b, T]."""
    found: dict[str, Tensor] = {}
    _, parents = way_to_embedding(model)

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        # Several residual streams may stand in front of the batch.
        in_front = hidden.dim() == 4 and hidden.shape[:2] != tokens.shape
        found[name] = (hidden.movedim(0, -1) if in_front else hidden).detach()

    handles = [
        layer.register_forward_hook(partial(note, name))
        for name, layer in decoder_layers(parents[-1])
    ]
    try:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        masked = (
            span_arguments(model, spans, tokens.shape[1])
            if mask is None
            else padded_arguments(model, mask, [spans] * len(mask))
        )
        output = model(input_ids=tokens, position_ids=positions, use_cache=False, **masked)
    finally:
        for handle in handles:
            handle.remove()
    # Also for a model whose layers are not where they are looked for.
    return found | {"logits": output.logits.detach()}

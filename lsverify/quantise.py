"""A base model as 4-bit QLoRA sees it: every linear weight replaced by its NF4 round trip.

LongStraw trains adapters over a base stored in NF4. What its matrix products read are 16 values per block, scaled by
the block's largest magnitude; those are put here in the place of the weights, in the model's own precision. Gradients
then are those of the quantised base, and no 4-bit kernel is needed to judge them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

BLOCK = 64
# The sixteen values of NormalFloat-4 (arXiv 2305.14314, appendix E): zero, 7 below it and 8 above.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@torch.no_grad()
def quantise(model: PreTrainedModel) -> list[str]:
    """Replace the linear weights of `model` by their NF4 round trip, in place; returns their names in order.

    Those are the matrices of linear layers and of fused experts. The head, the embeddings, norms, biases,
    convolutions and routers stay as they are, as under QLoRA.
    """
    names = linear_weights(model)
    for name in names:
        weight = model.get_parameter(name)
        weight.copy_(round_trip(weight))
    return names


def linear_weights(model: PreTrainedModel) -> list[str]:
    """Names of the parameters that `quantise` replaces."""
    head = model.get_output_embeddings()
    names = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    fused = [
        name for name, p in model.named_parameters() if p.ndim == 3 and id(p) not in convolutions
    ]
    routers = {name for name in names if name.split(".")[-2] in {"gate", "router"}}
    kept = {
        id(embedding.weight) for embedding in model.modules() if isinstance(embedding, nn.Embedding)
    }
    return [
        name
        for name in names + fused
        if name not in routers and id(model.get_parameter(name)) not in kept
    ]


def round_trip(weight: Tensor) -> Tensor:
    """The values that `weight` has after NF4 with one absolute maximum for every 64 numbers, in `weight`'s dtype.

    Blocks run over the rows, one after the other, the last one as long as is left. Scales and products are float32,
    whatever the dtype, so a float64 model and its rounding to float32 get the same base.
    """
    flat = weight.to(torch.float32).flatten()
    padded = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(dim=1, keepdim=True)
    values = torch.tensor(NF4, dtype=torch.float32, device=weight.device)
    middles = (values[1:] + values[:-1]) / 2
    # A block of zeros has no scale: whatever it is divided by, it is coded as zeros.
    codes = torch.bucketize(padded / scale.clamp(min=torch.finfo(torch.float32).tiny), middles)
    restored: Tensor = (values[codes] * scale).flatten()[: len(flat)].view(weight.shape)
    return restored.to(weight.dtype)

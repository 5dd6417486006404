"""LoRA adapters, as LongStraw trains: the model frozen, adapters trainable, and for a gate one whole module."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lsverify.errors import InputError

RANK = 4


def attach(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """`model` under peft adapters of rank 4 on the linear layers of its blocks, A and B drawn from `seed`.

    peft starts with B = 0, where A has no gradient and the adapter changes nothing: a fault in either would stay
    invisible. The output head (the final norm, where the head is tied to the embedding) is trained whole through
    `modules_to_save`, moved off its frozen original for the same reason. The indexers of sparse attention receive
    no gradient and carry no adapter. Adapters have the model's dtype, but float32 under bfloat16, as peft trains them.

    Raises `InputError` where peft is not installed, or does not know what to do with the model.
    """
    wrapped = _wrapped(model, RANK, [_saved_module(model)])
    _redraw(wrapped, torch.Generator().manual_seed(seed))
    return wrapped


@torch.no_grad()
def begin(model: PreTrainedModel, rank: int, *, seed: int) -> PreTrainedModel:
    """`model` under adapters as a training begins with them: A drawn from `seed`, B zero, so that nothing is changed yet.

    Scaled by 2, whatever the rank. Nothing else is trained. Raises `InputError` as `attach` does.
    """
    wrapped = _wrapped(model, rank, None)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(wrapped.named_parameters()):
        if ".lora_A." in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    return wrapped


def _wrapped(model: PreTrainedModel, rank: int, saved: list[str] | None) -> PreTrainedModel:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise InputError(
            "lora needs peft, which is not installed: pip install 'lsverify[lora]'"
        ) from None

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=targets(model),
        modules_to_save=saved,
        task_type="CAUSAL_LM",
    )
    # peft draws initial values from the global generator, and calls a property that transformers is renaming.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # It then sets for each layer what the layer needs.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
        try:
            wrapped: PreTrainedModel = get_peft_model(model, config)
        except (ValueError, TypeError, AttributeError) as error:
            told = " ".join(str(error).split())[:200]
            raise InputError(
                f"peft puts no adapters on {type(model).__name__}: {told}; train it without lora"
            ) from error
    return wrapped


def targets(model: PreTrainedModel) -> list[str]:
    """The full names of the linear layers that carry an adapter, in the order of the model.

    In a model whose experts are fused into one tensor these are the attention projections only: peft redirects a
    target named gate_proj, up_proj or down_proj there, wherever it is, to the fused experts. Subclasses of a linear
    layer that do not map [.., in] to [.., out] (block-diagonal ones) have no place for an adapter beside them.
    """
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    fused = any(p.ndim == 3 and id(p) not in convolutions for p in model.parameters())
    left_out = {"gate_proj", "up_proj", "down_proj"} if fused else set()
    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        *parents, leaf = name.split(".")
        if isinstance(module, nn.Linear | Conv1D) and module is not head and _is_plain(module):
            if leaf not in left_out and "indexer" not in parents:
                found.append(name)
    return found


def _is_plain(module: nn.Linear | Conv1D) -> bool:
    """Whether it maps rows [b, in] to rows [b, out]."""
    if type(module) in (nn.Linear, Conv1D):
        return True
    width, out = module.weight.shape[1], module.weight.shape[0]
    try:
        with torch.no_grad():
            mapped: Tensor = module(module.weight.new_zeros(1, width))
            return mapped.shape == (1, out)
    except RuntimeError:
        return False


def _saved_module(model: PreTrainedModel) -> str:
    """The head's name; where the head is tied, the last module with parameters of its own after the blocks."""
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        return names[id(head)]
    last = [
        module
        for module in getattr(model, model.base_model_prefix).children()
        if not isinstance(module, nn.ModuleList | nn.Embedding)
        and any(True for _ in module.parameters())
    ][-1]
    return names[id(last)]


@torch.no_grad()
def _redraw(wrapped: nn.Module, generator: torch.Generator) -> None:
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    for name, parameter in sorted(trained.items()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        noise /= math.sqrt(parameter.shape[-1])
        if ".lora_" in name:
            parameter.copy_(noise if ".lora_A." in name else 0.3 * noise)
        else:
            parameter.copy_(parameter.to(torch.float64) + 0.2 * noise)

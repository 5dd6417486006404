"""Small seeded models of real architectures, local folders and one pretrained model, by name.

Every architecture runs the library's own model code at a size where an oracle-precision step takes milliseconds. No
parameter and no buffer that the forward pass reads is constant: norm weights are all ones at birth and biases all
zero, and a fault that swaps or skips such a tensor would stay invisible. All values come from one generator, drawn in
float64 and rounded once, so a float32 model is the rounded float64 model of the same seed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from lsverify import pretrained, shrink
from lsverify.cases import is_warm
from lsverify.continuable import require_continuable
from lsverify.errors import InputError
from lsverify.families import TINY
from lsverify.families.sizes import VOCABULARY
from lsverify.fixture_files import warm_folder
from lsverify.precision import computing, weight_dtype
from lsverify.quantise import quantise

ATTENTION = ("sdpa", "eager")
# A type that no rule makes small is refused before it fills the memory.
MOST_PARAMETERS = 3_000_000


def build(
    arch: str,
    *,
    seed: int,
    dtype: str = "float64",
    lora: bool = False,
    quantised: bool = False,
    tied: bool = False,
    train: bool = True,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """A causal language model that a path can train.

    `arch` is a tiny family, `smollm2-135m`, a warm start (`warm:llama`, see `lsverify.warm_starts`), a local folder, or
    any model type that the library lists as a causal language model (see `lsverify.shrink`), looked up in this order.

    `seed` decides every value of a tiny model and, with `lora`, of the adapters; it leaves the global random state
    alone. `dtype` is a precision of `lsverify.precision`: float64 and float32 hold for every parameter and buffer;
    bfloat16 leaves in float32 what the library keeps there; bfloat16-autocast has float32 weights. `lora` freezes the
    model under peft adapters (see `lsverify.adapters`); the model returned is then peft's wrapper. `quantised` rounds
    the base under them to NF4 (see `lsverify.quantise`). `tied` ties the head of a small model to its embedding.
    `train` chooses train() or eval(); every dropout is zero in both. `attention` is the library's implementation,
    sdpa or eager; eager where a model has no other.

    Raises `InputError` for an unknown name or dtype, a folder that cannot be used, a type that cannot be built small
    or continued from a state, `quantised` without `lora`, and `tied` where the head is what it is.
    """
    weight_dtype(dtype)
    if attention not in ATTENTION:
        raise InputError(f"attention {attention!r} is not known: use one of {', '.join(ATTENTION)}")
    if quantised and not lora:
        raise InputError(
            "quantised needs lora: a 4-bit base is frozen, so only adapters over it train"
        )
    if is_small(arch):
        model = _small(arch, seed=seed, dtype=dtype, attention=attention, tied=tied)
    elif tied:
        raise InputError(f"tied is for small models: {arch} has the head it was trained with")
    elif arch == pretrained.SMOLLM2:
        model = pretrained.smollm2(dtype=dtype, attention=attention)
    elif is_warm(arch):
        model = pretrained.load(warm_folder(arch), dtype=dtype, attention=attention)
    else:
        model = pretrained.load(arch, dtype=dtype, attention=attention)
    if quantised:
        quantise(model)
    if lora:
        from lsverify.adapters import attach

        model = attach(model, seed=seed)
    return model.train(train)


def is_small(arch: str) -> bool:
    """Whether `build` makes a model of a few thousand numbers of this name, rather than read one from disk."""
    return arch in TINY or not (arch == pretrained.SMOLLM2 or is_warm(arch) or Path(arch).is_dir())


def unknown(arch: str) -> InputError:
    """The error for a name that `build` does not know."""
    return InputError(
        f"architecture {arch!r} is not known: use one of {', '.join(sorted(TINY))}, "
        f"{pretrained.SMOLLM2}, warm:llama and other warm starts, a local folder with config.json and safetensors weights, or a model type of "
        "transformers (lsverify archs lists them)"
    )


def _small(arch: str, *, seed: int, dtype: str, attention: str, tied: bool) -> PreTrainedModel:
    """A model of a tiny family, or of a type shrunk by rule."""
    model_class: Any = AutoModelForCausalLM
    if arch in TINY:
        config = TINY[arch]()
    elif arch in shrink.model_types():
        require_usable(arch)
        config, model_class = shrink.shrunk(arch)
    else:
        raise unknown(arch)
    if tied:
        config.tie_word_embeddings = True
    model = tiny(config, seed=seed, dtype=dtype, attention=attention, model_class=model_class)
    if tied and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise InputError(f"tied is not for {arch}: its head cannot be tied to its embedding")
    return model


@functools.cache
def require_usable(model_type: str) -> None:
    """Raises `InputError`, one line, for a type that cannot be built small or cannot be continued from a state."""
    config, model_class = shrink.shrunk(model_type)
    try:
        with torch.device("meta"):
            model = model_class._from_config(config)
    except Exception as error:  # whatever a model's own code raises on sizes it was not written for
        raise shrink.cannot(model_type, "it cannot be built small", error) from error
    if (count := sum(p.numel() for p in model.parameters())) > MOST_PARAMETERS:
        name, largest = max(model.named_parameters(), key=lambda item: item[1].numel())
        raise shrink.cannot(
            model_type,
            f"it stays large, with {count:,} parameters, {name} {tuple(largest.shape)} the largest of them",
        )
    try:
        model = tiny(config, seed=0, dtype="float64", model_class=model_class)
    except Exception as error:
        raise shrink.cannot(model_type, "it cannot be built small", error) from error
    with computing(model, "float64"):
        require_continuable(model, name=f"model type {model_type!r}", vocabulary=VOCABULARY)


def tiny(
    config: PreTrainedConfig,
    *,
    seed: int,
    dtype: str,
    attention: str = "sdpa",
    model_class: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """A model of `config` with every value drawn from `seed`, on the CPU, in train()."""
    # The library initialises from the global generator, whatever is drawn over it afterwards.
    with torch.random.fork_rng(devices=[]):
        make = getattr(model_class, "from_config", None) or model_class._from_config
        model: PreTrainedModel = make(
            config,
            dtype=torch.float32,
            attn_implementation=pretrained.implementation(config, attention),
        )
    # The grouped matrix product, the library's choice for experts, refuses float64.
    model.config._experts_implementation = "eager"
    pretrained.cast(model, dtype)
    redraw(model, torch.Generator().manual_seed(seed))
    return model.train()


@torch.no_grad()
def redraw(model: nn.Module, generator: torch.Generator) -> None:
    """Give every parameter and persistent buffer of `model` a value from `generator`, in the order of their names.

    Matrices are normal with variance 1/fan-in, embeddings standard normal; vectors are spread around the value they
    have in a fresh model. Rotary frequencies (buffers that are not saved) are left alone: they follow from the config.
    """
    saved = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in saved
    }
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, tensor in sorted(tensors.items()):
        if not tensor.is_floating_point():
            tensor.copy_(_chosen(name, tensor, model, generator))
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        value = noise if id(tensor) in embeddings else _drawn(name, tensor, noise)
        tensor.copy_(value)
    derive(model)


@torch.no_grad()
def derive(model: nn.Module) -> None:
    """Make anew the buffers that are saved but follow from others, in the precision of the model."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "decay_factors"):
            # Apart from the slope, or rounded apart from it, a block of tokens and its tokens would decay differently.
            names = ("query_decay", "key_decay", "diagonal_decay")
            for name, value in zip(names, module.decay_factors(module.slope_rate), strict=True):
                module.get_buffer(name).copy_(value)


def _chosen(name: str, tensor: Tensor, model: nn.Module, generator: torch.Generator) -> Tensor:
    """A value for an integer buffer: a table from tokens [V] to k experts gets k different ones for each token."""
    owner, _, leaf = name.rpartition(".")
    if leaf != "tid2eid":
        return tensor
    router: Any = model.get_submodule(owner)
    scores = torch.rand(len(tensor), router.num_experts, generator=generator)
    return scores.argsort(dim=-1)[:, : tensor.shape[1]]


def _drawn(name: str, tensor: Tensor, noise: Tensor) -> Tensor:
    """A value for one tensor: its scale keeps activations and gradients of order one."""
    leaf = name.rpartition(".")[2]
    if leaf == "A_log":
        # Decay rates from 0.01 to 1 a token: some heads of the delta net remember a hundred tokens, some one.
        uniform: Tensor = torch.special.erf(noise / math.sqrt(2.0))
        return math.log(0.1) + math.log(10.0) * uniform
    if leaf == "slope_rate":
        # Lightning attention's decay: positive, and a ladder over heads and layers.
        return tensor.to(torch.float64) * torch.exp(0.2 * noise)
    if leaf == "dt_bias":
        return 0.5 * noise
    if leaf == "e_score_correction_bias":
        return 0.05 * noise
    if re.search(r"\bgate\.weight$", name):
        # A router's scores must differ clearly: top-k margins then stand far above the rounding floor.
        return 2.0 * noise / math.sqrt(tensor.shape[-1])
    if tensor.ndim < 2:
        if leaf == "bias":
            return 0.1 * noise
        # Around one for a norm, around zero for a norm that adds one; a small scale stays as small as it is.
        centre = tensor.to(torch.float64).mean()
        return centre + 0.2 * (min(abs(float(centre)), 1.0) or 1.0) * noise
    # Fused experts are [experts, out, in]; a depthwise convolution is [channels, 1, kernel]: both end in the fan-in.
    return noise / math.sqrt(tensor.shape[-1])


__all__ = ["ATTENTION", "TINY", "VOCABULARY", "build", "redraw", "tiny", "unknown"]

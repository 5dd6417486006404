"""Families that carry a state instead of keys, or beside them: selective scans, gated recurrences, lightning attention.

Sizes are the smallest at which every kind of layer, head and group is there more than once and none equals another by
chance. Kernel chunks are 4 tokens or so, so that short prompts cross them. gemma3n and gemma4 are here for layers
that read the keys of an earlier layer: their state, too, is not one cache layer per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    NemotronHConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    Zamba2Config,
    ZambaConfig,
    xLSTMConfig,
)

VOCABULARY = 97
# A padding id would zero its embedding row's gradient, and no token of a tiny vocabulary is special.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def _mamba() -> PreTrainedConfig:
    """Selective scan with one decay per channel and state."""
    return MambaConfig(
        hidden_size=32,
        state_size=5,
        num_hidden_layers=3,
        conv_kernel=4,
        time_step_rank=3,
        **_COMMON,
    )


def _falcon_mamba() -> PreTrainedConfig:
    """The same scan, with norms on its step, B and C."""
    return FalconMambaConfig(
        hidden_size=32,
        state_size=5,
        num_hidden_layers=3,
        conv_kernel=4,
        time_step_rank=3,
        **_COMMON,
    )


def _jamba() -> PreTrainedConfig:
    """Selective scans and one attention layer, experts in every other layer."""
    return JambaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=5,
        mamba_d_conv=4,
        mamba_dt_rank=3,
        **_ATTENTION,
        **_COMMON,
    )


def _zamba() -> PreTrainedConfig:
    """Selective scans in two heads, and one attention block shared by two layers."""
    return ZambaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        layers_block_type=["mamba", "mamba", "hybrid", "mamba", "hybrid"],
        n_mamba_heads=2,
        mamba_d_state=5,
        mamba_d_conv=4,
        mamba_dt_rank=3,
        **(_ATTENTION | {"num_key_value_heads": 4}),
        **_COMMON,
    )


def _mamba2() -> PreTrainedConfig:
    """State-space heads with one decay each, two groups, a step limited from both sides."""
    return Mamba2Config(
        hidden_size=32,
        state_size=6,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=16,
        n_groups=2,
        chunk_size=4,
        time_step_limit=(0.3, 2.0),
        **_COMMON,
    )


def _bamba() -> PreTrainedConfig:
    """Mamba-2 layers and one attention layer with rotary positions."""
    return BambaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        attn_layer_indices=[2],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=6,
        mamba_chunk_size=4,
        **_ATTENTION,
        **_COMMON,
    )


def _falcon_h1() -> PreTrainedConfig:
    """Attention and a Mamba-2 mixer side by side in every layer; the gate multiplies, without a norm."""
    return FalconH1Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        mamba_d_ssm=48,
        mamba_n_heads=4,
        mamba_d_head=12,
        mamba_n_groups=2,
        mamba_d_state=6,
        mamba_chunk_size=4,
        **_ATTENTION,
        **_COMMON,
    )


def _zamba2() -> PreTrainedConfig:
    """Mamba-2 layers, and one attention block with adapters of its own in each of two layers; tied embeddings."""
    return Zamba2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        n_mamba_heads=4,
        mamba_ngroups=2,
        mamba_d_state=6,
        chunk_size=4,
        num_mem_blocks=1,
        use_shared_attention_adapter=True,
        adapter_rank=4,
        use_mem_rope=True,
        **(_ATTENTION | {"num_key_value_heads": 4}),
        **_COMMON,
    )


def _nemotron_h() -> PreTrainedConfig:
    """A layer each of Mamba-2, experts, attention and a plain MLP, then Mamba-2 again."""
    return NemotronHConfig(
        hidden_size=32,
        layers_block_type=["mamba", "moe", "attention", "mlp", "mamba"],
        head_dim=8,
        intermediate_size=48,
        ssm_state_size=6,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        conv_kernel=4,
        chunk_size=4,
        n_routed_experts=4,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        **_ATTENTION,
        **_COMMON,
    )


def _granitemoehybrid() -> PreTrainedConfig:
    """Mamba-2 and attention layers over experts with a shared one."""
    return GraniteMoeHybridConfig(
        hidden_size=32,
        intermediate_size=24,
        shared_intermediate_size=24,
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        position_embedding_type="rope",
        num_local_experts=4,
        num_experts_per_tok=2,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=6,
        mamba_chunk_size=4,
        **_ATTENTION,
        **_COMMON,
    )


def _recurrent_gemma() -> PreTrainedConfig:
    """Gated linear recurrences and attention over a window of 8 tokens, 2:1."""
    return RecurrentGemmaConfig(
        hidden_size=32,
        lru_width=32,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_window_size=8,
        block_types=("recurrent", "recurrent", "attention"),
        **_COMMON,
    )


def _minimax() -> PreTrainedConfig:
    """Lightning attention in blocks of 4 tokens, every third layer softmax attention, all over experts."""
    return MiniMaxConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        head_dim=8,
        block_size=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_attn_alpha_factor=1.2,
        full_attn_beta_factor=0.9,
        mlp_alpha_factor=1.1,
        **_ATTENTION,
        **_COMMON,
    )


def _rwkv() -> PreTrainedConfig:
    """Weighted key-value recurrence with token shift. Rescaling is off: it edits the weights as eval() begins."""
    return RwkvConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        attention_hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        context_length=8192,
        rescale_every=0,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )


def _xlstm() -> PreTrainedConfig:
    """Matrix memories in two heads, in the mode that takes any length."""
    return xLSTMConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_heads=2,
        chunk_size=4,
        ffn_round_up_to_multiple_of=8,
        mode="inference",
        **_COMMON,
    )


def _gemma3n() -> PreTrainedConfig:
    """The last two of four layers read keys that earlier ones wrote; a sliding window of 8; sparse activations."""
    return Gemma3nTextConfig(
        hidden_size=32,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        intermediate_size=48,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=8,
        head_dim=8,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.5, 0.0],
        **_ATTENTION,
        **_COMMON,
    )


def _gemma4() -> PreTrainedConfig:
    """Shared keys again, with wider heads in the full-attention layers."""
    return Gemma4TextConfig(
        hidden_size=32,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        intermediate_size=48,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=8,
        head_dim=8,
        global_head_dim=16,
        **_ATTENTION,
        **_COMMON,
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mamba": _mamba,
    "falcon_mamba": _falcon_mamba,
    "jamba": _jamba,
    "zamba": _zamba,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "zamba2": _zamba2,
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granitemoehybrid,
    "recurrent_gemma": _recurrent_gemma,
    "minimax": _minimax,
    "rwkv": _rwkv,
    "xlstm": _xlstm,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
}

"""What every tiny family has in common: a vocabulary of 97, no special tokens, untied embeddings."""

from __future__ import annotations

from typing import Any

VOCABULARY = 97
# A padding id would zero its embedding row's gradient, and no token of a tiny vocabulary is special.
SPECIAL: dict[str, None] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    **SPECIAL,
}
# Grouped-query attention: 4 query heads on 2 key heads.
GROUPED: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

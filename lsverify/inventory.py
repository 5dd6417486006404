"""`lsverify inventory`: what a prompt leaves behind, tensor by tensor, for capacity planning before any training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lsverify.errors import InputError
from lsverify.models import build
from lsverify.paths import CHUNK
from lsverify.precision import computing
from lsverify.prompt import capture


def rows_of(arch: str, *, prompt_length: int, dtype: str) -> list[dict[str, Any]]:
    """The boundary state of a prompt of that many tokens (all but the last captured), one row per tensor.

    Raises `InputError` for an unknown architecture or dtype, or a prompt below 1 token.
    """
    if prompt_length < 1:
        raise InputError(f"prompt length {prompt_length} is not allowed: use 1 token or more")
    model = build(arch, seed=0, dtype=dtype)
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.arange(prompt_length) % vocabulary
    with computing(model, dtype):
        state = capture(
            model, prompt, boundary=prompt_length - 1, chunk=CHUNK, keep_from=prompt_length - 1
        )
    return [asdict(row) for row in state.inventory()]


def show(rows: list[dict[str, Any]]) -> None:
    """The rows, then bytes by kind and in all."""
    table = Table("layer", "kind", "name", "shape", "dtype", "bytes", pad_edge=False)
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        layer = "-" if row["layer"] is None else str(row["layer"])
        table.add_row(layer, row["kind"], row["name"], shape, row["dtype"], f"{row['bytes']:,}")
    console = Console()
    console.print(table)
    kinds = dict.fromkeys(row["kind"] for row in rows)
    for kind in kinds:
        size = sum(row["bytes"] for row in rows if row["kind"] == kind)
        console.print(f"{kind}: {size:,} bytes", highlight=False)
    console.print(f"in all: {sum(row['bytes'] for row in rows):,} bytes", highlight=False)

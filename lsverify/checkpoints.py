"""Where a training goes on: weights, the optimizer's moments and the step, in one file that is there whole or not at all.

A checkpoint is taken when the prompts change and nothing captured is kept, and random numbers are keyed: nothing else is
needed to go on to the bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from lsverify.observe import restore
from lsverify.optimizers import TorchStep
from lsverify.tensor_files import open_tensors, refuse
from lsverify.whole_files import write_whole

NAME = "checkpoint.safetensors"
WEIGHT, MOMENT = "weight/", "moment/"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """After `step` optimizer steps: trained weights and buffers by name, moments as `TorchStep` names them."""

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, optimizer: TorchStep, step: int) -> Checkpoint:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        weights = {
            name: tensor.detach().clone() for name, tensor in [*trained, *model.named_buffers()]
        }
        return cls(step=step, weights=weights, moments=optimizer.moments())

    def put_back(self, model: nn.Module, optimizer: TorchStep) -> None:
        restore(model, self.weights)
        optimizer.resume(self.moments)

    def write(self, folder: Path) -> None:
        """`checkpoint.safetensors`, the step as JSON in its header. Raises OSError."""
        named = {WEIGHT + name: tensor.contiguous() for name, tensor in self.weights.items()}
        named |= {MOMENT + name: tensor.contiguous() for name, tensor in self.moments.items()}
        write_whole(folder / NAME, save(named, {"step": json.dumps(self.step)}))


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """None where there is none. Raises `InputError` for a malformed file."""
    file = folder / NAME
    if not file.exists():
        return None
    opened = open_tensors(file)
    step = opened.metadata.get("step", "")
    if not step.isdecimal():
        refuse(file, f"has step {step!r} in its header; remove the folder and train again")
    tensors = {key: entry.read() for key, entry in opened.entries.items()}
    return Checkpoint(
        step=int(step),
        weights=_under(WEIGHT, tensors),
        moments=_under(MOMENT, tensors),
    )


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }

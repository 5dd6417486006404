"""Closed-form optimizer steps, written from their formulas: what `optimizer_delta` holds a path's update to.

Clipping scales all gradients by min(1, max_norm / (norm + 1e-6)), as torch does. SGD: theta - lr (g + wd theta).
AdamW (Loshchilov and Hutter 2019, algorithm 2): decay theta by 1 - lr wd, then subtract lr m_hat / (sqrt(v_hat) + eps).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lsverify.paths import Update

Weights = dict[str, Tensor]

# Probes for `optimizer_delta`. AdamW's eps is large enough that rounding noise in a vanishing gradient stays noise, and
# both clip, so that a wrong global norm shows.
PROBES = (
    Update(kind="sgd", lr=0.05, max_grad_norm=0.5),
    Update(kind="adamw", lr=0.01, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5),
)


@dataclass
class ClosedForm:
    """An optimizer's state by parameter name; `step` returns new weights and leaves the old ones alone."""

    update: Update
    # Counted by parameter, as torch does: one without a gradient in a step is corrected for fewer of them.
    steps: dict[str, int] = field(default_factory=dict)
    first: Weights = field(default_factory=dict)
    second: Weights = field(default_factory=dict)

    def step(self, weights: Weights, gradients: Mapping[str, Tensor | None]) -> Weights:
        """One step. A parameter whose gradient is None stays as it is, weight decay included (as in torch)."""
        scale = self._clip([g for g in gradients.values() if g is not None])
        after = dict(weights)
        for name, gradient in gradients.items():
            if gradient is not None:
                after[name] = self._moved(name, weights[name], gradient * scale)
        return after

    def _clip(self, gradients: list[Tensor]) -> float:
        if self.update.max_grad_norm is None:
            return 1.0
        norm = torch.sqrt(sum((g.double().square().sum() for g in gradients), torch.tensor(0.0)))
        return min(1.0, self.update.max_grad_norm / (norm.item() + 1e-6))

    def _moved(self, name: str, value: Tensor, gradient: Tensor) -> Tensor:
        u = self.update
        if u.kind == "sgd":
            return value - u.lr * (gradient + u.weight_decay * value)
        decayed = value * (1 - u.lr * u.weight_decay)
        steps = self.steps[name] = self.steps.get(name, 0) + 1
        beta1, beta2 = u.betas
        zero = torch.zeros_like(gradient)
        self.first[name] = beta1 * self.first.get(name, zero) + (1 - beta1) * gradient
        self.second[name] = beta2 * self.second.get(name, zero) + (1 - beta2) * gradient.square()
        m_hat = self.first[name] / (1 - beta1**steps)
        v_hat = self.second[name] / (1 - beta2**steps)
        return decayed - u.lr * m_hat / (v_hat.sqrt() + u.eps)


class TorchStep:
    """The same step by `torch.optim` on a model's `.grad`, as a trainer takes it."""

    def __init__(self, model: nn.Module, update: Update) -> None:
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._clip = update.max_grad_norm
        if update.kind == "sgd":
            self._optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self._parameters, lr=update.lr, weight_decay=update.weight_decay
            )
        else:
            self._optimizer = torch.optim.AdamW(
                self._parameters,
                lr=update.lr,
                betas=update.betas,
                eps=update.eps,
                weight_decay=update.weight_decay,
            )

    def step(self) -> None:
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def moments(self) -> Weights:
        """Copies of what the optimizer keeps between steps, by parameter and field, written `NAME/FIELD`."""
        return {
            f"{name}/{field}": torch.as_tensor(value).detach().clone()
            for name, parameter in zip(self._names, self._parameters, strict=True)
            for field, value in self._optimizer.state[parameter].items()
            if value is not None
        }

    def resume(self, moments: Mapping[str, Tensor]) -> None:
        """Go on from what `moments` gave."""
        named = dict(zip(self._names, self._parameters, strict=True))
        for key, value in moments.items():
            name, _, field = key.rpartition("/")
            self._optimizer.state[named[name]][field] = value.clone()

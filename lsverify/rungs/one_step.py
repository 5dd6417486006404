"""`optimizer_delta` from files: the parameters after one declared step = the closed-form step on the reference's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from torch import Tensor

from lsverify.compare import compare, message
from lsverify.evidence import Rung
from lsverify.observe import restore, weights_of
from lsverify.optimizers import ClosedForm, TorchStep
from lsverify.paths import Update
from lsverify.referee import Claim, Referee
from lsverify.references import Gradients
from lsverify.rungs.optimizer_delta import dense_gradients, rounding_limits


def one_step(claim: Claim, referee: Referee, update: Update, after: Mapping[str, Tensor]) -> Rung:
    """Compare the change of every trainable parameter. `after`: the parameters after the step, by name."""
    if referee.setting.config.dtype == "bfloat16":
        return Rung(
            name="optimizer_delta",
            status="not_applicable",
            detail="bfloat16 weights round an update away, the reference's too",
        )
    start = _trainable(referee)
    gradients = referee.oracle(claim).gradients
    stepped = ClosedForm(update).step(dict(start), gradients)
    expected: Gradients = {name: stepped[name] - start[name] for name in start}
    actual: Gradients = {name: after[name].double() - start[name] for name in start}
    if referee.setting.oracle is referee.setting.model:
        limits = rounding_limits(expected, start)
    else:
        limits = referee.measured(expected, _native(claim, referee, update, start))
    comparison = compare(expected, actual, limits=limits, slices=referee.slices)
    declared = ", ".join(f"{name} {value}" for name, value in asdict(update).items())
    moved = any(g is not None and bool(g.any()) for g in gradients.values())
    vacuous = comparison.status == "proven_zero" and moved
    detail = f"parameters after 1 step ({declared}); furthest {comparison.worst_parameter}"
    if vacuous:
        detail = f"1 step ({declared}) moves no parameter, though the gradient is not zero"
    elif not comparison.passed:
        detail = f"after 1 step ({declared}): {message(comparison)}"
    return Rung(
        name="optimizer_delta",
        status="vacuous" if vacuous else comparison.status,
        measure=comparison.rel_l2,
        limit=max((t.limit for t in comparison.tensors), default=comparison.limit),
        detail=detail,
    )


def _trainable(referee: Referee) -> dict[str, Tensor]:
    """Copies in float64 of the weights that the step starts from."""
    parameters = referee.setting.model.named_parameters()
    return {name: p.detach().double().clone() for name, p in parameters if p.requires_grad}


def _native(
    claim: Claim, referee: Referee, update: Update, start: Mapping[str, Tensor]
) -> Gradients:
    """What torch's optimizer makes of the reference's gradients in the case's own precision."""
    model = referee.setting.model
    gradients, before = referee.native(claim).gradients, weights_of(model)
    try:
        for name, parameter in model.named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype).clone()
        dense_gradients(model)
        TorchStep(model, update).step()
        return {name: p - start[name] for name, p in _trainable(referee).items()}
    finally:
        model.zero_grad(set_to_none=True)
        restore(model, before)

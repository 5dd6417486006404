"""Faults of the sweep: what comes back through the prompt's state, in the wrong number, place, layer or precision."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.cache import Slot, map_state
from lsverify.faults.catalogue import DECIDED, Fault
from lsverify.faults.honest import Leaves, Sharing, run_prompt
from lsverify.objective import Objective
from lsverify.paths import StepResult, longstraw
from lsverify.problems import Problem
from lsverify.prompt import unwrapped

MISMATCH = r"mismatch"


def state_term_counted_twice(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Two components each send the state's cotangents back."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        return 2 * cotangent

    return Sharing(returned=returned)(model, problem, objective)


def cotangents_averaged_over_siblings(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """What the siblings sent back is divided by their number, where it adds up."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        return cotangent / len(problem.groups[0])

    return Sharing(returned=returned)(model, problem, objective)


def cotangents_in_float32(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Cotangents wait for the sweep in a lower precision."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        return cotangent.float().to(cotangent.dtype)

    return Sharing(returned=returned)(model, problem, objective)


def cotangents_in_bfloat16(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Cotangents are sent to another rank in bfloat16."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        return cotangent.bfloat16().to(cotangent.dtype)

    return Sharing(returned=returned)(model, problem, objective)


def cotangents_in_reverse_order(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Cotangents of a sequence are read with the wrong stride: the last token's goes to the first."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        return cotangent.flip(-2) if cotangent.dim() > 2 else cotangent.flip(-1)

    return Sharing(returned=returned)(model, problem, objective)


def last_layers_state_not_swept(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The state of the last layer is left out of the list that is swept."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        last = unwrapped(model).config.num_hidden_layers - 1
        return None if slot.layer == last else cotangent

    return Sharing(returned=returned)(model, problem, objective)


def first_layers_state_not_swept(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The sweep ends one layer early: the first layer's state gets nothing."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        return None if slot.layer == 0 else cotangent

    return Sharing(returned=returned)(model, problem, objective)


def large_cotangents_clipped(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Cotangents are clipped on their way, as gradients are elsewhere."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        return cotangent.clamp(-1e-2, 1e-2)

    return Sharing(returned=returned)(model, problem, objective)


def cotangent_of_the_last_token_lost(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The newest token of the state is written after its cotangent was read."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        cut = cotangent.clone()
        cut[..., -1, :] = 0
        return cut if cotangent.dim() == 4 else cotangent

    return Sharing(returned=returned)(model, problem, objective)


def swept_over_a_window_only(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The sweep goes back a few tokens and claims to have gone all the way."""
    return replace(
        longstraw(model, problem, objective, policy="window:6", chunk=4), reference="exact"
    )


def first_chunk_not_swept(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The loop over chunks stops before the first one."""
    short = min(problem.prompt_lengths) - 2
    found = longstraw(model, problem, objective, policy=f"window:{max(short, 0)}", chunk=4)
    return replace(found, reference="exact")


def detached_and_claimed_exact(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """No sweep at all, under the claim of the whole gradient."""
    return replace(
        longstraw(model, problem, objective, policy="detach", chunk=4), reference="exact"
    )


def swept_and_claimed_detached(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The whole gradient under the claim of a detached one: right, and not what it says."""
    return replace(
        longstraw(model, problem, objective, policy="exact", chunk=4), reference="detach"
    )


def siblings_share_one_detached_state(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Only the first sibling's branch is tied to the prompt; the others read a constant copy of its state."""
    first: set[int] = set()

    def handed(state: Cache, leaves: Leaves) -> Cache:
        tied = id(state) not in first
        first.add(id(state))
        return map_state(state, lambda slot, t: leaves.get(slot.path, t) if tied else t.detach())

    return Sharing(handed=handed)(model, problem, objective)


def state_kept_in_bfloat16(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The captured state is stored in half precision until it is replayed."""

    def handed(state: Cache, leaves: Leaves) -> Cache:
        def stored(slot: Slot, tensor: Tensor) -> Tensor:
            return tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor

        return map_state(state, stored)

    return Sharing(claim="detach", handed=handed)(model, problem, objective)


def state_kept_in_float32(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The captured state is stored in float32, whatever the model computes in."""

    def handed(state: Cache, leaves: Leaves) -> Cache:
        def stored(slot: Slot, tensor: Tensor) -> Tensor:
            return tensor.float().to(tensor.dtype) if tensor.is_floating_point() else tensor

        return map_state(state, stored)

    return Sharing(claim="detach", handed=handed)(model, problem, objective)


def oldest_token_evicted(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A full pool drops the oldest token of every prompt's keys and values."""

    def handed(state: Cache, leaves: Leaves) -> Cache:
        def emptied(slot: Slot, tensor: Tensor) -> Tensor:
            if slot.kind not in ("attention", "sliding", "latent") or tensor.dim() < 3:
                return tensor
            dropped = tensor.detach().clone()
            dropped[..., 0, :] = 0
            return dropped

        return map_state(state, emptied)

    return Sharing(claim="detach", handed=handed)(model, problem, objective)


def state_of_another_prompt(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The slot of a prompt's state was given to another prompt whose first token differs."""

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        other = tokens.clone()
        other[:1] = (other[:1] + 1) % 97
        return run_prompt(model, other)

    return Sharing(claim="detach", prompt=prompt)(model, problem, objective)


FAULTS = (
    Fault(path=state_term_counted_twice, report="LN-11", rung="gradient", points_at=MISMATCH),
    Fault(path=cotangents_averaged_over_siblings, report="", rung="gradient", points_at=MISMATCH),
    Fault(path=cotangents_in_float32, report="PR-05", rung="gradient", points_at=MISMATCH),
    Fault(path=cotangents_in_bfloat16, report="PR-05", rung="gradient", points_at=MISMATCH),
    Fault(path=cotangents_in_reverse_order, report="ST-13", rung="gradient", points_at=MISMATCH),
    Fault(path=last_layers_state_not_swept, report="ST-16", rung="gradient", points_at=MISMATCH),
    Fault(path=first_layers_state_not_swept, report="ST-16", rung="gradient", points_at=MISMATCH),
    Fault(path=large_cotangents_clipped, report="", rung="gradient", points_at=MISMATCH),
    Fault(
        path=cotangent_of_the_last_token_lost, report="ST-18", rung="gradient", points_at=MISMATCH
    ),
    Fault(path=swept_over_a_window_only, report="ST-18", rung="gradient", points_at=MISMATCH),
    Fault(path=first_chunk_not_swept, report="ST-18", rung="gradient", points_at=MISMATCH),
    Fault(path=detached_and_claimed_exact, report="ST-16", rung="gradient", points_at=MISMATCH),
    Fault(path=swept_and_claimed_detached, report="ST-09", rung="gradient", points_at=MISMATCH),
    Fault(path=siblings_share_one_detached_state, report="", rung="gradient", points_at=MISMATCH),
    Fault(path=state_kept_in_bfloat16, report="PR-01", rung="forward", points_at=DECIDED),
    Fault(path=state_kept_in_float32, report="PR-03", rung="forward", points_at=DECIDED),
    Fault(
        path=oldest_token_evicted,
        report="CS-01",
        rung="forward",
        points_at=r"response \d+ token",
        elsewhere={"glm_moe_dsa": ("forward", DECIDED)},
    ),
    Fault(
        path=state_of_another_prompt,
        report="CS-01",
        rung="forward",
        points_at=r"response \d+ token",
        elsewhere={"glm_moe_dsa": ("forward", DECIDED)},
    ),
)

"""What a path leaves behind reaches neither the references of its own case nor the next case."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from judged import rung, statuses
from torch.nn import functional

from lsverify import full_autograd
from lsverify.cases import QUICK
from lsverify.evidence import CaseConfig
from lsverify.ladder import judge
from lsverify.models import build
from lsverify.put_back import PutBack


def doubled_embedding_gradient(model, problem, objective):
    model.get_input_embeddings().weight.register_hook(lambda gradient: 2 * gradient)
    return full_autograd(model, problem, objective)


def scaled_layer(model, problem, objective):
    model.model.layers[0].register_forward_hook(lambda module, args, output: 1.1 * output)
    return full_autograd(model, problem, objective)


def other_activation(model, problem, objective):
    plain = functional.silu
    functional.silu = lambda x, inplace=False: 1.01 * plain(x)
    return full_autograd(model, problem, objective)


def other_class(model, problem, objective):
    kind = type(model.model.layers[0])
    plain = kind.forward
    kind.forward = lambda self, *args, **kwargs: 1.01 * plain(self, *args, **kwargs)
    return full_autograd(model, problem, objective)


def other_config(model, problem, objective):
    model.config.use_cache = False
    return full_autograd(model, problem, objective)


def no_gradients_any_more(model, problem, objective):
    result = full_autograd(model, problem, objective)
    torch.set_grad_enabled(False)
    return result


def written_problem(model, problem, objective):
    problem.responses[0].old_logp[:] = 0
    return full_autograd(model, problem, objective)


LEFT_BEHIND = {
    doubled_embedding_gradient: "embed_tokens.weight hooks was 0 and is 1",
    scaled_layer: "model.layers.0._forward_hooks was 0 hooks",
    other_activation: "torch.nn.functional.silu was replaced",
    other_class: "LlamaDecoderLayer.forward was replaced",
    other_config: "config.use_cache was True and is False",
    no_gradients_any_more: "torch grad mode was True and is False",
    written_problem: "the problem's own tensors were written to",
}


@pytest.mark.parametrize("path", LEFT_BEHIND, ids=lambda path: path.__name__)
def test_it_is_named_and_the_next_case_starts_clean(path):
    config = CaseConfig(arch="llama", require="gradient", **QUICK)
    tampered = judge(config.model_copy(update={"candidate": f"{__name__}:{path.__name__}"}))
    assert rung(tampered, "execution").status == "failed"
    assert LEFT_BEHIND[path] in rung(tampered, "execution").detail
    honest = judge(config.model_copy(update={"candidate": "lsverify.faults.honest:dense"}))
    assert honest.reached, statuses(honest)


KEPT = {}


def writes_to_what_it_returned(model, problem, objective):
    """Right the first time; the next run adds to the gradients and log-probs that the first one left."""
    result = full_autograd(model, problem, objective)
    for name, parameter in model.named_parameters():
        parameter.grad = KEPT.setdefault(name, torch.zeros_like(parameter.grad)).add_(
            parameter.grad
        )
    rows = [KEPT.setdefault(i, row.clone()).add_(0) for i, row in enumerate(result.log_probs)]
    return replace(result, log_probs=tuple(rows))


def test_gradients_are_taken_out_of_the_paths_reach():
    config = CaseConfig(arch="llama", require="gradient", **QUICK)
    found = judge(config.model_copy(update={"candidate": f"{__name__}:writes_to_what_it_returned"}))
    assert rung(found, "gradient").status == "nondeterministic"


def test_containers_stay_the_same_objects():
    model = build("llama", seed=0)
    hooks, parameters = model._forward_hooks, model.lm_head._parameters
    around = PutBack(model)
    weight = model.lm_head.weight
    model.register_forward_hook(print)
    model.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
    model.eval()
    model.extra = 3
    weight.requires_grad_(False)
    around.put_back()
    assert model._forward_hooks is hooks
    assert not hooks
    assert model.lm_head._parameters is parameters
    assert model.lm_head.weight is weight
    assert weight.requires_grad
    assert model.training
    assert not hasattr(model, "extra")


def test_random_state_and_switches_are_restored():
    model = build("llama", seed=0)
    around = PutBack(model)
    expected = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    torch.set_default_dtype(torch.float64)
    around.put_back()
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert (np.random.get_state()[1] == expected[2]).all()
    assert torch.get_default_dtype() == torch.float32


def test_an_untouched_model_has_nothing_to_note():
    model = build("glm_moe_dsa", seed=0)
    around = PutBack(model)
    model(input_ids=torch.arange(9)[None])
    assert around.noted() == []

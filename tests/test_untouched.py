from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError
from lsverify.models import build
from lsverify.untouched import Untouched, require_no_gradients, scratch

ARCHS = sorted(DEFAULT_ARCHS)
TOKENS = torch.arange(12)[None]


def backward(model):
    model(input_ids=TOKENS, use_cache=False).logits.sum().backward()


def up(model):
    return model.model.layers[0].mlp.up_proj


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("train", [True, False])
def test_a_forward_and_backward_pass_changes_nothing_but_gradients(arch, train):
    model = build(arch, seed=0, dtype="float32", train=train)
    before = Untouched(model)
    backward(model)
    assert before.changes() == []
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_an_adapter_wrapper_is_left_alone_too():
    model = build("llama", seed=0, dtype="float32", lora=True)
    before = Untouched(model)
    backward(model)
    with model.disable_adapter():
        model(input_ids=TOKENS)
    assert before.changes() == []


def weight_in_place(model):
    with torch.no_grad():
        up(model).weight[2, 3] += 1.0


def weight_behind_the_version_counter(model):
    up(model).weight.data[2, 3] += 1.0


def sign_of_a_zero(model):
    model.model.zero.neg_()


def weight_replaced(model):
    up(model).weight = nn.Parameter(up(model).weight.detach().clone())


def weight_cast(model):
    up(model).weight.data = up(model).weight.data.double()


def frozen(model):
    up(model).weight.requires_grad_(False)


def buffer_changed(model):
    model.model.rotary_emb.inv_freq.mul_(1.5)


def buffer_removed(model):
    del model.model.zero


def tensor_left(model):
    model.model.offset = torch.ones(2)


def mode_flipped(model):
    model.eval()


def one_mode_flipped(model):
    up(model).eval()


def module_replaced(model):
    model.model.layers[0].mlp.up_proj = copy.deepcopy(up(model))


def forward_replaced(model):
    up(model).forward = lambda hidden: hidden


def flag_left(model):
    model.model.offset = 3


def forward_hook_left(model):
    up(model).register_forward_hook(lambda *_: None)


def gradient_hook_left(model):
    up(model).weight.register_hook(lambda gradient: 2 * gradient)


def accumulation_hook_left(model):
    up(model).weight.register_post_accumulate_grad_hook(lambda _: None)


def torch_random_numbers(model):
    torch.rand(1)


def torch_reseeded(model):
    torch.manual_seed(torch.initial_seed() + 1)


def python_random_numbers(model):
    random.random()


def numpy_random_numbers(model):
    np.random.rand()


FAULTS = {
    weight_in_place: "parameter model.layers.0.mlp.up_proj.weight changed: 1 of 3840 elements, first at [2, 3]",
    weight_behind_the_version_counter: "parameter model.layers.0.mlp.up_proj.weight changed: 1 of 3840",
    sign_of_a_zero: "buffer model.zero changed: 1 of 1 elements, first at [] from 0.0 to -0.0",
    weight_replaced: "parameter model.layers.0.mlp.up_proj.weight was replaced by another tensor object",
    weight_cast: "torch.float32 [80, 48] became torch.float64 [80, 48]",
    frozen: "model.layers.0.mlp.up_proj.weight.requires_grad was True and is False",
    buffer_changed: "buffer model.rotary_emb.inv_freq changed: 8 of 8 elements",
    buffer_removed: "buffer model.zero was removed",
    tensor_left: "tensor model.offset was added",
    mode_flipped: "training was True and is False (and ",
    one_mode_flipped: "model.layers.0.mlp.up_proj.training was True and is False",
    module_replaced: "module model.layers.0.mlp.up_proj was Linear ",
    forward_replaced: "model.layers.0.mlp.up_proj.forward was absent and is function ",
    flag_left: "model.offset was absent and is 3",
    forward_hook_left: "model.layers.0.mlp.up_proj._forward_hooks was 0 hooks and is 1 hooks",
    gradient_hook_left: "model.layers.0.mlp.up_proj.weight hooks was 0 and is 1",
    accumulation_hook_left: "model.layers.0.mlp.up_proj.weight post-accumulate hooks was 0 and is 1",
    torch_random_numbers: "random state of torch was advanced or reseeded",
    torch_reseeded: "random state of torch was advanced or reseeded",
    python_random_numbers: "random state of python was advanced or reseeded",
    numpy_random_numbers: "random state of numpy was advanced or reseeded",
}


@pytest.fixture
def kept_random_state():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    restores = (torch.set_rng_state, random.setstate, np.random.set_state)
    for restore, state in zip(restores, states, strict=True):
        restore(state)


@pytest.mark.usefixtures("kept_random_state")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_planted_change_is_named(fault):
    model = build("llama", seed=0, dtype="float32")
    model.model.register_buffer("zero", torch.tensor(0.0))
    before = Untouched(model)
    fault(model)
    changes = before.changes()
    assert any(FAULTS[fault] in change for change in changes), changes


def test_a_global_switch_left_on_is_named():
    model = build("llama", seed=0, dtype="float32")
    before = Untouched(model)
    undo = []
    try:
        torch.set_default_dtype(torch.float64)
        undo.append(partial(torch.set_default_dtype, torch.float32))
        torch.set_grad_enabled(False)
        undo.append(partial(torch.set_grad_enabled, True))
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        undo.append(handle.remove)
        changes = before.changes()
    finally:
        for restore in undo:
            restore()
    assert changes == [
        "torch.nn _global_forward_hooks was 0 and is 1",
        "torch default dtype was torch.float32 and is torch.float64",
        "torch grad mode was True and is False",
    ]
    assert before.changes() == []


def test_a_change_in_one_of_two_tied_weights_is_named_under_both():
    model = build("llama", seed=0, dtype="float32")
    model.lm_head.weight = model.model.embed_tokens.weight
    before = Untouched(model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    names = [change.split()[1] for change in before.changes()]
    assert names == ["model.embed_tokens.weight", "lm_head.weight"]


def test_untying_weights_is_named():
    model = build("llama", seed=0, dtype="float32")
    model.lm_head.weight = model.model.embed_tokens.weight
    before = Untouched(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert "parameter lm_head.weight was replaced by another tensor object" in before.changes()


def test_gradients_from_before_the_step_are_refused():
    model = build("llama", seed=0, dtype="float32")
    require_no_gradients(model)
    backward(model)
    with pytest.raises(InputError, match=r"embed_tokens.weight.grad is not None before the step"):
        require_no_gradients(model)
    model.zero_grad(set_to_none=True)
    require_no_gradients(model)


def test_what_the_models_own_code_leaves_behind_is_not_the_steps():
    model = build("recurrent_gemma", seed=0)
    states = [name for name in scratch(model) if name.endswith("recurrent_states")]
    assert states
    assert not any(name.startswith(("parameter", "buffer")) for name in scratch(model))
    before = Untouched(model)
    model(input_ids=torch.zeros(2, 3, dtype=torch.long), use_cache=False)
    assert not [line for line in before.changes() if "recurrent_states" in line]
    assert scratch(build("llama", seed=0)) == frozenset()


@pytest.mark.parametrize("arch", ["roberta", "xmod"])
def test_it_is_asked_with_positions_where_a_model_would_count_them_from_padding(arch):
    assert scratch(build(arch, seed=0)) == frozenset()


def test_asking_for_it_leaves_nothing_behind():
    model = build("recurrent_gemma", seed=0)
    held = {name: value for module in model.modules() for name, value in vars(module).items()}
    scratch(model)
    after = {name: value for module in model.modules() for name, value in vars(module).items()}
    assert held.keys() == after.keys()
    assert all(held[name] is after[name] for name in held)

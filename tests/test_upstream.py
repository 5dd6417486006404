"""Faults of transformers that lsverify works around: each test asserts what a right library would do.

They are expected to fail, strictly: one that passes tells that the library has mended it and that the code around it
can go. `docs/upstream.md` describes each. Only library code runs here, with the library's own caches.
"""

import pytest
import torch
from small_steps import tokens
from test_continuation import built
from transformers.cache_utils import DynamicCache

from lsverify.families.state_space import FAMILIES
from lsverify.models import TINY, tiny
from lsverify.precision import computing

PROMPT, BRANCH = tokens(9), tokens(4, 1)


def fault(reason, raises=AssertionError):
    return pytest.mark.xfail(strict=True, raises=raises, reason=reason)


def logits(model, rows, start=0, **options):
    """Logits [n, T, V] of rows [n, T] at positions from `start`."""
    rows = rows if rows.dim() == 2 else rows[None]
    positions = torch.arange(start, start + rows.shape[1]).expand_as(rows)
    with computing(model, "float64"):
        return model(input_ids=rows, position_ids=positions, **options).logits


@torch.no_grad()
def uncached(model, rows, last):
    return logits(model, rows, use_cache=False)[:, -last:]


def close(found, expected):
    assert (found - expected).norm() <= 1e-10 * expected.norm()


@torch.no_grad()
def prefilled(model, rows=PROMPT):
    cache = DynamicCache(config=model.config)
    logits(model, rows, cache=cache, use_cache=True)
    return cache


def continued(model, cache, branch):
    return logits(model, branch, len(PROMPT), cache=cache, use_cache=True)


SELECTIVE = ("mamba", "falcon_mamba", "jamba", "zamba")
MAMBA2 = ("mamba2", "bamba", "falcon_h1", "zamba2", "nemotron_h", "granitemoehybrid")


@fault("the scan of several tokens starts from zero")
@pytest.mark.parametrize("name", SELECTIVE)
def test_a_selective_scan_of_several_tokens_continues_from_its_state(name):
    model = built(name)
    found = continued(model, prefilled(model), BRANCH).detach()
    close(found, uncached(model, torch.cat([PROMPT, BRANCH]), len(BRANCH)))


@fault("the new state is written into the old one", raises=RuntimeError)
@pytest.mark.parametrize("name", SELECTIVE + MAMBA2)
def test_one_token_from_a_state_can_be_differentiated(name):
    model = built(name)
    continued(model, prefilled(model), BRANCH[:1]).square().sum().backward()


@fault("the step of a single token is not limited")
def test_one_token_has_the_step_limit_of_many():
    model = built("mamba2")
    with torch.no_grad():
        found = continued(model, prefilled(model), BRANCH[:1])
    close(found, uncached(model, torch.cat([PROMPT, BRANCH[:1]]), 1))


@fault("positions of a chunk are counted from zero")
def test_bamba_counts_positions_on_from_its_cache():
    model = built("bamba")
    with torch.no_grad(), computing(model, "float64"):
        found = model(input_ids=BRANCH[None], cache=prefilled(model), use_cache=True).logits
    close(found, uncached(model, torch.cat([PROMPT, BRANCH]), len(BRANCH)))


@fault("a chunk is convolved as if nothing came before")
def test_recurrent_gemma_continues_with_several_tokens():
    model = built("recurrent_gemma")
    with torch.no_grad():
        found = continued(model, prefilled(model), BRANCH)
    close(found, uncached(model, torch.cat([PROMPT, BRANCH]), len(BRANCH)))


@fault("the state is the module's, whatever cache is passed")
def test_recurrent_gemma_keeps_two_sequences_apart():
    model = built("recurrent_gemma")
    cache = prefilled(model)
    prefilled(model, tokens(5, 2))
    with torch.no_grad():
        found = continued(model, cache, BRANCH[:1])
    close(found, uncached(model, torch.cat([PROMPT, BRANCH[:1]]), 1))


@fault("recurrences see the padding on their left")
@pytest.mark.parametrize("name", ["recurrent_gemma", "rwkv", "xlstm"])
def test_padding_on_the_left_changes_nothing(name):
    model = built(name)
    padding = 3
    rows = torch.cat([torch.zeros(padding, dtype=torch.long), PROMPT])[None]
    mask = (torch.arange(rows.shape[1]) >= padding).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad(), computing(model, "float64"):
        output = model(input_ids=rows, attention_mask=mask, position_ids=positions, use_cache=False)
    close(output.logits[:, padding:], uncached(model, PROMPT, len(PROMPT)))


@fault("only its own cache class is taken", raises=ValueError)
def test_minimax_takes_the_librarys_cache():
    model = built("minimax")
    with torch.no_grad():
        found = continued(model, prefilled(model), BRANCH)
    close(found, uncached(model, torch.cat([PROMPT, BRANCH]), len(BRANCH)))


@fault("all layers' states are slices of one tensor that is written into", raises=RuntimeError)
def test_rwkv_can_be_differentiated_from_a_state():
    model = built("rwkv")
    with computing(model, "float64"):
        with torch.no_grad():
            state = model(input_ids=PROMPT[None], use_cache=True).state
        model(input_ids=BRANCH[None], state=state, use_cache=True).logits.square().sum().backward()


@fault("one token is mixed with every row's predecessor", raises=(AssertionError, RuntimeError))
def test_rwkv_continues_several_rows_with_one_token():
    model, rows = built("rwkv"), torch.stack([PROMPT, tokens(9, 3)])
    with torch.no_grad(), computing(model, "float64"):
        state = model(input_ids=rows, use_cache=True).state
        found = model(input_ids=BRANCH[:2, None], state=state, use_cache=True).logits
    close(found, uncached(model, torch.cat([rows, BRANCH[:2, None]], 1), 1))


def xlstm(width):
    config = FAMILIES["xlstm"]()
    config.hidden_size = config.embedding_dim = width
    return tiny(config, seed=0, dtype="float64", attention="eager")


@fault("the cache rounds head sizes to 64 where the model does not", raises=RuntimeError)
def test_xlstm_has_a_cache_of_any_width():
    with computing(model := xlstm(32), "float64"):
        model(input_ids=PROMPT[None], use_cache=True)


@fault("states are copied into those they came from", raises=RuntimeError)
def test_xlstm_can_be_differentiated_from_a_state():
    with computing(model := xlstm(128), "float64"):
        with torch.no_grad():
            cache = model(input_ids=PROMPT[None], use_cache=True).cache
        model(input_ids=BRANCH[None], cache=cache, use_cache=True).logits.square().sum().backward()


@fault("beyond max_inference_chunksize, eval() runs without autograd")
def test_xlstm_in_eval_trains_all_its_parameters_at_any_length():
    model = xlstm(128).eval()
    model.config.max_inference_chunksize = 4
    logits(model, PROMPT, use_cache=False).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.backbone.blocks.parameters())


@fault("a mask as long as the whole sequence does not fit the chunk", raises=RuntimeError)
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_a_mask_over_prompt_and_branch_may_accompany_the_branch(name):
    model = built(name)
    mask = torch.ones(1, len(PROMPT) + len(BRANCH), dtype=torch.long)
    with torch.no_grad(), computing(model, "float64"):
        model(input_ids=BRANCH[None], cache=prefilled(model), attention_mask=mask)


@fault("a checkpointed layer sets its cache aside", raises=RuntimeError)
def test_a_checkpointed_model_continues_from_its_cache():
    model = tiny(TINY["llama"](), seed=0, dtype="float64")
    cache = prefilled(model)
    model.activation_checkpointing_enable()
    found = continued(model, cache, BRANCH).detach()
    close(found, uncached(model, torch.cat([PROMPT, BRANCH]), len(BRANCH)))


@fault("states are copied in place: a copied cache shares them")
def test_a_copied_cache_is_another_cache():
    model = tiny(TINY["qwen3_5"](), seed=0, dtype="float64")
    cache = prefilled(model)
    kept = {layer: dict(cache.layers[layer].recurrent_states) for layer in range(3)}
    before = {layer: states[0].clone() for layer, states in kept.items()}
    with torch.no_grad():
        continued(model, cache, BRANCH)
    assert all(torch.equal(kept[layer][0], before[layer]) for layer in kept)

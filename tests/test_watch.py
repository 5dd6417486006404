from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from lsverify.cache import new_cache, state_of
from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError
from lsverify.memory import LiveBytes
from lsverify.models import build
from lsverify.untouched import Untouched
from lsverify.watch import Backward, Forward, Watch

ARCHS = sorted(DEFAULT_ARCHS)
TOKENS = torch.arange(14).reshape(2, 7)


@pytest.fixture
def model():
    return build("llama", seed=0, dtype="float32")


def kinds(watch):
    return [type(event).__name__ for event in watch.events]


def test_forwards_and_backwards_are_recorded_in_order(model):
    with Watch(model) as watch:
        with torch.no_grad():
            model(input_ids=TOKENS[:1, :3])
        first = model(input_ids=TOKENS).logits.sum()
        second = model(input_ids=TOKENS[:, :5]).logits.sum()
        second.backward()
        first.backward()
    assert kinds(watch) == ["Forward", "Forward", "Forward", "Backward", "Backward"]
    assert [f.tokens for f in watch.forwards] == [3, 14, 10]
    assert [f.grad_enabled for f in watch.forwards] == [False, True, True]
    assert [b.forwards for b in watch.backwards] == [{2}, {1}]
    assert {b.accumulated for b in watch.backwards} == {len(list(model.parameters()))}
    tokens = watch.tokens()
    assert (tokens.total, tokens.no_grad, tokens.grad, tokens.padding) == (27, 3, 24, 0)


def test_one_backward_pass_over_two_graphs_is_one_event(model):
    with Watch(model) as watch:
        total = model(input_ids=TOKENS).logits.sum() + model(input_ids=TOKENS[:, :4]).logits.sum()
        total.backward()
    assert [b.forwards for b in watch.backwards] == [{0, 1}]


def test_what_was_passed_is_copied(model):
    ids, mask = TOKENS.clone(), torch.ones(2, 7, dtype=torch.int64)
    positions = torch.arange(7).expand(2, 7).clone()
    mask[0, :2] = 0
    with Watch(model) as watch:
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
    for given in (ids, mask, positions):
        given.zero_()
    seen = watch.forwards[0]
    assert torch.equal(seen.input_ids, TOKENS)
    assert seen.attention_mask.sum() == 12
    assert torch.equal(seen.position_ids, torch.arange(7).expand(2, 7))
    assert (seen.tokens, seen.padding, watch.tokens().padding) == (14, 2, 2)


def test_padding_in_the_cached_part_of_a_mask_is_not_counted_again(model):
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, :2] = 0
    cache = new_cache(model.config)
    with Watch(model) as watch, torch.no_grad():
        model(input_ids=TOKENS[:, :4], attention_mask=mask[:, :4], cache=cache, use_cache=True)
        model(input_ids=TOKENS[:, 4:], attention_mask=mask, cache=cache, use_cache=True)
    assert [f.padding for f in watch.forwards] == [2, 0]


def test_the_backbone_may_be_called_directly_and_by_position(model):
    with Watch(model) as watch:
        model.model(TOKENS, torch.ones_like(TOKENS), torch.arange(7)[None])
    seen = watch.forwards[0]
    assert (seen.tokens, seen.source) == (14, "ids")
    assert torch.equal(seen.position_ids, torch.arange(7)[None])
    assert seen.attention_mask is not None


def test_embeddings_given_by_the_caller_count_by_their_shape(model):
    embeds = torch.zeros(2, 7, model.config.hidden_size, requires_grad=True)
    with Watch(model) as watch:
        model(inputs_embeds=embeds).logits.sum().backward()
    seen = watch.forwards[0]
    assert (seen.tokens, seen.source, seen.input_ids) == (14, "embeds", None)
    assert watch.backwards[0].forwards == {0}


def test_embeddings_that_were_looked_up_just_before_are_counted_once(model):
    with Watch(model) as watch:
        model(inputs_embeds=model.get_input_embeddings()(TOKENS))
    assert watch.tokens().total == 14
    assert watch.forwards[0].source == "embeds"
    assert torch.equal(watch.forwards[0].input_ids, TOKENS)


def test_layers_driven_by_hand_show_as_a_lookup_and_in_the_layers(model):
    with Watch(model) as watch:
        hidden = model.model.embed_tokens(TOKENS)
        rotary = model.model.rotary_emb(hidden, torch.arange(7)[None])
        model.model.layers[0](hidden, position_embeddings=rotary)
    assert [f.source for f in watch.forwards] == ["lookup"]
    assert [tokens.total for tokens in watch.layer_tokens.values()] == [14, 0, 0, 0]


def test_recomputation_in_a_checkpoint_shows_in_the_layers_only(model):
    model.activation_checkpointing_enable()
    with Watch(model) as watch:
        model(input_ids=TOKENS, use_cache=False).logits.sum().backward()
    assert watch.tokens().total == 14
    assert {tokens.total for tokens in watch.layer_tokens.values()} == {28}
    assert [b.forwards for b in watch.backwards] == [{0}]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_layer_of_every_architecture_is_counted(arch):
    model = build(arch, seed=0, dtype="float32")
    with Watch(model) as watch:
        model(input_ids=TOKENS, use_cache=False).logits.sum().backward()
    assert watch.tokens().grad == 14
    assert [tokens.grad for tokens in watch.layer_tokens.values()] == [14] * 4
    assert [b.forwards for b in watch.backwards] == [{0}]


def test_adapters_may_be_wrapped_around_the_model():
    model = build("llama", seed=0, dtype="float32", lora=True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    with Watch(model) as watch:
        model(input_ids=TOKENS, position_ids=torch.arange(7)[None]).logits.sum().backward()
        model.get_base_model().model(input_ids=TOKENS)
    assert watch.tokens().grad == 28
    assert torch.equal(watch.forwards[0].position_ids, torch.arange(7)[None])
    assert watch.backwards[0].accumulated == len(trainable)


def test_a_cotangent_that_enters_through_the_state_is_seen(model):
    with Watch(model) as watch:
        cache = new_cache(model.config)
        model(input_ids=TOKENS, cache=cache, use_cache=True)
        state = list(state_of(cache).values())
        torch.autograd.backward(state, [torch.ones_like(tensor) for tensor in state])
    assert [b.forwards for b in watch.backwards] == [{0}]


def test_a_pass_that_returns_its_gradients_is_seen(model):
    with Watch(model) as watch:
        loss = model(input_ids=TOKENS).logits.sum()
        torch.autograd.grad(loss, list(model.parameters()))
    assert watch.backwards == [Backward(forwards={0}, accumulated=0)]


def test_a_second_copy_of_the_parameters_is_seen(model):
    copies = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    with Watch(model) as watch:
        output = functional_call(model, copies, kwargs={"input_ids": TOKENS, "use_cache": False})
        output.logits.sum().backward()
    assert watch.tokens().grad == 14
    assert watch.backwards == [Backward(forwards={0}, accumulated=0)]


def test_a_callback_sees_each_forward_before_it_runs(model):
    seen = []
    with Watch(model, on_forward=seen.append) as watch:
        model(input_ids=TOKENS)
        model(inputs_embeds=model.get_input_embeddings()(TOKENS))
    assert [event.source for event in seen] == ["ids", "lookup", "embeds"]
    assert seen[0] is watch.events[0]


def test_nothing_is_left_on_the_model_even_after_an_error(model):
    before = Untouched(model)
    watch = Watch(model)

    def failing_step():
        with watch:
            model(input_ids=TOKENS).logits.sum().backward()
            model(input_ids=TOKENS + 10**6)

    with pytest.raises(IndexError):
        failing_step()
    assert before.changes() == []
    model(input_ids=TOKENS)
    assert [type(event) for event in watch.events] == [Forward, Backward, Forward]


def test_watching_costs_no_live_bytes(model):
    def step():
        model(input_ids=TOKENS, use_cache=False).logits.sum().backward()
        model.zero_grad(set_to_none=True)

    with LiveBytes() as plain:
        step()
    with LiveBytes() as watched, Watch(model):
        step()
    assert watched.peak == plain.peak


def test_a_plain_module_is_watched_at_its_embedding():
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 20)

        def forward(self, input_ids):
            return self.table(input_ids)

    model = Bigram()
    with Watch(model) as watch:
        model(TOKENS).sum().backward()
    assert watch.tokens().grad == 14
    assert watch.backwards == [Backward(forwards={0}, accumulated=1)]
    assert watch.layer_tokens == {}


def test_a_model_without_an_embedding_is_refused():
    with pytest.raises(InputError, match="Linear has no input embedding to count tokens at"):
        Watch(nn.Linear(2, 2))

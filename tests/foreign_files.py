"""Files as another stack would leave them, made by hand for the tests of maps and checks."""

import torch
from safetensors.torch import save_file

from lsverify.models import build

HEADS, KV_HEADS = 4, 2


def shapes_of(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def values_of(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def shard(tensor, rank, ranks, axis=0):
    return tensor.chunk(ranks, dim=axis)[rank]


def grouped_qkv(q, k, v, groups):
    """Rows by query group: its query heads, its key head, its value head."""
    parts = [each.chunk(groups) for each in (q, k, v)]
    return torch.cat([part for group in zip(*parts, strict=True) for part in group])


def megatron(values, *, tp=1, ep=1, groups=KV_HEADS, layers=4, vocabulary=98):
    """{(tp, ep): tensors} of a llama-like or mixtral-like model, written apart from the shipped map's rules."""
    ranks = {}
    for t in range(tp):
        for e in range(ep):
            ranks[t, e] = _rank(values, t, tp, e, ep, groups, layers, vocabulary)
    return ranks


def _rank(values, t, tp, e, ep, groups, layers, vocabulary):
    def rows(name):
        tensor = values[name]
        extra = torch.zeros(vocabulary - len(tensor), *tensor.shape[1:], dtype=tensor.dtype)
        return shard(torch.cat([tensor, extra]), t, tp)

    out = {
        "embedding.word_embeddings.weight": rows("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": values["model.norm.weight"],
        "output_layer.weight": rows("lm_head.weight"),
    }
    for layer in range(layers):
        ours, theirs = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (values[f"{ours}self_attn.{r}_proj.weight"] for r in "qkv")
        qkv = [shard(each, t, tp) for each in (q, k, v)]
        out[theirs + "self_attention.linear_qkv.weight"] = grouped_qkv(*qkv, groups // tp)
        out[theirs + "self_attention.linear_proj.weight"] = shard(
            values[ours + "self_attn.o_proj.weight"], t, tp, 1
        )
        out[theirs + "self_attention.linear_qkv.layer_norm_weight"] = values[
            ours + "input_layernorm.weight"
        ]
        norm = values[ours + "post_attention_layernorm.weight"]
        if ours + "mlp.gate.weight" in values:
            out[theirs + "pre_mlp_layernorm.weight"] = norm
            out[theirs + "mlp.router.weight"] = values[ours + "mlp.gate.weight"]
            _experts(out, values, ours, theirs, t, tp, e, ep)
            continue
        out[theirs + "mlp.linear_fc1.layer_norm_weight"] = norm
        gate, up = (shard(values[f"{ours}mlp.{n}_proj.weight"], t, tp) for n in ("gate", "up"))
        out[theirs + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
        out[theirs + "mlp.linear_fc2.weight"] = shard(
            values[ours + "mlp.down_proj.weight"], t, tp, 1
        )
    return out


def _experts(out, values, ours, theirs, t, tp, e, ep):
    fused, down = (values[f"{ours}mlp.experts.{n}"] for n in ("gate_up_proj", "down_proj"))
    own = len(fused) // ep
    for local in range(own):
        gate, up = fused[e * own + local].chunk(2)
        both = [shard(each, t, tp) for each in (gate, up)]
        out[f"{theirs}mlp.experts.linear_fc1.weight{local}"] = torch.cat(both)
        out[f"{theirs}mlp.experts.linear_fc2.weight{local}"] = shard(
            down[e * own + local], t, tp, 1
        )


def write(tensors, path, metadata=None):
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, path, metadata=metadata)
    return path


def write_ranks(ranks, folder):
    folder.mkdir(exist_ok=True)
    for (t, e), tensors in ranks.items():
        write(tensors, folder / f"tp{t}_ep{e}.safetensors")
    return folder


def model_of(arch):
    return build(arch, seed=0)

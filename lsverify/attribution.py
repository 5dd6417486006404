"""Where an error sits: layer and kind of a parameter, and what the pattern of numbers suggests.

Everything here reads a finished `Comparison`; nothing here decides a verdict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsverify.comparison import Comparison, TensorResult

# A factor explains an error when at most this share of the error is left after dividing by it.
EXPLAINED = 0.05
# Relative L2 that a step in float32 ends with, from small models to real ones.
FLOAT32_NOISE = 1e-8, 1e-5

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_KIND_OF_MODULE = {
    "embedding": "embed_tokens wte wpe word_embeddings embed_in embeddings tok_embeddings",
    "head": "lm_head embed_out output_projection",
    "router": "router gate wg shared_expert_gate e_score_correction_bias",
    "q": "q_proj q_a_proj q_b_proj q_attn query wq",
    "k": "k_proj key wk",
    "v": "v_proj value wv",
    "kv": "kv_a_proj_with_mqa kv_b_proj kv_proj",
    "qkv": "qkv_proj query_key_value Wqkv c_attn qkv",
    "o": "o_proj wo out_proj dense",
    "gate": "gate_proj w1",
    "up": "up_proj w3 c_fc fc1 fc_in dense_h_to_4h",
    "down": "down_proj w2 fc2 fc_out dense_4h_to_h",
    "gate_up": "gate_up_proj input_linear",
}
_KIND = {module: kind for kind, names in _KIND_OF_MODULE.items() for module in names.split()}
# What the prompt's state is made by; the norm before it shares its fate.
_STATE_KINDS = frozenset("k v kv qkv recurrent conv norm".split())
_RECURRENT = frozenset("A_log D dt_bias dt_proj x_proj in_proj out_proj".split())
_KIND_OF_SLICE = {
    "qkv": {"q": "q", "k": "k", "v": "v"},
    "kv": {"k_nope": "k", "v": "v"},
    "gate_up": {"gate": "gate", "up": "up"},
}


def layer_of(name: str) -> int | None:
    """The first number in a parameter's name: its layer. None outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def kind_of(name: str, label: str | None = None) -> str:
    """The kind of a parameter, or of one slice of it: q, k, v, o, gate, up, down, norm, expert, ...

    Adapters are their own kinds (`lora_A`, `lora_B`): their factors fail in different ways.
    """
    path = name.split(".")
    for adapter in ("lora_A", "lora_B"):
        if adapter in path or adapter.replace("lora_", "lora_embedding_") in path:
            return adapter
    wrappers = {"base_layer", "original_module", "weight", "bias"}
    if "modules_to_save" in path:
        path = path[: path.index("modules_to_save")]
    path = [part for part in path if part not in wrappers] or path
    module = path[-1]
    if any("indexer" in part for part in path):
        return "indexer"
    if "norm" in module.lower() or re.fullmatch(r"ln(_\w+)?", module):
        return "norm"
    if _KIND.get(module) == "router":
        return "router"
    if any("expert" in part for part in path):
        return "expert"
    if module.startswith("conv") or "conv" in path:
        return "conv"
    if {"linear_attn", "mamba", "ssm"} & set(path) or ("mixer" in path and module in _RECURRENT):
        return "recurrent"
    if module == "c_proj":
        return "o" if any("attn" in part for part in path) else "down"
    kind = _KIND.get(module, "other")
    role = label.split()[-1] if label else ""
    return _KIND_OF_SLICE.get(kind, {}).get(role, kind)


def hints(comparison: Comparison) -> list[str]:
    """What the numbers alone suggest about the cause, most telling first; empty when nothing fits."""
    leaves = [leaf for tensor in comparison.tensors for leaf in tensor.leaves]
    bad = [leaf for leaf in leaves if leaf.verdict == "mismatch"]
    good = [leaf for leaf in leaves if leaf.verdict == "match"]
    readings: list[Callable[[], str | None]] = [
        lambda: _absent(comparison),
        lambda: _zeroed(bad, good),
        lambda: _scaled([b for b in bad if b.actual_norm > 0], good),
        lambda: _exchanged([t for t in comparison.tensors if t.verdict == "mismatch"]),
        lambda: _state_term(bad, good),
        lambda: _only_slices(comparison.tensors),
        lambda: _only_kinds(bad, good),
        lambda: _only_layers(bad, good),
        lambda: _narrow(bad, good),
    ]
    return [hint for reading in readings if (hint := reading())]


def _absent(comparison: Comparison) -> str | None:
    names = [f.name for f in comparison.findings if f.kind in ("missing", "no_gradient")]
    if not names:
        return None
    kinds = _listed(kind_of(name) for name in names)
    return (
        f"no gradient at all for {len(names)} parameters ({kinds}): "
        "frozen, unused, or cut off from the loss"
    )


def _narrow(bad: Sequence[TensorResult], good: Sequence[TensorResult]) -> str | None:
    """Noise of one size everywhere: that of float32 where more was asked for."""
    least, most = FLOAT32_NOISE
    alike = [b for b in bad if b.limit < least and least < (b.rel_l2 or 0.0) < most]
    if len(alike) < len(bad) or len(bad) <= len(good) or _scaled(bad, good):
        return None
    return (
        "every error is of float32's size: something on the way computes in float32 "
        "(a norm, a softmax, RoPE, a fused head, a cast by .float())"
    )


def _zeroed(bad: Sequence[TensorResult], good: Sequence[TensorResult]) -> str | None:
    zero = [b for b in bad if b.actual_norm == 0]
    if not zero:
        return None
    kinds = {b.kind for b in zero}
    if len(zero) == len(bad) and not good:
        return "every gradient is exactly zero: backward never reached the parameters"
    if kinds <= {"k", "v", "kv"}:
        return (
            f"exactly zero gradient for {_listed(kinds)} only: the gradient through keys and values "
            "is cut (a cache written without autograd, or a detached state)"
        )
    return f"exactly zero gradient where the reference has one ({_listed(kinds)}): detached"


def _scaled(bad: Sequence[TensorResult], good: Sequence[TensorResult]) -> str | None:
    if not bad or max(b.elements for b in bad) < 2:
        return None
    factors = [_factor(b) for b in bad]
    norm = math.hypot(*(b.expected_norm for b in bad))
    if None in factors or not norm:
        return None
    factor = math.hypot(*(b.actual_norm for b in bad)) / norm
    factor = math.copysign(factor, factors[0] or 1.0)
    if any(abs((f or 0.0) - factor) > EXPLAINED * abs(factor - 1) for f in factors):
        return None
    if good:
        where = f"the differing tensors ({_listed(b.kind for b in bad)}) are all"
        cause = "a reduction or scale that only these pass through"
    else:
        where = "every gradient is"
        cause = "a wrong denominator or scale"
    if abs(factor + 1) < 1e-3:
        cause = "a wrong sign"
    return f"{where} {_number(factor)} times the reference: {cause}"


def _factor(result: TensorResult) -> float | None:
    """The signed scale when the tensor is a multiple of its reference up to a small residue."""
    if result.rel_l2 is None or result.one_minus_cosine is None or result.norm_ratio is None:
        return None
    gap = min(result.one_minus_cosine, 2 - result.one_minus_cosine)
    residue = math.sqrt(2 * max(gap, 0.0)) * result.norm_ratio
    if residue > EXPLAINED * result.rel_l2:
        return None
    return result.norm_ratio if result.one_minus_cosine < 1 else -result.norm_ratio


def _exchanged(bad: Sequence[TensorResult]) -> str | None:
    for i, x in enumerate(bad):
        for y in bad[i + 1 :]:
            same = x.shape == y.shape and min(x.actual_norm, y.actual_norm) > 0
            tight = max(x.limit, y.limit, 1e-9)
            apart = not math.isclose(x.expected_norm, y.expected_norm, rel_tol=100 * tight)
            crossed = math.isclose(x.actual_norm, y.expected_norm, rel_tol=tight) and math.isclose(
                y.actual_norm, x.expected_norm, rel_tol=tight
            )
            if same and apart and crossed:
                return f"{x.name} and {y.name} carry each other's norm: exchanged?"
    return None


def _state_term(bad: Sequence[TensorResult], good: Sequence[TensorResult]) -> str | None:
    """Past the last layer's state no state follows, so a lost cotangent shows there in its makers only."""
    last = max((r.layer for r in (*bad, *good) if r.layer is not None), default=-1)
    here = {b.kind for b in bad if b.layer == last}
    untouched = {g.kind for g in good if g.layer == last} - _STATE_KINDS
    before = {b.kind for b in bad if b.layer is not None and b.layer < last} - _STATE_KINDS
    if not (here - {"norm"} and here <= _STATE_KINDS and untouched and before):
        return None
    return (
        f"in the last layer only what makes the prompt's state ({_listed(here)}) differs, before it "
        "the rest does too: the gradient through that state is missing or wrong"
    )


def _only_slices(tensors: Sequence[TensorResult]) -> str | None:
    fused = [t for t in tensors if t.parts]
    bad = [p for t in fused for p in t.parts if p.verdict == "mismatch"]
    others_differ = any(t.verdict == "mismatch" and not t.parts for t in tensors)
    good = any(p.verdict == "match" for t in fused for p in t.parts)
    if not bad or others_differ or not good:
        return None
    labels = {p.slice or "" for p in bad}
    roles = {label.split()[-1] for label in labels}
    named = labels if len(labels) <= 3 else roles
    if len(named) > 3:
        return None
    return f"only the slice {_listed(named)} of fused tensors differs"


def _only_kinds(bad: Sequence[TensorResult], good: Sequence[TensorResult]) -> str | None:
    kinds = {b.kind for b in bad}
    if not kinds or len(kinds) > 3 or not {g.kind for g in good} - kinds:
        return None
    if kinds <= {"embedding", "head"}:
        return f"only {_listed(kinds)} differ: token rows, tied weights or the last position"
    return f"only kind {_listed(kinds)} differs"


def _only_layers(bad: Sequence[TensorResult], good: Sequence[TensorResult]) -> str | None:
    layers = {b.layer for b in bad}
    untouched = {g.layer for g in good if g.layer is not None} - layers
    if not layers or None in layers or not untouched:
        return None
    numbers = sorted(layer for layer in layers if layer is not None)
    if len(numbers) == 1:
        return f"only layer {numbers[0]} differs"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"only layers {numbers[0]} to {numbers[-1]} differ"
    return f"only layers {_listed(map(str, numbers))} differ"


def _number(factor: float) -> str:
    simple = Fraction(factor).limit_denominator(64)
    close = min(1e-6 * abs(factor), 1e-3 * abs(factor - 1))
    return str(simple) if abs(float(simple) - factor) <= close else f"{factor:.10g}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(sorted(names)))


def message(comparison: Comparison, *, worst: int = 5) -> str:
    """Readable text: status, global numbers, structure, the `worst` entries with index and values."""
    c = comparison
    lines = [
        f"gradient comparison: {c.status}",
        f"  all parameters: relative L2 {_show(c.rel_l2)}, cosine {_show(c.cosine, '.12g')}, "
        f"norm ratio {_show(c.norm_ratio, '.6g')} (reference norm {c.reference_norm:.3e})",
        f"  counted: {_counted(c)}",
    ]
    lines += [f"  {f.name}: {f.detail}" for f in c.findings[: 2 * worst]]
    if len(c.findings) > 2 * worst:
        lines.append(f"  and {len(c.findings) - 2 * worst} more findings of structure")
    for key, floor in sorted(c.inconsistent.items())[:worst]:
        lines.append(f"  {key}: the reference's own floor {_show(floor)} is above the cap {c.cap}")
    bad = [leaf for t in c.tensors for leaf in t.leaves if leaf.verdict == "mismatch"]
    for result in sorted(bad, key=lambda r: -r.severity)[:worst]:
        lines += _entry(result)
    if len(bad) > worst:
        lines.append(f"  and {len(bad) - worst} more tensors or slices differ")
    if c.rolled_rel_l2 is not None:
        lines.append(f"  reference rolled by one element: relative L2 {_show(c.rolled_rel_l2)}")
    lines += [f"  hint: {hint}" for hint in c.hints]
    return "\n".join(lines)


def _counted(c: Comparison) -> str:
    shown = [f"{count} {verdict}" for verdict, count in c.counts.items() if count]
    return (", ".join(shown) or "nothing") + f"; {c.elements} elements compared"


def _entry(r: TensorResult) -> list[str]:
    assert r.worst is not None  # only what has elements can differ
    at, share = r.worst, 100 * (r.share_over or 0.0)
    return [
        f"  {r.key}: relative L2 {_show(r.rel_l2)}, cosine {_show(r.cosine, '.12g')}, "
        f"norm ratio {_show(r.norm_ratio, '.6g')}",
        f"    error {r.error_norm:.3e}, allowance {r.allowance:.3e} "
        f"(limit {r.limit:.3g}: {r.limit_source})",
        f"    largest at {at.index}: expected {at.expected!r}, actual {at.actual!r}, difference "
        f"{at.difference:.3e}; {share:.3g}% of {r.elements} elements over their share of the allowance",
    ]


def _show(value: float | None, spec: str = ".3e") -> str:
    return "undefined" if value is None else format(value, spec)

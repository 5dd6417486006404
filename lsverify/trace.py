"""What a path computed, seen from outside and put in its place: log-probs, decisions, and values layer by layer.

Every forward pass is located by content: its rows are matched, at their positions, with the prompts and responses of
the problem. So the same token of the same response can be compared between full autograd, a path of ours and somebody
else's, however each of them cut, padded or batched the sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.cache import state_of
from lsverify.decisions import ChoiceMode, as_sets, margins
from lsverify.objective import token_logp
from lsverify.problems import Problem
from lsverify.prompt import unwrapped
from lsverify.tags import fingerprint
from lsverify.watch import arguments_by_name, decoder_layers, way_to_embedding


@dataclass(frozen=True, order=True)
class Place:
    """One token of the problem: `prompt` is a content hash and `member` -1 inside a prompt, which siblings share."""

    prompt: str
    member: int
    position: int


@dataclass(frozen=True, order=True)
class Site:
    """Where a choice is made: the module, and which of its choices in one call of it."""

    module: str
    call: int


# A margin below this many eps of the precision, relative to the scores' size, decides nothing.
UNDECIDED_EPS = 64


@dataclass(frozen=True)
class Choice:
    """A set of experts or keys (sorted, without candidates that a mask ruled out), its margin and the scores' size.

    Ruled-out candidates fill a choice of k up where fewer are allowed; how many is a matter of the pass's length.
    """

    chosen: tuple[int, ...]
    margin: float
    scale: float

    def decided(self, eps: float) -> bool:
        """Whether the margin is more than rounding: a precision's `eps` relative to the scores' size, times a few dozen."""
        return self.margin > UNDECIDED_EPS * eps * self.scale


@dataclass(frozen=True)
class _Row:
    """A row of a forward pass: each column's position (-1: padding), the members it fits, the keys before the first.

    `hidden_keys` counts the leading padded keys of `keys`, the number of keys that a query of this row can choose from.
    """

    positions: list[int]
    members: list[int]
    keys: int
    hidden_keys: int


class Trace:
    """Watches one step of a path.

    `log_probs[i]` [R_i] are the response's log-probs as computed in passes with autograd (nan where none was seen);
    `scored[i]` the same for passes without; `choices[site, place]` the decisions; `values[layer, place]` the hidden
    states, when `values` is asked for; `passes[place, autograd]` counts how often a token was forwarded with and without
    autograd; `unplaced` counts tokens that match nothing in the problem. `forced` maps
    (site, place) to a choice that replaces the model's own. Modules inside of compiled code are not seen.
    """

    def __init__(
        self,
        model: nn.Module,
        problem: Problem,
        *,
        temperature: float = 1.0,
        keep_values: bool = False,
        forced: Mapping[tuple[Site, Place], Choice] | None = None,
    ) -> None:
        self._model, self._problem, self._temperature = model, problem, temperature
        self._keep_values, self._forced = keep_values, forced or {}
        self._prompts = [problem.prompt_hash(group) for group in problem.group_of]
        self._tokens = [problem.tokens(i).tolist() for i in range(len(problem))]
        self._rows: list[_Row] = []
        self._given_positions: Any = None
        self._origins: dict[tuple[int, ...] | None, list[int]] = {}
        self._modules: list[str] = []
        self._calls: dict[str, int] = {}
        self._handles: list[Any] = []
        self._mode = ChoiceMode(self._chose)
        self.log_probs = _unseen(problem)
        self.scored = _unseen(problem)
        self.choices: dict[tuple[Site, Place], Choice] = {}
        # Where a later pass over the same token chose otherwise, with the clearer of the two choices.
        self.unstable: list[tuple[Site, Place, Choice]] = []
        self.values: dict[tuple[str, Place], Tensor] = {}
        self.passes: Counter[tuple[Place, bool]] = Counter()
        self.unplaced = 0

    def __enter__(self) -> Self:
        keep = self._handles.append
        head = unwrapped(self._model)
        _, parents = way_to_embedding(self._model)
        backbone = parents[-1]
        keep(head.register_forward_pre_hook(self._head_enters, with_kwargs=True))
        keep(backbone.register_forward_pre_hook(self._enter, with_kwargs=True))
        keep(backbone.register_forward_hook(self._leave, with_kwargs=True))
        keep(head.register_forward_hook(self._logits, with_kwargs=True))
        for name, module in backbone.named_modules():
            keep(module.register_forward_pre_hook(partial(self._push, name)))
            keep(module.register_forward_hook(partial(self._pop, name), always_call=True))
        if self._keep_values:
            for name, layer in decoder_layers(backbone):
                keep(layer.register_forward_hook(partial(self._layer, name)))
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        while self._handles:
            self._handles.pop().remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a watched model is watched by the same trace."""
        return self

    def complete(self) -> bool:
        """Whether every response token's log-prob was seen in a pass with autograd."""
        return all(not bool(row.isnan().any()) for row in self.log_probs)

    def _head_enters(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Some backbones have no use for positions: what the whole model was given says where its tokens stand."""
        self._given_positions = arguments_by_name(module, args, kwargs).get("position_ids")

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = arguments_by_name(module, args, kwargs)
        if given.get("position_ids") is None:
            given = {**given, "position_ids": self._given_positions}
        ids = given.get("input_ids")
        self._rows = []
        if not isinstance(ids, Tensor):
            return
        positions, rows = _positions(ids, given), len(ids)
        padding, pasts = _leading_padding(given, rows), _pasts(_cache(given), rows)
        for tokens, where, (keys, hidden), past in zip(
            ids.tolist(), positions, padding, pasts, strict=True
        ):
            members = self._members(tokens, where, past)
            if not members and rows > 1:
                members = self._padded_on_the_right(tokens, where, past)
                ends = [len(self._tokens[i]) - 1 for i in members]
                where = [p if p < max(ends, default=0) else -1 for p in where] if ends else where
            self.unplaced += sum(p >= 0 for p in where) if not members else 0
            row = _Row(where, members, keys, hidden)
            self._rows.append(row)
            places = (place for c in range(len(where)) for place in self._places(row, c))
            self.passes.update((place, torch.is_grad_enabled()) for place in places)

    def _members(
        self, tokens: list[int], positions: list[int], past: tuple[int, ...] | None
    ) -> list[int]:
        """The members that a row fits: by its own tokens, and by those before it where their state was seen made.

        A short row alone fits too much: a single token stands at the same position of several prompts by chance.
        """
        seen = [(p, t) for p, t in zip(positions, tokens, strict=True) if p >= 0]
        fits = [
            i
            for i, own in enumerate(self._tokens)
            if seen and all(p < len(own) and own[p] == t for p, t in seen)
        ]
        return [i for i in fits if i in self._origins.get(past, fits)] or fits

    def _padded_on_the_right(
        self, tokens: list[int], positions: list[int], past: tuple[int, ...] | None
    ) -> list[int]:
        """The members that a row fits up to the last token they forward; without a mask, padding may follow it."""
        fits = {}
        for i, own in enumerate(self._tokens):
            end = len(own) - 1
            seen = [(p, t) for p, t in zip(positions, tokens, strict=True) if 0 <= p < end]
            if seen and all(own[p] == t for p, t in seen):
                fits[i] = len(seen)
        best = [i for i, length in fits.items() if length == max(fits.values())]
        return [i for i in best if i in self._origins.get(past, best)]

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._given_positions = None
        given = _cache(arguments_by_name(module, args, kwargs))
        made = getattr(output, "cache", None) if given is None else given
        pasts = _pasts(made, len(self._rows))
        self._origins |= {
            past: row.members
            for past, row in zip(pasts, self._rows, strict=True)
            if past is not None
        }

    def _places(self, row: _Row, column: int) -> Iterator[Place]:
        """The tokens of the problem that a column stands for: one of a prompt, or one of each equal response."""
        position = row.positions[column]
        if position < 0:
            return
        in_prompt = {i: position < len(self._problem.prompt(i)) for i in row.members}
        yield from dict.fromkeys(
            Place(self._prompts[i], -1 if shared else i, position)
            for i, shared in in_prompt.items()
        )

    def _logits(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        kept = arguments_by_name(module, args, kwargs).get("logits_to_keep")
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or len(self._rows) != len(logits):
            return
        target = self.log_probs if torch.is_grad_enabled() else self.scored
        for row, values in zip(self._rows, logits.detach(), strict=True):
            positions = row.positions[len(row.positions) - len(values) :]
            if isinstance(kept, Tensor):
                positions = [row.positions[column] for column in kept.tolist()]
            for i in row.members:
                self._log_probs_of(i, positions, values, target)

    def _log_probs_of(
        self, i: int, positions: list[int], logits: Tensor, target: list[Tensor]
    ) -> None:
        begin, response = len(self._problem.prompt(i)), self._problem.responses[i].tokens
        columns = [
            (column, p + 1 - begin)
            for column, p in enumerate(positions)
            if p >= 0 and 0 <= p + 1 - begin < len(response)
        ]
        if columns:
            where, which = (torch.tensor(side) for side in zip(*columns, strict=True))
            target[i][which] = token_logp(
                logits[where], response[which], self._temperature
            ).double()

    def _push(self, name: str, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._modules.append(name)
        self._calls[name] = 0

    def _pop(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._modules.pop()

    def _chose(self, scores: Tensor, chosen: Tensor) -> Tensor | None:
        columns = [(row, column) for row in self._rows for column in range(len(row.positions))]
        if not self._modules or not columns or len(scores) % len(columns):
            return None
        name = self._modules[-1]
        per_token = len(scores) // len(columns)
        sets, gaps = as_sets(scores, chosen), margins(scores, chosen.shape[-1])
        masked = scores <= torch.finfo(scores.dtype).min / 2
        sizes = scores.masked_fill(masked, 0).abs().amax(-1)
        replaced = chosen.clone() if self._forced else None
        for number, (row, column) in enumerate(columns):
            for place in self._places(row, column):
                for part in range(per_token):
                    line = number * per_token + part
                    key = (Site(name, self._calls[name] + part), place)
                    first = _first_candidate(row, masked[line])
                    choice = tuple(index - first for index in sets[line].tolist() if index >= 0)
                    self._note(key, Choice(choice, gaps[line].item(), sizes[line].item()))
                    if replaced is not None:
                        self._force(key, replaced[line], first)
        # A router that chooses groups first asks per group, then per token: each answer has a number of its own.
        self._calls[name] += per_token
        return replaced

    def _note(self, key: tuple[Site, Place], choice: Choice) -> None:
        before = self.choices.setdefault(key, choice)
        if before.chosen != choice.chosen:
            self.unstable.append((*key, max(before, choice, key=lambda each: each.margin)))

    def _force(self, key: tuple[Site, Place], line: Tensor, first: int) -> None:
        choice = self._forced.get(key)
        if choice is not None and len(choice.chosen) == len(line):
            line.copy_(torch.tensor(choice.chosen, dtype=line.dtype) + first)

    def _layer(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.dim() != 3 or len(hidden) != len(self._rows):
            return
        for row, values in zip(self._rows, hidden.detach(), strict=True):
            for column in range(len(row.positions)):
                for place in self._places(row, column):
                    self.values.setdefault((name, place), values[column].double())


def _unseen(problem: Problem) -> list[Tensor]:
    return [torch.full((n,), torch.nan, dtype=torch.float64) for n in problem.response_lengths]


def _positions(ids: Tensor, given: Mapping[str, Any]) -> list[list[int]]:
    """The position of every token of input_ids [b, T], -1 for padding: as passed, else as the library would count."""
    plain, explicit = _padding_mask(given), given.get("position_ids")
    rows, columns = ids.shape
    if isinstance(explicit, Tensor):
        flat = explicit if explicit.dim() == 2 else explicit[0]
        positions = flat.expand(rows, columns).clone()
    elif plain is not None:
        positions = (plain.long().cumsum(-1) - 1)[:, -columns:].clone()
    else:
        positions = (_past_length(given) + torch.arange(columns)).expand(rows, columns).clone()
    if plain is not None:
        positions[plain[:, -columns:] == 0] = -1
    found: list[list[int]] = positions.tolist()
    return found


def _leading_padding(given: Mapping[str, Any], rows: int) -> list[tuple[int, int]]:
    """For each row: how many keys its mask spans, and how many of them, in front, are padding."""
    mask = _padding_mask(given)
    if mask is None:
        return [(0, 0)] * rows
    return [(mask.shape[1], int((row.cumsum(0) == 0).sum())) for row in mask.long()]


def _padding_mask(given: Mapping[str, Any]) -> Tensor | None:
    """[b, keys], 0 at padding: the mask as given, or what one of queries and keys says of several rows.

    There a padded column neither sees another nor is seen by one.
    """
    mask = given.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = next(iter(mask.values()), None)
    if not isinstance(mask, Tensor) or mask.dim() == 2:
        return mask if isinstance(mask, Tensor) else None
    if mask.dim() != 4 or len(mask) == 1:
        return None
    visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    past = visible.shape[2] - visible.shape[1]
    if past < 0:
        return None
    others = visible & ~torch.ones_like(visible[0]).tril(past).triu(past)
    linked = others.any(1)
    linked[:, past:] |= others.any(2)
    return linked.long()


def _first_candidate(row: _Row, masked: Tensor) -> int:
    """The column that counts as candidate 0, so that a padded row can be compared with an unpadded one.

    Keys are numbered from the first real one. Experts are no keys, even where there are as many: padding masks none.
    """
    hidden = row.hidden_keys
    return hidden if len(masked) == row.keys and bool(masked[:hidden].all()) else 0


def _cache(given: Mapping[str, Any]) -> Any:
    found = (given.get(name) for name in ("cache", "past_key_values"))
    return next((cache for cache in found if cache is not None), None)


def _pasts(cache: Any, rows: int) -> list[tuple[int, ...] | None]:
    """For each row, checksums of the last layer's state, in which all tokens before have a part; None without one."""
    state = state_of(cache) if isinstance(cache, Cache) else {}
    layer = max((slot.layer for slot in state if slot.layer is not None), default=None)
    last = [tensor for slot, tensor in state.items() if slot.layer == layer and len(tensor) == rows]
    if not last:
        return [None] * rows
    return [tuple(fingerprint(tensor[row]) for tensor in last) for row in range(rows)]


def _past_length(given: Mapping[str, Any]) -> int:
    cache = _cache(given)
    try:
        return int(cache.get_seq_length()) if cache is not None else 0
    except ValueError:  # a cache of recurrent states alone does not know its length
        return 0

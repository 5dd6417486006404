"""What a file from another stack holds, under this model's names: gradients, and what else it could dump.

Names before any map: gradients under their own, `after.NAME` parameters after one optimizer step, `log_probs.<i>`,
`loss`, and `decisions.<module>.<i>`. Whatever is missing, left over, misshapen or not finite is one `InputError` line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lsverify.name_maps import NameMap
from lsverify.name_round_trip import require_bijection
from lsverify.name_ties import Shapes, Tie, tie
from lsverify.observe import is_update
from lsverify.paths import Update
from lsverify.problems import Problem
from lsverify.references import Gradients
from lsverify.tensor_files import FLOATING, Entry, TensorFiles, refuse, shown

AFTER = "after."
_LOG_PROBS = re.compile(r"log_probs\.(\d+)")
_DECISIONS = re.compile(r"decisions\.(.+)\.(\d+)")
_WHOLE = ("I64", "I32", "I16", "I8", "U8")


@dataclass(frozen=True)
class Sorted:
    """A file's tensors by what they are; gradients and parameters still under the other stack's names."""

    gradients: TensorFiles
    after: TensorFiles
    log_probs: dict[int, Entry] = field(default_factory=dict)
    decisions: dict[tuple[str, int], Entry] = field(default_factory=dict)
    loss: list[Entry] = field(default_factory=list)


def sort(files: TensorFiles) -> Sorted:
    """Tensors by their names. In a folder of files, one a rank, what is no gradient may be in one file only."""
    gradients: dict[str, Entry] = {}
    after: dict[str, Entry] = {}
    found = Sorted(replace(files, entries=gradients), replace(files, entries=after))
    for name, entry in files.entries.items():
        stem, _, bare = name.partition("/") if files.by_rank else ("", "", name)
        place = f"{stem}/" if stem else ""
        if bare == "loss":
            found.loss.append(entry)
        elif match := _LOG_PROBS.fullmatch(bare):
            _once(files, bare, found.log_probs, int(match[1]), entry)
        elif match := _DECISIONS.fullmatch(bare):
            _once(files, bare, found.decisions, (match[1], int(match[2])), entry)
        elif bare.startswith(AFTER):
            after[place + bare.removeprefix(AFTER)] = entry
        else:
            gradients[name] = entry
    if len(found.loss) > 1:
        refuse(files.path, "has `loss` in several files; keep one")
    return found


def _once(files: TensorFiles, name: str, found: dict[Any, Entry], key: Any, entry: Entry) -> None:
    if key in found:
        refuse(files.path, f"has {shown(name)} in several files; keep one")
    found[key] = entry


@dataclass(frozen=True)
class Names:
    """This model's names: trainable parameters with their shapes, other names of tied ones, and the map, if any."""

    shapes: Shapes
    aliases: Mapping[str, str]
    config: Any
    owner: NameMap | None

    def read(self, files: TensorFiles) -> dict[str, Tensor]:
        """Tensors by our names, as far as they are there.

        Every shape is held against the model's before a number is read. Raises `InputError` for what does not fit.
        """
        for entry in files.entries.values():
            if entry.dtype not in FLOATING:
                if self.owner is None or not self.owner.ignores(entry.key):
                    refuse(
                        entry.file,
                        f"has {shown(entry.key)} of dtype {entry.dtype}; a gradient or a parameter is one of "
                        f"{', '.join(FLOATING)}",
                    )
        shapes = {**self.shapes, **{a: self.shapes[n] for a, n in self.aliases.items()}}
        found = self._mapped(files, shapes) if self.owner else self._plain(files, shapes)
        for alias, name in self.aliases.items():
            if alias in found:
                tied = found.pop(alias)
                if not torch.equal(found.setdefault(name, tied), tied):
                    refuse(
                        files.path,
                        f"has {alias} and {name} with different values, but they are one tensor; write their sum once",
                    )
        return found

    def require(self, found: Collection[str], path: Path, spare: Collection[str] = ()) -> None:
        """Raises `InputError` when a parameter that is not spare was not found."""
        missing = [name for name in self.shapes if name not in found and name not in spare]
        if missing:
            refuse(
                path,
                f"lacks {missing[0]} ({len(missing)} of {len(self.shapes)} parameters are missing); write every "
                "gradient, or give the other stack's names by --map",
            )

    def _plain(self, files: TensorFiles, shapes: Shapes) -> dict[str, Tensor]:
        for name, entry in files.entries.items():
            if name not in shapes:
                refuse(
                    files.path,
                    f"has tensor {shown(name)}, which is no parameter of the model; leave it out, or give the other "
                    "stack's names by --map",
                )
            if entry.shape != shapes[name]:
                refuse(
                    files.path,
                    f"has {shown(name)} of shape {list(entry.shape)}; the model's is {list(shapes[name])}",
                )
        return {name: entry.finite().read() for name, entry in files.entries.items()}

    def _mapped(self, files: TensorFiles, shapes: Shapes) -> dict[str, Tensor]:
        assert self.owner is not None
        found: dict[str, Tensor] = {}
        for one in tie(self.owner, shapes, self.config, files):
            require_bijection(one)
            found |= _pulled(one, files)
        return found


def _pulled(one: Tie, files: TensorFiles) -> dict[str, Tensor]:
    return one.pull(lambda source: files.entries[source.name].finite().read())


def names_of(model: nn.Module, owner: NameMap | None) -> Names:
    """The names of a model's trainable parameters, and other names of those that have several."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            aliases[name] = known
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    config: Any = model.config
    return Names(shapes, aliases, config.get_text_config(), owner)


def gradients_of(found: dict[str, Tensor], reached: Mapping[str, Tensor | None]) -> Gradients:
    """All parameters' gradients. None where there is none, or zeros for a parameter that the reference does not reach."""
    gradients: Gradients = {}
    for name, expected in reached.items():
        value = found.get(name)
        # A buffer that was never written to is dumped as zeros: a file cannot say None.
        unreached = expected is None and value is not None and not bool(value.any())
        gradients[name] = None if unreached else value
    return gradients


@dataclass(frozen=True)
class Answer:
    """All that a file says, read and sound: None or empty where it says nothing."""

    values: dict[str, Tensor]
    log_probs: tuple[Tensor, ...] | None
    loss: float | None
    decisions: dict[tuple[str, int], Tensor]
    after: dict[str, Tensor]
    update: Update | None


def answer_of(files: TensorFiles, names: Names, problem: Problem) -> Answer:
    """Everything read. Raises `InputError` for whatever does not fit the model or the problem."""
    found = sort(files)
    after = names.read(found.after) if found.after.entries else {}
    if after:
        names.require(after, files.path)
    return Answer(
        values=names.read(found.gradients),
        log_probs=log_probs_of(found, problem),
        loss=loss_of(found),
        decisions=decision_rows(found, problem),
        after=after,
        update=update_of(files) if after else None,
    )


def log_probs_of(files: Sorted, problem: Problem) -> tuple[Tensor, ...] | None:
    """One [R] per response; None when the file has none."""
    if not files.log_probs:
        return None
    path, lengths = files.gradients.path, problem.response_lengths
    for i in sorted(files.log_probs.keys() ^ set(range(len(lengths)))):
        kind = "lacks" if i < len(lengths) else "has"
        refuse(
            path, f"{kind} log_probs.{i}; the problem has {len(lengths)} responses, numbered from 0"
        )
    for i, length in enumerate(lengths):
        entry = files.log_probs[i]
        if entry.shape != (length,) or entry.dtype not in FLOATING:
            refuse(
                path,
                f"has log_probs.{i} of {entry.dtype} {list(entry.shape)}; response {i} has {length} tokens, each a "
                "floating number",
            )
    return tuple(files.log_probs[i].finite().read() for i in range(len(lengths)))


def loss_of(files: Sorted) -> float | None:
    """The loss; None when the file has none."""
    if not files.loss:
        return None
    (entry,) = files.loss
    if entry.elements != 1 or entry.dtype not in FLOATING:
        refuse(
            files.gradients.path, f"has loss of {entry.dtype} {list(entry.shape)}; give one number"
        )
    return float(entry.finite().read())


def decision_rows(files: Sorted, problem: Problem) -> dict[tuple[str, int], Tensor]:
    """By module and response [P + R - 1, k] whole numbers."""
    rows = {}
    for (module, i), entry in files.decisions.items():
        tokens = len(problem.tokens(i)) - 1 if i < len(problem) else 0
        if entry.dtype not in _WHOLE or len(entry.shape) != 2 or entry.shape[0] != tokens:
            refuse(
                files.gradients.path,
                f"has {shown(entry.key)} of {entry.dtype} {list(entry.shape)}; response {i} of {len(problem)} asks for whole "
                f"numbers [{tokens}, k]",
            )
        rows[module, i] = entry.read().long()
    return rows


def update_of(files: TensorFiles) -> Update:
    """The optimizer step that the file's metadata declares. Raises `InputError` when it is none."""
    text = files.metadata.get("optimizer")
    if text is None:
        refuse(
            files.path,
            "has parameters after a step and no `optimizer` in its metadata; add it as JSON, such as "
            '{"kind": "sgd", "lr": 0.05}',
        )
    try:
        content = json.loads(text)
        if isinstance(content, dict) and isinstance(content.get("betas"), list):
            content["betas"] = tuple(content["betas"])
        update = Update(**content)
    except (ValueError, TypeError, RecursionError):
        update = None
    if update is None or not is_update(update):
        refuse(
            files.path,
            f"has optimizer {shown(text)} in its metadata; allowed are kind (sgd or adamw), lr, betas, eps, weight_decay "
            "and max_grad_norm",
        )
    return update

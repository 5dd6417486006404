"""Response, Group and Problem: the validated data of one policy-gradient step, and its views.

Import them from `lsverify.problems`. Their tensors stay on the CPU. Letters in shapes: N members
(responses of all groups, in order), P prompt tokens of a group, R response tokens of a member.
Members are counted flat across
groups: member i is `problem.responses[i]` everywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lsverify.errors import InputError
from lsverify.spans import Spans, check_spans

if TYPE_CHECKING:
    from lsverify.padding import PaddedBatch


def _check_vector(name: str, value: object, dtype: torch.dtype, length: int | None = None) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is a {type(value).__name__}; give a torch tensor of {dtype}")
    if value.dtype != dtype:
        raise InputError(f"{name} has dtype {value.dtype}; convert it to {dtype}")
    if value.ndim != 1:
        raise InputError(f"{name} has shape {tuple(value.shape)}; give one dimension, unpadded")
    if value.numel() < 1:
        raise InputError(f"{name} is empty; at least one element is needed")
    if length is not None and value.numel() != length:
        raise InputError(f"{name} has {value.numel()} elements; the response has {length} tokens")
    if value.device.type != "cpu":
        raise InputError(
            f"{name} is on {value.device}; a problem stays on the CPU, so move it there"
        )
    if value.requires_grad:
        raise InputError(f"{name} requires a gradient; a problem is data, so detach it")


def _check_tokens(name: str, value: object) -> None:
    _check_vector(name, value, torch.int64)
    assert isinstance(value, Tensor)
    if (worst := int(value.min())) < 0:
        where = int(value.argmin())
        raise InputError(f"{name}[{where}] is {worst}; token ids start at 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One sampled response and what is known about it. Raises InputError for anything that does not
    fit.

    tokens        [R] int64, R >= 1.
    mask          [R] bool. True where the objective counts the token. A hole (a tool's token, say)
                  is still attended to and still occupies a position; a mask without any True is
                  allowed.
    reward        finite, one per response.
    old_logp      [R] float64, natural log, under the policy at the start of the step (the
                  denominator of the ratio). Finite wherever the mask is True; elsewhere it may hold
                  anything, NaN included.
    ref_logp      [R] float64 or None, the same under the reference policy of the KL term.
    sampler_logp  [R] float64 or None, the same as the sampling engine reported it.
    truncated     True when the response was cut at the length limit and did not end by itself.
    """

    tokens: Tensor
    mask: Tensor
    reward: float
    old_logp: Tensor
    ref_logp: Tensor | None = None
    sampler_logp: Tensor | None = None
    truncated: bool = False

    def __post_init__(self) -> None:
        _check_tokens("response tokens", self.tokens)
        length = self.tokens.numel()
        _check_vector("mask", self.mask, torch.bool, length)
        if isinstance(self.reward, bool) or not isinstance(self.reward, int | float):
            raise InputError(f"reward is a {type(self.reward).__name__}; give a float")
        if not math.isfinite(self.reward):
            raise InputError(f"reward is {self.reward}; it must be finite")
        if not isinstance(self.truncated, bool):
            raise InputError(f"truncated is {self.truncated!r}; give True or False")
        for name in LOGP_NAMES:
            value = getattr(self, name)
            if value is None and name != "old_logp":
                continue
            _check_vector(name, value, torch.float64, length)
            bad = (~value.isfinite() & self.mask).nonzero()
            if len(bad):
                where = int(bad[0])
                raise InputError(
                    f"{name}[{where}] is {float(value[where])} at a token that the mask counts; "
                    "log-probs must be finite there"
                )

    def __len__(self) -> int:
        return self.tokens.numel()


LOGP_NAMES: tuple[Literal["old_logp", "ref_logp", "sampler_logp"], ...] = (
    "old_logp",
    "ref_logp",
    "sampler_logp",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """One prompt and the responses sampled for it: prompt [P] int64, P >= 1; one response or
    more.

    spans  (start, end) of prompt tokens that see each other both ways; see `lsverify.spans`.
    """

    prompt: Tensor
    responses: tuple[Response, ...]
    spans: Spans = ()

    def __post_init__(self) -> None:
        _check_tokens("prompt", self.prompt)
        check_spans(self.spans, self.prompt.numel())
        if not isinstance(self.responses, tuple) or not self.responses:
            raise InputError("a group needs a tuple of at least one response")
        for response in self.responses:
            if not isinstance(response, Response):
                raise InputError(f"a group holds {type(response).__name__}; give Response objects")

    def __len__(self) -> int:
        return len(self.responses)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One step's data: groups in order. Two problems are the same when `content_hash` is the same.

    groups  one or more. ref_logp and sampler_logp are there for every response or for none.
    seed    where a drawn problem came from; None for data from elsewhere.
    """

    groups: tuple[Group, ...]
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not self.groups:
            raise InputError("a problem needs a tuple of at least one group")
        for group in self.groups:
            if not isinstance(group, Group):
                raise InputError(f"a problem holds {type(group).__name__}; give Group objects")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int)
        ):
            raise InputError(f"seed is {self.seed!r}; give an int or None")
        for name in LOGP_NAMES:
            given = [getattr(response, name) is not None for response in self.responses]
            if any(given) and not all(given):
                raise InputError(
                    f"{name} is missing for member {given.index(False)} but given for member "
                    f"{given.index(True)}; give it for every response or for none"
                )

    def __len__(self) -> int:
        return len(self.responses)

    @cached_property
    def responses(self) -> tuple[Response, ...]:
        """All members, flat over groups in order."""
        return tuple(response for group in self.groups for response in group.responses)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Member -> index of its group."""
        return tuple(index for index, group in enumerate(self.groups) for _ in group.responses)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        return tuple(len(group) for group in self.groups)

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Per group."""
        return tuple(group.prompt.numel() for group in self.groups)

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """Per member."""
        return tuple(len(response) for response in self.responses)

    def prompt(self, member: int) -> Tensor:
        """[P] the prompt of a member's group."""
        return self.groups[self.group_of[member]].prompt

    def spans(self, member: int) -> Spans:
        """The spans of a member's prompt."""
        return self.groups[self.group_of[member]].spans

    def tokens(self, member: int) -> Tensor:
        """[P + R] prompt and response of a member."""
        return torch.cat([self.prompt(member), self.responses[member].tokens])

    def prompt_hash(self, group: int) -> str:
        """sha256 (hex) of a group's prompt tokens and spans: equal for groups whose prompts have
        equal content."""
        spans = self.groups[group].spans
        marked = json.dumps(spans).encode() if spans else b""
        return hashlib.sha256(_bytes(self.groups[group].prompt) + marked).hexdigest()

    def content_hash(self) -> str:
        """sha256 (hex) over everything in the problem: lengths, tokens, spans, masks, rewards,
        log-probs, flags, seed.

        Bit for bit, so the values at masked slots count too.
        """
        digest = hashlib.sha256()
        digest.update(json.dumps(self.layout(), sort_keys=True).encode())
        for name, tensor in self.flat().items():
            digest.update(f"{name}:{tensor.numel()}:".encode())
            digest.update(_bytes(tensor))
        return digest.hexdigest()

    def layout(self) -> dict[str, object]:
        """Everything that is not a tensor, ready for JSON; spans only where there are any."""
        spans = [[list(span) for span in group.spans] for group in self.groups]
        return ({"spans": spans} if any(spans) else {}) | {
            "seed": self.seed,
            "prompt_lengths": list(self.prompt_lengths),
            "group_sizes": list(self.group_sizes),
            "response_lengths": list(self.response_lengths),
            "rewards": [float(response.reward) for response in self.responses],
            "truncated": [response.truncated for response in self.responses],
        }

    def flat(self) -> dict[str, Tensor]:
        """Every tensor, concatenated: prompts over groups [sum P], the others over members [sum
        R]."""
        tensors = {
            "prompt_tokens": torch.cat([group.prompt for group in self.groups]),
            "response_tokens": torch.cat([response.tokens for response in self.responses]),
            "mask": torch.cat([response.mask for response in self.responses]),
        }
        for name in LOGP_NAMES:
            if getattr(self.responses[0], name) is not None:
                tensors[name] = torch.cat([getattr(each, name) for each in self.responses])
        return tensors

    def replace_logps(
        self,
        *,
        old: Sequence[Tensor] | None = None,
        ref: Sequence[Tensor] | None = None,
        sampler: Sequence[Tensor] | None = None,
    ) -> Problem:
        """The same problem with other log-probs, each a sequence of N tensors [R_i] float64; None
        keeps."""
        given = {"old_logp": old, "ref_logp": ref, "sampler_logp": sampler}
        changes: list[dict[str, Any]] = [{} for _ in self.responses]
        for name, values in given.items():
            if values is None:
                continue
            if len(values) != len(self):
                raise InputError(f"{name} has {len(values)} members; the problem has {len(self)}")
            for change, value in zip(changes, values, strict=True):
                change[name] = value
        return self.replace_responses(changes)

    def replace_responses(self, changes: Sequence[Mapping[str, Any]]) -> Problem:
        """The same problem with some fields of some responses changed: one mapping (maybe empty) a
        member."""
        changed = iter(
            [replace(each, **new) for each, new in zip(self.responses, changes, strict=True)]
        )
        groups = tuple(
            replace(group, responses=tuple(next(changed) for _ in group.responses))
            for group in self.groups
        )
        return replace(self, groups=groups)

    def select(self, groups: Sequence[int]) -> Problem:
        """The problem of these groups, by index, in this order; an index may be given more than
        once."""
        for index in groups:
            if not 0 <= index < len(self.groups):
                raise InputError(f"group {index} does not exist; there are {len(self.groups)}")
        return replace(self, groups=tuple(self.groups[index] for index in groups))

    def padded(
        self, prompt_side: Literal["left", "right"] = "left", pad_token_id: int = 0
    ) -> PaddedBatch:
        """All members as rows of one batch; the layout is described at `padding.PaddedBatch`."""
        from lsverify.padding import pad

        return pad(self, prompt_side, pad_token_id)

    @staticmethod
    def from_padded(batch: PaddedBatch, **values: Any) -> Problem:
        """The inverse of `padded`; see `padding.from_padded`, also for the values it takes."""
        from lsverify.padding import from_padded

        return from_padded(batch, **values)

    @staticmethod
    def from_rollouts(sequences: Sequence[Tensor], **values: Any) -> Problem:
        """A problem from whole rows, prompt and response in one; see `rollouts.from_rollouts`."""
        from lsverify.rollouts import from_rollouts

        return from_rollouts(sequences, **values)

    def save(self, directory: str | Path) -> Path:
        """Write problem.safetensors and problem.json; see `problem_files.save`."""
        from lsverify.problem_files import save

        return save(self, directory)

    @staticmethod
    def load(directory: str | Path) -> Problem:
        """Read what `save` wrote, and refuse anything malformed; see `problem_files.load`."""
        from lsverify.problem_files import load

        return load(directory)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()

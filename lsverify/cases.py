"""What the command line and the pytest plugin are asked for, turned into cases: one set of options for both."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from lsverify.candidate_names import target
from lsverify.errors import InputError
from lsverify.evidence import RUNGS, CaseConfig
from lsverify.objective_options import read_objective
from lsverify.policies import parse_policy
from lsverify.spans import SHORTEST, SpanKind

DEFAULT_ARCHS = ("llama", "mistral", "qwen3_5", "glm_moe_dsa")
ALL = "all"
DEFAULT_POLICIES = ("exact", "detach")
DTYPES = ("float64", "float32", "bfloat16", "bfloat16-autocast")
REFERENCES = ("declared", "full")
SPANS = get_args(SpanKind)
SMOLLM2 = "smollm2-135m"
WARM = "warm:"
# A pretrained model takes seconds for a step: two steps under two optimizers, each also in float64, are asked for by name.
REQUIRED_OF_TEXT = "gradient"
# Its gradients are 540 MB, which every backward pass moves: four short responses are replayed together.
TEXT_SIZES = {"response_lengths": (16, 24, 32, 20), "chunk": 512, "branches": 4}
# What the task asks for has three tokens.
TASK_SIZES = {"response_lengths": (3,)}
QUICK = {"prompt_length": 12, "group_size": 2, "response_lengths": (3, 1)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to judge. Empty means the default: four tiny architectures, `exact` and `detach`, oracle precision."""

    archs: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    candidate: str | None = None
    reference: str = "declared"
    require: str | None = None
    dtype: str = "float64"
    prompt_length: int | None = None
    group_size: int | None = None
    response_length: str | None = None
    objective: str = "grpo"
    seed: int = 0
    chunk: int | None = None
    branches: int | None = None
    lora: bool = False
    quantised: bool = False
    tied: bool = False
    spans: str = "none"
    quick: bool = False

    def cases(self) -> list[CaseConfig]:
        """One case per architecture and policy. Raises `InputError`, one line, for a value that is not allowed."""
        return list(self._cases())

    def checked(self) -> list[CaseConfig]:
        """The cases, each once, after importing the candidate. Raises `InputError` as `cases` and `load_candidate` do."""
        cases = list(dict.fromkeys(self._cases()))
        if self.candidate is not None:
            load_candidate(self.candidate)
        return cases

    def _cases(self) -> Iterator[CaseConfig]:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("reference", self.reference, REFERENCES)
        _one_of("spans", self.spans, SPANS)
        _one_of("require", self.require or RUNGS[-1], RUNGS)
        read_objective(self.objective)
        if self.quantised and not self.lora:
            raise InputError(
                "quantised needs lora: a 4-bit base is frozen, so only adapters over it train"
            )
        # A candidate claims what it declares; only a policy that the user names is a claim made for it.
        default = (None,) if self.candidate else DEFAULT_POLICIES
        policies: tuple[str | None, ...] = self.policies or default
        for spec in self.policies:
            parse_policy(spec)
        for arch in expanded(self.archs):
            require_known(arch)
            for policy in policies:
                yield self._case(arch, policy)

    def _case(self, arch: str, policy: str | None) -> CaseConfig:
        sizes: dict[str, Any] = dict(QUICK) if self.quick else {}
        asked = {
            "prompt_length": self.prompt_length,
            "group_size": self.group_size,
            "chunk": self.chunk,
            "branches": self.branches,
            "response_lengths": _lengths(self.response_length),
        }
        if arch == SMOLLM2:
            sizes = TEXT_SIZES | sizes
        elif is_warm(arch):
            sizes = TASK_SIZES | sizes
        sizes |= {name: value for name, value in asked.items() if value is not None}
        given = {
            "arch": arch,
            "policy": policy,
            "candidate": self.candidate,
            "reference": self.reference,
            "dtype": self.dtype,
            "objective": self.objective,
            "seed": self.seed,
            "lora": self.lora,
            "quantised": self.quantised,
            "tied": self.tied,
            "spans": self.spans,
            "require": self.require or (REQUIRED_OF_TEXT if arch == SMOLLM2 else RUNGS[-1]),
        }
        try:
            case = CaseConfig.model_validate(given | sizes)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])).replace("_", " ")
            raise InputError(f"{name} {first['input']!r} is not allowed: {first['msg']}") from None
        if case.spans != "none" and case.prompt_length < SHORTEST:
            raise InputError(
                f"prompt length {case.prompt_length} has no room for spans: use {SHORTEST} or more"
            )
        asked_for, members = _lengths(self.response_length) or (), sum(group_sizes(case))
        if len(asked_for) > members:
            raise InputError(
                f"response length {self.response_length!r} names {len(asked_for)} lengths for {members} responses "
                f"(groups of {' and '.join(map(str, group_sizes(case)))}): name fewer, or raise the group size"
            )
        return case


def expanded(archs: tuple[str, ...]) -> tuple[str, ...]:
    """The architectures that are meant: the default ones if none is named, every family for `all`."""
    if ALL not in archs:
        return archs or DEFAULT_ARCHS
    from lsverify.models import TINY

    return tuple(
        dict.fromkeys(one for arch in archs for one in (sorted(TINY) if arch == ALL else [arch]))
    )


def is_warm(arch: str) -> bool:
    """Whether the name is that of a warm-started policy, `warm:llama` for instance."""
    return arch.startswith(WARM)


def group_sizes(case: CaseConfig) -> tuple[int, ...]:
    """Responses per prompt: two groups of different size, so that a group's edge shows; one group of real text."""
    if case.arch == SMOLLM2:
        return (case.group_size,)
    return (case.group_size, max(case.group_size - 1, 1))


def require_known(arch: str) -> None:
    """Raises `InputError` for what `lsverify.models.build` does not know, or a model type that it cannot build."""
    if arch in (*DEFAULT_ARCHS, SMOLLM2) or Path(arch).is_dir():
        return
    if is_warm(arch):
        from lsverify.fixture_files import warm_folder

        warm_folder(arch)
        return
    from lsverify import models
    from lsverify.shrink import model_types

    if arch in models.TINY:
        return
    if arch not in model_types():
        raise models.unknown(arch)
    models.require_usable(arch)


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"response length {text!r} is not allowed: use one length or several as N,N,.. with each 1 or more"
        )
    return tuple(int(part) for part in parts)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} {value!r} is not known: use one of {', '.join(allowed)}")


def source_of(candidate: Any) -> str | None:
    """sha256 (first 12 digits) of the file that defines the candidate, None where there is no such file."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(candidate))
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    except (TypeError, OSError, ValueError):
        return None


def load_candidate(spec: str) -> Any:
    """The callable that the user named: MODULE:NAME in the current directory or installed, or a name from an entry point.

    Raises `InputError` when the name is malformed or unknown, cannot be imported, or is not callable.
    """
    return load_named(
        spec,
        "candidate",
        "(model, problem, objective) -> result",
        place=spec if ":" in spec else target(spec),
        example="my_path:step",
    )


def load_named(
    spec: str, what: str, shape: str, *, place: str | None = None, example: str = "mine:it"
) -> Any:
    """The callable MODULE:NAME at `place` (`spec` itself, if None); `what` and `shape` say in messages what it is for.

    Raises `InputError` as `load_candidate` does.
    """
    module_name, _, name = (place or spec).partition(":")
    if not module_name or not name:
        raise InputError(f"{what} {spec!r} is not of the form MODULE:NAME, for instance {example}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{what} {spec!r}: no module {error.name!r} in the current directory or installed"
        ) from None
    except KeyboardInterrupt:
        raise
    except InputError as error:
        raise InputError(f"{what} {spec!r}: {error}") from None
    except BaseException as error:  # a script's sys.exit(0) must not end the gate as a success
        raise InputError(
            f"{what} {spec!r}: importing it raised {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        raise InputError(f"{what} {spec!r}: module {module_name!r} has no {name!r}")
    if not callable(found):
        raise InputError(f"{what} {spec!r} is not callable: give {shape}")
    return found

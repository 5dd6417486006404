"""A case as files, for a stack that has no lsverify: `lsverify export CASE DIR`, and what `lsverify check` reads of them.

The folder has all that the step needs: the model's config and weights, the problem, the advantages and denominators that
the objective makes of it, instructions, and a script that takes the step with torch and transformers alone. case.json
has the case and the sha256 of every other file. Nothing in the folder is believed: whoever checks builds the case anew.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from lsverify import __version__, problem_files
from lsverify.cases import Options, group_sizes
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig
from lsverify.objective import Plan, prepare
from lsverify.objective_options import read_objective
from lsverify.problems import Problem
from lsverify.setting import Setting, make_setting
from lsverify.tensor_files import open_tensors, read_json, refuse, shown
from lsverify.whole_files import appearing, write_whole

CASE, CONFIG, WEIGHTS, STEP = "case.json", "config.json", "model.safetensors", "step.safetensors"
SCRIPT, INSTRUCTIONS = "step.py", "README.md"
FILES = (CONFIG, WEIGHTS, problem_files.TENSORS, problem_files.LAYOUT, STEP, SCRIPT, INSTRUCTIONS)
LARGEST_CASE = 2**20
_TEXTS = Path(__file__).parent / "exported"


class Case(BaseModel):
    """case.json: the case, its objective spelled out, the problem's content hash, and each file's sha256."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    lsverify: str
    case: CaseConfig
    objective: dict[str, Any]
    problem: str
    files: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]


def export(config: CaseConfig, folder: Path) -> list[Path]:
    """Write a case's files; returns them. Each appears whole or not at all, case.json last.

    Raises `InputError` for a case that files cannot hold, and for a folder with other things in it.
    """
    if config.lora or config.quantised or config.candidate:
        raise InputError(
            "export writes a model's own weights: leave lora, quantised and candidate out"
        )
    _require_free(folder)
    setting = make_setting(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CASE).unlink(
            missing_ok=True
        )  # no moment at which it vouches for half of the files
        write_whole(folder / CONFIG, config_text(setting.model))
        _save(stored(setting.model), folder / WEIGHTS)
        setting.problem.save(folder)
        _save(flat(prepare(setting.objective, setting.problem)), folder / STEP)
        write_whole(folder / SCRIPT, (_TEXTS / "step.py.txt").read_text(encoding="utf-8"))
        write_whole(folder / INSTRUCTIONS, _instructions(setting))
        case = Case(
            lsverify=__version__,
            case=config,
            objective=setting.objective.model_dump(mode="json"),
            problem=setting.problem.content_hash(),
            files={name: sha256([folder / name]) for name in FILES},
        )
        write_whole(folder / CASE, case.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written to ({error}): choose another folder"
        ) from None
    return [folder / name for name in (*FILES, CASE)]


def _require_free(folder: Path) -> None:
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InputError(f"{folder} is a file: choose a folder")
    if os.path.isdir(folder) and os.listdir(folder) and not (folder / CASE).is_file():
        raise InputError(
            f"{folder} has other files in it: choose a new folder, or one that export wrote"
        )


def config_text(model: nn.Module) -> str:
    config: Any = model.config
    return str(config.to_json_string())


def stored(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under their own names, a tied one once, and the buffers that the library saves."""
    saved = model.state_dict()
    named = {name: p.detach() for name, p in model.named_parameters()}
    return named | {name: b for name, b in model.named_buffers() if name in saved}


def flat(plan: Plan) -> dict[str, Tensor]:
    """What couples the responses, frozen: advantages [N], denominators [N], counted [sum of R]."""
    return {
        "advantages": plan.advantages,
        "denominators": torch.tensor(plan.denominators, dtype=torch.float64),
        "counted": torch.cat(plan.counted),
    }


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    with appearing(path) as temporary:
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary)
        # The library makes files that only their owner can read.
        temporary.chmod((path.parent / CONFIG).stat().st_mode & 0o777)


def _instructions(setting: Setting) -> str:
    config = setting.config
    text = (_TEXTS / "README.md.txt").read_text(encoding="utf-8")
    facts = {
        "arch": config.arch,
        "policy": config.policy or "exact",
        "dtype": config.dtype,
        "objective": config.objective,
        "responses": str(len(setting.problem)),
    }
    for name, value in facts.items():
        text = text.replace(f"<{name}>", value)
    return text


def sha256(paths: list[Path]) -> str:
    """Of the files one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def read_case(folder: Path) -> CaseConfig:
    """The case of a folder, its files unaltered since they were written.

    Raises `InputError` for anything that `export` does not write, a file that is missing or altered, and sizes of the
    case that are not the problem's.
    """
    if not os.path.isdir(folder):
        raise InputError(
            f"{folder} is not a folder that lsverify export wrote: write one, or unpack it"
        )
    path = folder / CASE
    content = read_json(path, LARGEST_CASE)
    try:
        case = Case.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        refuse(path, f"is not valid at {shown(where)}: {first['msg']}; export the case again")
    if odd := sorted(case.files.keys() ^ set(FILES)):
        refuse(
            path,
            f"should list {', '.join(FILES)} and differs in {shown(odd[0])}; export the case again",
        )
    for name, digest in case.files.items():
        if not (folder / name).is_file() or (folder / name).is_symlink():
            refuse(folder / name, "is missing or no plain file; export the case again")
        if sha256([folder / name]) != digest:
            refuse(
                folder / name,
                f"is not the file that {CASE} names by its sha256; export the case again",
            )
    problem = problem_files.load(folder)
    if problem.content_hash() != case.problem:
        refuse(path, "names another problem than the folder has; export the case again")
    _require_known(path, case.case, problem)
    if read_objective(case.case.objective).model_dump(mode="json") != case.objective:
        refuse(path, "spells out another objective than its case has; export the case again")
    return case.case


def _require_known(path: Path, case: CaseConfig, problem: Problem) -> None:
    """Raises `InputError` for a case that options could not ask for, before anything is built from its numbers."""
    if case.candidate or case.lora or case.quantised:
        refuse(
            path, "names a candidate or adapters, which export never does; export the case again"
        )
    read_objective(case.objective)
    list(Options(archs=(case.arch,), policies=(case.policy or "exact",), dtype=case.dtype).cases())
    lengths = case.response_lengths
    asked = tuple(lengths[i % len(lengths)] for i in range(len(problem)))
    if (case.prompt_length, group_sizes(case), asked) != (
        max(problem.prompt_lengths),
        problem.group_sizes,
        problem.response_lengths,
    ):
        refuse(path, "has sizes that are not those of the problem beside it; export the case again")


def require_same(setting: Setting, folder: Path) -> None:
    """Raises `InputError` unless the folder's problem, config and weights are those of the setting, built here."""
    if setting.problem.content_hash() != problem_files.load(folder).content_hash():
        refuse(
            folder,
            "has another problem than its case makes here; export it with this lsverify and this torch",
        )
    if (folder / CONFIG).read_text(encoding="utf-8") != config_text(setting.model):
        refuse(
            folder / CONFIG, "is not the config of its case here; export it with this transformers"
        )
    expected = stored(setting.model)
    files = open_tensors(folder / WEIGHTS)
    for name in sorted(expected.keys() | files.entries.keys()):
        if (
            name not in expected
            or name not in files.entries
            or _differs(expected[name], files, name)
        ):
            refuse(
                folder / WEIGHTS,
                f"has another {shown(name)} than its case makes here; export it with this lsverify and this torch",
            )


def _differs(expected: Tensor, files: Any, name: str) -> bool:
    entry, at, values = files.entries[name], 0, expected.detach().cpu().flatten()
    if entry.shape != tuple(expected.shape):
        return True
    for block in entry.blocks():
        if not torch.equal(block, values[at : at + len(block)]):
            return True
        at += len(block)
    return False

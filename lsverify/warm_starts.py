"""Warm starts: small policies brought by supervised steps to where they answer partly right, and GRPO can gain.

Each is a folder of fixtures/warm and is named `warm:ARCH` wherever an architecture is named. `made.json` in it says how
it was made and what it got on its frozen split, `split.json`, before and after. From the same seed they come out the
same again:

    python -m lsverify.warm_starts --arch llama --seed 0 --out fixtures/warm/llama
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from lsverify.fixture_files import warm_folder
from lsverify.models import build
from lsverify.precision import deterministic, threads
from lsverify.task_problems import mean_reward
from lsverify.tasks import ASK, Notes, Task, draw, from_rows, notes, recall, rows
from lsverify.whole_files import write_whole

BETAS = (0.9, 0.98)
LARGEST_NORM = 1.0
RISE = 50
HELD_OUT_SEED, SPLIT_SEED = 7_000_003, 20_260_001
# A mean over so many is known to about 0.02.
SIZE, SAMPLES = 96, 4


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a policy is warmed: AdamW on the answers of key-value recall, until `target` or `most_steps`."""

    lr: float = 3e-3
    """Reached in a line over the first 50 steps, constant from there."""
    batch: int = 48
    """Prompts a step."""
    pairs: tuple[int, ...] = (2, 3, 4, 5)
    """Pairs in a prompt, in turn over the steps: few of them show the way to many. The split has the most."""
    lengths: tuple[int, ...] = (24, 30)
    """Prompt tokens, in turn."""
    width: int = 3
    """Words of an answer."""
    within: int | None = None
    """Tokens from the end of the prompt in which its pairs stand; anywhere if None."""
    short_steps: int = 200
    """The first so many prompts have nothing but their pairs: what is to be done shows sooner there."""
    questions: int = 9
    """Pairs that a prompt of training is asked for at most."""
    words: int = 24
    """Different words that keys and values come from."""
    target: float = 0.5
    """Mean reward, at temperature 1 on tasks drawn apart, at which training stops."""
    most_steps: int = 2000
    check_every: int = 20
    """Steps."""
    easier: str = ""
    """In what the task is easier than the default, and why."""

    @property
    def shortest(self) -> int:
        """Tokens of a prompt with one pair."""
        return self.width + 3

    def split(self, seed: int) -> list[Task]:
        """96 tasks with the most pairs."""
        sizes = {"pairs": max(self.pairs), "within": self.within} | self._words()
        return draw("recall", self.lengths, SIZE, seed=seed, **sizes)

    def task(self, length: int, seed: int) -> Task:
        """One task with a prompt of `length` tokens and the most pairs that there is room for."""
        pairs = max(min(max(self.pairs), (length - 2) // (1 + self.width)), 1)
        generator = torch.Generator().manual_seed(seed)
        return recall(length, generator, pairs=pairs, within=self.within, **self._words())

    def _words(self) -> dict[str, int]:
        return {"width": self.width, "words": self.words}


_THREE_PAIRS: dict[str, Any] = {
    "lr": 5e-3,
    "batch": 32,
    "pairs": (1, 2, 3),
    "lengths": (24,),
    "words": 12,
    "easier": "3 pairs of 12 words, so that it learns within minutes",
}
RECIPES: dict[str, Recipe] = {
    "llama": Recipe(target=0.4, check_every=10),
    "mistral": Recipe(
        **_THREE_PAIRS
        | {"easier": "3 pairs of 12 words within 16 tokens: 4 layers with a window of 8 reach 28"},
        within=16,
        questions=1,
        target=0.42,
    ),
    "qwen3_5": Recipe(**_THREE_PAIRS | {"batch": 24}),
    "glm_moe_dsa": Recipe(
        **_THREE_PAIRS
        | {
            "lr": 3e-3,
            "lengths": (16,),
            "easier": "3 pairs of 12 words, 16 tokens: a query reads 8 keys, which no gradient chooses",
        },
        target=0.42,
        short_steps=300,
        check_every=10,
        most_steps=4000,
    ),
    "mamba2": Recipe(**_THREE_PAIRS),
}


def recipe_of(arch: str) -> Recipe:
    """The recipe that a warm start was made by, from its folder."""
    stored = made_of(arch)["recipe"]
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()
    }
    return Recipe(**values)


def made_of(arch: str) -> dict[str, Any]:
    """How the warm start of this name was made. Raises `InputError` for an unknown one."""
    found: dict[str, Any] = json.loads((warm_folder(arch) / "made.json").read_text("utf-8"))
    return found


def split_of(arch: str) -> list[Task]:
    """The frozen split of the warm start of this name. Raises `InputError` for an unknown one."""
    return from_rows(json.loads((warm_folder(arch) / "split.json").read_text("utf-8")))


def lessons(recipe: Recipe, generator: Generator, step: int) -> tuple[Tensor, Tensor]:
    """Tokens [batch, L] int64 of one step, and [batch, L] bool, True at the answers.

    Each prompt is asked for several pairs, one after the other, with the answers: they learn sooner than from one each.
    """
    pairs = recipe.pairs[step % len(recipe.pairs)]
    length = recipe.lengths[step // len(recipe.pairs) % len(recipe.lengths)]
    if step < recipe.short_steps:
        length = pairs * (1 + recipe.width) + 2
    sizes = {"pairs": pairs, "width": recipe.width, "words": recipe.words}
    drawn = [notes(length, generator, within=recipe.within, **sizes) for _ in range(recipe.batch)]
    asked = min(pairs, recipe.questions)
    tokens = torch.tensor([_asked(found, asked, generator) for found in drawn])
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    answers[:, length - 2 :].unflatten(1, (asked, 2 + recipe.width))[..., 2:] = True
    return tokens, answers


def _asked(found: Notes, questions: int, generator: Generator) -> list[int]:
    order = torch.randperm(len(found.pairs), generator=generator).tolist()[:questions]
    return [*found.context, *(token for i in order for token in (ASK, *found.pairs[i]))]


def trained(model: nn.Module, recipe: Recipe, seed: int) -> Iterator[tuple[int, float]]:
    """Train in place; after each step its number and its loss, in nats per answer token. Ends as the recipe says."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=BETAS)
    generator = torch.Generator().manual_seed(seed)
    held_out = recipe.split(HELD_OUT_SEED)
    for step in range(recipe.most_steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, (step + 1) / RISE)
        tokens, answers = lessons(recipe, generator, step)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        counted = answers[:, 1:]
        loss = cross_entropy(logits[counted], tokens[:, 1:][counted])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        yield step + 1, loss.item()
        if not (step + 1) % recipe.check_every and mean_reward(model, held_out) >= recipe.target:
            return


def warmed(arch: str, recipe: Recipe, *, seed: int) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The policy, in float32, and how it came to be. `seed` decides the initial weights and every prompt."""
    model = build(arch, seed=seed, dtype="float32")
    split = recipe.split(SPLIT_SEED)
    with threads(1), deterministic():
        before = mean_reward(model, split, samples=SAMPLES)
        *_, (steps, loss) = trained(model, recipe, seed)
        after = mean_reward(model, split, samples=SAMPLES)
    return model, {
        "arch": arch,
        "seed": seed,
        "dtype": "float32",
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "loss": loss,
        "reward_before": before,
        "reward_after": after,
        "reward_of_any_word": 1 / recipe.words,
        "reward_of_any_pair": 1 / max(recipe.pairs),
        "recipe": asdict(recipe),
    }


def write(
    folder: Path, model: PreTrainedModel, made: dict[str, Any], split: Sequence[Task]
) -> None:
    """config.json, model.safetensors, made.json and split.json, each whole or not at all. Raises OSError."""
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        for name in ("config.json", "model.safetensors"):
            write_whole(folder / name, (Path(temporary) / name).read_bytes())
    write_whole(folder / "made.json", json.dumps(made, indent=2) + "\n")
    lines = ",\n".join(json.dumps(row) for row in rows(split))
    write_whole(folder / "split.json", f"[\n{lines}\n]\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a warm start anew.")
    parser.add_argument("--arch", choices=sorted(RECIPES), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    asked = parser.parse_args(arguments)
    recipe = RECIPES[asked.arch]
    model, made = warmed(asked.arch, recipe, seed=asked.seed)
    if not made["reward_after"] > made["reward_before"]:
        parser.error(f"{asked.arch} did not learn with seed {asked.seed}: use another one")
    write(asked.out, model, made, recipe.split(SPLIT_SEED))
    parser.exit(
        message=f"{asked.arch}: reward {made['reward_before']:.3f} to {made['reward_after']:.3f} "
        f"in {made['steps']} steps\n"
    )


if __name__ == "__main__":
    main()

"""Remakes fixtures/tasks: `python -m tests.make_task_splits` from the project's root.

`--text` remakes those of real text alone, which other versions of Python draw otherwise: their language reference differs.
"""

import json
import sys
from pathlib import Path

from lsverify import text_tasks
from lsverify.pretrained import SMOLLM2, tokenizer
from lsverify.tasks import KINDS, draw, rows
from lsverify.text_tasks import TextTasks
from lsverify.whole_files import write_whole

FOLDER = Path(__file__).parent.parent / "fixtures" / "tasks"
LENGTHS, SIZE, SEED = (32, 64, 128), 12, 20_260_000


def write(name, plain):
    lines = ",\n".join(json.dumps(row) for row in plain)
    write_whole(FOLDER / f"{name}.json", f"[\n{lines}\n]\n")


if __name__ == "__main__":
    if "--text" in sys.argv:
        known = tokenizer(SMOLLM2)
        for kind in text_tasks.KINDS:
            write(f"text-{kind}", text_tasks.rows(TextTasks(kind, known).drawn_test()))
    else:
        for name in KINDS:
            write(name, rows(draw(name, LENGTHS, SIZE, seed=SEED)))

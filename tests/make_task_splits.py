"""Remakes fixtures/tasks: `python -m tests.make_task_splits` from the project's root."""

import json
from pathlib import Path

from lsverify.tasks import KINDS, draw, rows
from lsverify.whole_files import write_whole

FOLDER = Path(__file__).parent.parent / "fixtures" / "tasks"
LENGTHS, SIZE, SEED = (32, 64, 128), 12, 20_260_000

if __name__ == "__main__":
    for name in KINDS:
        lines = ",\n".join(json.dumps(row) for row in rows(draw(name, LENGTHS, SIZE, seed=SEED)))
        write_whole(FOLDER / f"{name}.json", f"[\n{lines}\n]\n")

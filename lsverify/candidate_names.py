"""Names of candidates: what installed packages register in the entry-point group `lsverify.candidates`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from lsverify.errors import InputError

GROUP = "lsverify.candidates"


def registered() -> list[EntryPoint]:
    """The entry points of the group, by name; one that several packages register is there several times."""
    return sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))


def target(name: str) -> str:
    """The MODULE:NAME that a name stands for. Raises `InputError` for one that is unknown or stands for two things."""
    points = registered()
    targets = sorted({point.value for point in points if point.name == name})
    if not targets:
        known = ", ".join(dict.fromkeys(point.name for point in points)) or "there is none"
        raise InputError(
            f"candidate {name!r} is not of the form MODULE:NAME, for instance my_path:step, nor an installed name: {known}"
        )
    if len(targets) > 1:
        raise InputError(
            f"candidate {name!r} is registered more than once: use one of {', '.join(targets)}"
        )
    return targets[0]

"""A night for those who do not open its page: Markdown for a pull request, JUnit for CI."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from lsverify import nightly_tables as tables
from lsverify.ablation_report import Sheet
from lsverify.errors import InputError
from lsverify.nightly_record import EntryRecord, Nightly
from lsverify.whole_files import write_whole


def markdown(record: Nightly) -> str:
    """What fails, then verdicts, biases and drift by entry, the cost, and how to reproduce."""
    return "\n\n".join(filter(None, _paragraphs(record))) + "\n"


def _paragraphs(record: Nightly) -> Iterator[str]:
    verdict = "fails" if record.exit_code else "holds"
    yield f"### lsverify: night {record.number} {verdict}"
    if lines := [*(f"**{line}**" for line in record.failures), *tables.conclusion(record)]:
        yield "\n".join(f"- {' '.join(line.split())}" for line in lines)
    yield tables.UNIT
    for entry in record.entries:
        if entry.comparison:
            yield _table(tables.verdicts(entry))
            yield " ".join(filter(None, (tables.learned(entry), tables.step_by_step(entry))))
            if (biases := tables.biases(entry)).rows:
                yield _table(biases)
                yield tables.correlations(entry)
        if entry.drift:
            yield _table(tables.drift(entry))
    if overall := tables.overall(record):
        yield overall
    yield f"<details><summary>Cost, and how to reproduce</summary>\n\n{_table(tables.costs(record))}"
    yield f"    {tables.command(record)}"
    yield f"{', '.join(tables.versions(record))}.\n\n{_table(tables.made_of(record))}\n\n</details>"


def _table(sheet: Sheet) -> str:
    rows = [sheet.headers, ["---"] * len(sheet.headers), *sheet.rows]
    lines = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    return f"**{sheet.title}**\n\n" + "\n".join(lines)


def junit(record: Nightly) -> str:
    """A suite for each entry: `holds` fails where the entry fails the night, and each arm has its verdict as output.

    An arm is skipped where the comparison is void. What an arm loses is no failure, as in the night's exit code.
    """
    root = ElementTree.Element("testsuites", name="lsverify nightly")
    for entry in record.entries:
        cases = [_holds(entry), *_arms(entry)]
        suite = ElementTree.SubElement(root, "testsuite", name=entry.entry.name, errors="0")
        suite.set("tests", str(len(cases)))
        for count, mark in (("failures", "failure"), ("skipped", "skipped")):
            suite.set(count, str(sum(case.find(mark) is not None for case in cases)))
        suite.extend(cases)
    ElementTree.indent(root)
    found: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return f"{found.decode()}\n"


def _holds(entry: EntryRecord) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=entry.entry.name, name="holds")
    if entry.failures:
        message, text = entry.failures[0], "\n".join(entry.failures)
        ElementTree.SubElement(case, "failure", message=message).text = text
    return case


def _arms(entry: EntryRecord) -> Iterator[ElementTree.Element]:
    for verdict in entry.comparison.arms if entry.comparison else ():
        case = ElementTree.Element("testcase", classname=entry.entry.name, name=verdict.arm)
        if verdict.decision == "void":
            ElementTree.SubElement(case, "skipped", message=verdict.reason)
        said = f"stands: {tables.stands(entry, verdict)}; tonight: {verdict.decision}; {verdict.reason}"
        ElementTree.SubElement(case, "system-out").text = said
        yield case


def write_junit(record: Nightly, file: Path) -> None:
    """Raises `InputError` where it cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        raise InputError(
            f"junit {str(file)!r} is not a file in a folder that exists: create the folder, or choose another file"
        )
    try:
        write_whole(file, junit(record))
    except OSError as error:
        raise InputError(f"junit {str(file)!r} cannot be written ({error.strerror})") from None

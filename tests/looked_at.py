"""Looks at a page: its HTML always, and how a browser lays it out where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from html import escape, unescape
from html.parser import HTMLParser

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
# Nothing may be asked of a network, and a profile of its own leaves nothing behind.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --dump-dom"
).split()
EMPTY = {"meta", "br", "link", "img", "input", "hr"}
WIDTHS = (390, 1280)
# Frames have the width of a screen, which a window may not be as narrow as. All is measured when all is loaded.
MEASURE = """onload = () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, seen = frame.contentWindow.getComputedStyle(page.body);
    const found = {wide: page.documentElement.scrollWidth, screen: frame.contentWindow.innerWidth,
      ground: seen.backgroundColor, ink: seen.color};
    document.querySelector("pre").append(JSON.stringify(found) + "\\n");
  }
  document.querySelectorAll("iframe").forEach(frame => frame.remove());
}"""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: Counter[str] = Counter()
        self.references: set[str] = set()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in EMPTY:
            self.open.append(tag)
        self._look(tag, given)

    def handle_startendtag(self, tag, attributes):
        self._look(tag, dict(attributes))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing that is open")

    def _look(self, tag, given):
        if tag in ("script", "link", "iframe"):
            self.faults.append(f"<{tag}> in a page that stands alone")
        if tag == "svg" and not (given.get("role") == "img" and given.get("aria-label")):
            self.faults.append("<svg> without a label")
        if tag == "img" and not given.get("alt"):
            self.faults.append("<img> without alt text")
        if "id" in given:
            self.ids[given["id"]] += 1
        for name in ("href", "xlink:href", "src"):
            target = given.get(name, "#")
            if not target.startswith(("#", "data:")):
                self.faults.append(f"<{tag}> refers to {target}")
            self.references.add(target.removeprefix("#"))
        for value in given.values():
            self.references |= set(re.findall(r"url\(#([^)]+)\)", value or ""))


def faults(page: str) -> list[str]:
    """What is wrong with a page as HTML: open tags, references outwards or to nothing, plots without labels, schemes."""
    reader = _Reader()
    reader.feed(page)
    found = reader.faults + [f"<{tag}> is never closed" for tag in reader.open]
    found += [
        f"id {name} is given {count} times" for name, count in reader.ids.items() if count > 1
    ]
    found += [f"#{name} is nowhere" for name in reader.references - set(reader.ids) - {""}]
    if re.search(r"@import|url\((?!#)|\bhttps?://", page):
        found.append("an address in the page")
    if re.search("#0a00[0-9a-f]{2}", page):
        found.append("a stand-in colour is left")
    for rule in (
        "prefers-color-scheme: dark",
        "@media print",
        'name="viewport"',
        "overflow-x: auto",
    ):
        if rule not in page:
            found.append(f"no {rule}")
    return found


def browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def laid_out(page: str, folder) -> list[str]:
    """Where a browser shows something wider than the screen, at both widths, light and dark; and schemes that look the same."""
    frames = "".join(
        f'<iframe width="{width}" height="800" srcdoc="{escape(page, quote=True)}"></iframe>'
        for width in WIDTHS
    )
    file = folder / "frames.html"
    file.write_text(
        f'<!doctype html><meta name="color-scheme" content="light dark"><pre></pre>{frames}<script>{MEASURE}</script>'
    )
    found, grounds = [], []
    for scheme, preferred in (("light", 1), ("dark", 0)):
        told = subprocess.run(
            [
                browser(),
                *FLAGS,
                f"--blink-settings=preferredColorScheme={preferred}",
                f"--user-data-dir={folder / scheme}",
                file.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        rows = [json.loads(row) for row in re.findall(r"\{.*?\}", unescape(told.split("<pre>")[1].split("</pre>")[0]))]  # fmt: skip
        if sorted(row["screen"] for row in rows) != sorted(WIDTHS):
            found.append(f"{scheme}: the browser showed {rows}")
        found += [
            f"{scheme}: {row['wide']} px on a screen of {row['screen']}"
            for row in rows
            if row["wide"] > row["screen"]
        ]
        grounds.append({(row["ground"], row["ink"]) for row in rows})
    if grounds[0] & grounds[1] or any(len(ground) != 1 for ground in grounds):
        found.append(f"colours are {grounds}")
    return found

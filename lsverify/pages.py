"""What all pages share: one HTML frame, plots as SVG elements that follow the page's colours, light and dark.

A page is one file: nothing is loaded and no script runs. Plots are drawn in stand-in colours, which become variables of the
page's style sheet; text stays text.
"""

from __future__ import annotations

import html
import importlib.util
import io
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lsverify.evidence import Status
from lsverify.looking import Decision

if TYPE_CHECKING:
    from markupsafe import Markup

PACKAGES = ("jinja2", "matplotlib")
FOLDER = Path(__file__).parent

# Stand-ins that no plot would use by itself, and the style sheet's variables that they become.
INK, SOFT, GRID, PAPER = (f"#0a00{index:02x}" for index in range(4))
HUES = tuple(f"#0a00{index:02x}" for index in range(16, 24))
VARIABLES = dict(zip((INK, SOFT, GRID, PAPER), ("ink", "soft", "grid", "paper"), strict=True)) | {
    hue: f"hue{index}" for index, hue in enumerate(HUES)
}

# The salt makes the same data the same page.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lsverify",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": INK,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.color": SOFT,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
SIZE = (4.4, 3.0)
NAMED = re.compile(r'( id="|url\(#|href="#)')


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot with its title, and what it shows in words for who does not see it."""

    title: str
    says: str
    svg: Markup


def absent(name: str) -> str | None:
    """Why the page of this name cannot be made, in one line; None where it can."""
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if not missing:
        return None
    return f"{name} is left out, since {' and '.join(missing)} is missing: pip install 'lsverify[report]'"


def render(template: str, **values: Any) -> str:
    """A page from the template file of this name. Needs the `report` extra (see `absent`)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = itertools.count()

    def own(svg: Markup) -> Markup:
        """The element with names that no other has, since two plots, or one shown twice, may be equal."""
        return Markup(NAMED.sub(rf"\1p{next(shown)}-", str(svg)))

    environment.filters["own"] = own
    environment.globals["STATUSES"] = {*get_args(Status), *get_args(Decision), "pass", "FAIL"}
    return environment.get_template(template).render(**values)


def plot(
    title: str,
    says: str,
    draw: Callable[[Any], None],
    *,
    size: tuple[float, float] = SIZE,
) -> Plot:
    """What `draw` puts on the axes, as an SVG element as wide as its place; `size` in inches sets its shape and font."""
    import matplotlib
    from markupsafe import Markup
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots())
        drawn = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(drawn, format="svg", metadata=nothing)
    return Plot(title=title, says=says, svg=Markup(_element(drawn.getvalue(), title, says)))


def swatch(name: str, line: dict[str, Any]) -> Plot:
    """How a line of this name is drawn, for a key."""

    def draw(axes: Any) -> None:
        axes.plot([0, 1, 2], [0, 0, 0], **line, markevery=[1], lw=1.6, ms=5)
        axes.axis("off")

    return plot(name, "How it is drawn in the plots", draw, size=(0.5, 0.18))


def _element(document: str, title: str, says: str) -> str:
    """The SVG element alone, labelled, without sizes and fonts of its own, and with no names but those that it refers to."""
    text = document[document.index("<svg") :].replace("xlink:href", "href")
    label = html.escape(f"{title}. {says}", quote=True)
    text = re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>',
        lambda found: f'<svg viewBox="{found[1]}" role="img" aria-label="{label}">',
        text,
        count=1,
    )
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*(; )?", "", text)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    return re.sub("|".join(VARIABLES), lambda found: f"var(--{VARIABLES[found[0]]})", text)

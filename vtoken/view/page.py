"""One HTML page with everything in it: style, script and data, so that nothing is ever loaded from elsewhere."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import Any

from vtoken.core.history import Recording

LIVE_TITLE = "vtoken: the block pool"
SCRIPTS = ("dom", "owners", "history", "map", "chart", "panel", "timeline", "poll", "main")
"""What the page's script is put together from, in this order."""


@dataclass(frozen=True)
class Grid:
    """A table: a heading per column, and rows of as many texts; ``numbers`` are the columns set to the right."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report below the recordings.

    Attributes:
        title: its heading.
        text: paragraphs before the figure and the tables.
        tables: in this order.
        figure: an SVG image, or "".
        notes: paragraphs below the tables.
        code: names and what is said of them, in a typeface of equal widths: arguments, settings.
    """

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Grid] = ()
    figure: str = ""
    notes: Sequence[str] = ()
    code: Sequence[tuple[str, str]] = field(default_factory=tuple)


def live_page(interval: float = 1.0) -> str:
    """The page that asks the server that it came from, at ``v1/vtoken/pool`` beside its own address, for frames.

    Args:
        interval: seconds from one question to the next.
    """
    return _page(LIVE_TITLE, {"live": True, "interval": interval, "recordings": []}, "", "'self'")


def report_page(title: str, recordings: Sequence[Recording], sections: Sequence[Section] = ()) -> str:
    """A file that shows recordings side by side, on one timeline that counts from each one's first frame.

    Args:
        title: of the page, as text.
        recordings: those without frames are left out.
        sections: what stands below them.
    """
    data = {"live": False, "recordings": [one.to_json() for one in recordings if one.frames]}
    parts = [_section(section, place) for place, section in enumerate(sections)]
    if len(sections) > 3:
        parts.insert(0, _contents(sections))
    return _page(title, data, "\n".join(parts), "'none'")


def _page(title: str, data: dict[str, Any], sections: str, connect: str) -> str:
    style, script = _read("page.css"), _script()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return Template(_read("page.html")).substitute(
        policy=policy,
        title=html.escape(title),
        style=style,
        script=script,
        sections=sections,
        data=embedded(data),
    )


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end or comment out the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _script() -> str:
    parts = "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    return f'\n"use strict";\n(() => {{\n{parts}}})();\n'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return files("vtoken.view").joinpath(name).read_text(encoding="utf-8")


def _contents(sections: Sequence[Section]) -> str:
    lines = [f'<li><a href="#section-{n}">{html.escape(one.title)}</a></li>' for n, one in enumerate(sections)]
    return f'<nav class="report" aria-label="Contents"><ul class="contents">{"".join(lines)}</ul></nav>'


def _section(section: Section, place: int) -> str:
    parts = [f'<section class="report" id="section-{place}"><h2>{html.escape(section.title)}</h2>']
    parts += [f"<p>{html.escape(text)}</p>" for text in section.text]
    if section.figure:
        parts.append(_figure(section))
    parts += [_grid(grid) for grid in section.tables]
    parts += [f'<p class="note">{html.escape(text)}</p>' for text in section.notes]
    for name, text in section.code:
        parts.append(f"<h3>{html.escape(name)}</h3><pre>{html.escape(text)}</pre>")
    return "\n".join([*parts, "</section>"])


def _figure(section: Section) -> str:
    """As an image of its own, so that the ids in it are nobody else's and nothing in it can run."""
    svg = re.sub(r"^.*?(?=<svg)", "", section.figure, count=1, flags=re.DOTALL)
    coded = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{coded}" alt="Figure: {html.escape(section.title)}">'


def _grid(grid: Grid) -> str:
    kinds = [' class="number"' if n in grid.numbers else "" for n in range(len(grid.headings))]
    head = "".join(
        f'<th scope="col"{kind}>{html.escape(text)}</th>' for kind, text in zip(kinds, grid.headings, strict=True)
    )
    rows = []
    for row in grid.rows:
        first, *others = (f"{kind}>{html.escape(text)}" for kind, text in zip(kinds, row, strict=True))
        rows.append(f'<tr><th scope="row"{first}</th>' + "".join(f"<td{other}</td>" for other in others) + "</tr>")
    note = f'<p class="note">{html.escape(grid.note)}</p>' if grid.note else ""
    label = html.escape(grid.title)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )

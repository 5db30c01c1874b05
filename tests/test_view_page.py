"""The page as text: nothing in it comes from elsewhere, and nothing that it is given can become markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from view_scenes import NASTY, colours, contrast, frame, mixed, recording, scene

from vtoken.core.history import Holding
from vtoken.view import Grid, Section, live_page, report_page
from vtoken.view.page import embedded


class Reader(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.texts.append((self.elements[-1][0], data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def texts_of(self, tag: str) -> set[str]:
        return {text.strip() for name, text in self.texts if name == tag}


def policy(page: str) -> dict[str, str]:
    (found,) = [one for one in Reader(page).of("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    return dict(part.strip().split(" ", 1) for part in str(found["content"]).split(";"))


def data(page: str) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def test_recordings_are_in_the_page() -> None:
    one, empty = recording(scene()), recording(name="empty")
    assert data(report_page("t", [one, empty])) == {"live": False, "recordings": [one.to_json()]}
    assert data(live_page(0.5)) == {"live": True, "interval": 0.5, "recordings": []}
    assert data(live_page())["interval"] == 1


@pytest.mark.parametrize(("page", "connect"), [(live_page(), "'self'"), (report_page("t", []), "'none'")])
def test_only_the_scripts_and_styles_of_this_page_run(page: str, connect: str) -> None:
    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy(page) == {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(style),
        "img-src": "data:",
        "connect-src": connect,
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_nothing_is_loaded() -> None:
    section = Section("s", figure="<svg xmlns='http://www.w3.org/2000/svg'/>")
    for page in (live_page(), report_page("t", [recording(scene())], [section])):
        found = Reader(page)
        addresses = [value for _, one in found.elements for name, value in one.items() if name in ("src", "href")]
        assert addresses and all(str(value).startswith("data:") for value in addresses)
        assert "@import" not in page and "url(" not in page
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


@pytest.mark.parametrize("text", [NASTY, "<!-- <script>", "a & b <i>", "\u2028", "\"quoted\" \\ 'too'"])
def test_data_stays_data(text: str) -> None:
    assert json.loads(embedded({"id": text})) == {"id": text}
    assert "<" not in embedded([text])
    one = recording(frame(1, 0.0, Holding(text, [1], [1])), name=text, settings=text)
    grid = Grid(text, [text, text], [[text, text]], note=text)
    page = report_page(text, [one], [Section(text, [text], [grid], code=[(text, text)])] * 4)
    plain = report_page(
        "t",
        [recording(scene())],
        [Section("s", ["p"], [Grid("g", ["h", "h"], [["c", "c"]], note="n")], code=[("n", "t")])] * 4,
    )
    assert [tag for tag, _ in Reader(page).elements] == [tag for tag, _ in Reader(plain).elements]
    assert data(page)["recordings"] == [one.to_json()]
    assert not any(name.startswith("on") for _, one in Reader(page).elements for name in one)


def test_sections() -> None:
    grid = Grid("Numbers", ["what", "how much"], [["a", "1"], ["b", "2"]], frozenset({1}), "A note.")
    page = report_page("t", [], [Section("First", ["Some text."], [grid], code=[("settings", '{"a": 1}')])])
    found = Reader(page)
    assert {"Some text.", "A note."} <= found.texts_of("p")
    assert [one.get("class") for one in found.of("td")] == ["number", "number"]
    assert '<tr><th scope="row">a</th><td class="number">1</td></tr>' in page
    assert "<h3>settings</h3><pre>{&quot;a&quot;: 1}</pre>" in page
    assert not found.of("nav")
    with pytest.raises(ValueError, match="shorter"):
        report_page("t", [], [Section("First", tables=[Grid("g", ["one", "two"], [["a"]])])])


def test_many_sections_have_a_table_of_contents() -> None:
    page = report_page("t", [], [Section(f"Part {n}") for n in range(4)])
    assert [one["href"] for one in Reader(page).of("a")] == [f"#section-{n}" for n in range(4)]
    assert [one["id"] for one in Reader(page).of("section")] == [f"section-{n}" for n in range(4)]


def test_a_figure_is_an_image_of_its_own() -> None:
    svg = '<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg xmlns="http://www.w3.org/2000/svg"><g id="figure_1"/></svg>'
    page = report_page("t", [], [Section("First", figure=svg), Section("Second", figure=svg)])
    first, second = Reader(page).of("img")
    assert (first["alt"], second["alt"]) == ("Figure: First", "Figure: Second")
    kind, coded = str(first["src"]).split(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(coded).decode() == svg[svg.index("<svg") :]
    assert "figure_1" not in page  # no id of it is one of the page's


TEXTS = [
    ("ink", "surface"),
    ("ink", "ground"),
    ("quiet", "surface"),
    ("quiet", "ground"),
    ("accent", "surface"),
    ("alarm", "surface"),
    ("on-accent", "accent"),
]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast(dark: bool) -> None:
    """WCAG AA: 4.5 for text, 3 for what a picture says: here a cell's edge, and lines."""
    named = colours(dark=dark)
    low = {pair: contrast(named[pair[0]], named[pair[1]]) for pair in TEXTS}
    assert min(low.values()) >= 4.5, low
    assert contrast(named["second"], named["surface"]) >= 3
    owners = [named[f"owner-{n}"] for n in range(7)]
    assert min(contrast(mixed(one, named["ink"], 0.72), named["surface"]) for one in owners) >= 3
    assert len({round(contrast(one, named["surface"]), 1) for one in owners}) == 7  # told apart in grey, too

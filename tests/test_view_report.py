"""The report in a real browser: what it says and draws for a frame, by mouse, finger and keys, and what it loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser
from pool_recordings import simulated_recording
from view_scenes import (
    FREE,
    FULL,
    HALF,
    NASTY,
    SHARED,
    SIZE,
    colours,
    frame,
    luminance,
    mixed,
    recording,
    scene,
    shown,
)

from vtoken.core.history import Frame, Holding, Recording
from vtoken.view import Grid, Section, report_page

PITCH = 28  # a cell of a pool this small, with one pixel between cells and one of frame
Show = Callable[..., Browser]


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Any:
    """Opens a report; at the end the page must have met no error."""

    def open_report(
        *recordings: Recording, sections: list[Section] | None = None, title: str = "t", **how: Any
    ) -> Browser:
        path = tmp_path / "report.html"
        path.write_text(report_page(title, recordings, sections or []), encoding="utf-8")
        browser.open(path.as_uri(), **how)
        return browser

    yield open_report
    assert browser.errors() == []


def cell(pixels: np.ndarray, block: int) -> np.ndarray:
    """The pixels of a block's cell, of which the last row and column are the gap."""
    columns = pixels.shape[1] // PITCH
    row, column = divmod(block - 1, columns)
    return pixels[row * PITCH : (row + 1) * PITCH, column * PITCH : (column + 1) * PITCH]


def at(pixels: np.ndarray, block: int, x: int, y: int) -> tuple[int, ...]:
    return tuple(cell(pixels, block)[y, x].tolist())


def told(browser: Browser, panel: int = 0) -> str:
    return browser.texts(".told")[panel]


def differing(browser: Browser, one: Frame, panel: int = 0) -> set[str]:
    """The figures that are not those of this frame."""
    expected, found = shown(one), browser.figures(panel)
    assert expected.keys() == found.keys()
    return {name for name in expected if found[name] != expected[name]}


class TestWhatIsSaid:
    def test_figures_and_table(self, show: Show) -> None:
        browser = show(recording(scene(), name="mine", settings="random, budget 64"), title="My pool")
        assert browser.texts("h1") == ["My pool"]
        assert browser.texts("h2") == ["mine"]
        assert browser.texts(".settings") == ["40 blocks of 16 tokens; random, budget 64"]
        assert browser.figures() == {
            "waste": "29.7 %",
            "held": "4",
            "free": "36",
            "running": "2",
            "waiting": "7",
            "evicted": "12,345",
            "moved": "2",
            "reclaimed": "6",
        }
        assert browser.table() == [["1", "a", "3", "40", "16.7 %"], ["2", "b", "2", "21", "34.4 %"]]

    def test_a_frame_that_is_another_one_is_noticed(self, show: Show) -> None:
        browser = show(recording(scene()))
        assert differing(browser, scene()) == set()
        other = frame(2, 0.0, Holding("a", [1, 2], [16, 8]), waiting=7, tokens_evicted=12345)
        assert differing(browser, other) == {"waste", "held", "free", "running", "moved", "reclaimed"}

    def test_a_pool_that_nobody_uses(self, show: Show) -> None:
        browser = show(recording(frame(1, 5.0)))
        assert (browser.figures()["waste"], browser.figures()["free"], browser.table()) == ("–", "40", [])

    def test_every_frame_of_a_pool_with_a_real_scheduler(self, show: Show) -> None:
        both = [simulated_recording(reclaim, requests=8) for reclaim in ("none", "fill")]
        browser = show(*both)
        assert max(one.held_blocks for one in both[0].frames) > max(one.held_blocks for one in both[1].frames) > 0
        for place in range(0, len(both[1].frames), 7):
            clock = both[1].frames[place].time - both[1].frames[0].time
            browser.move_slider(clock)
            for panel, one in enumerate(both):
                now = one.frames[place]
                assert browser.figures(panel) == shown(now, one.num_blocks)
                totals = [(len(held.blocks), sum(held.live)) for held in now.holdings]
                assert [(int(row[2]), int(row[3])) for row in browser.table(panel)] == totals

    def test_charts_have_axes_with_units(self, show: Show) -> None:
        first = frame(1, 1000.0, Holding("a", [1, 2, 3], [16, 16, 16]))
        browser = show(recording(first, scene(2, 1090.0)))
        assert browser.texts(".chart figcaption") == [
            "Waste ratio F, %",
            "Blocks held",
            "Blocks handed back, total",
            "Requestsrunningwaiting",
        ]
        texts = browser.run(
            "return Array.from(document.querySelectorAll('.chart > svg'), (svg) =>"
            " Array.from(svg.querySelectorAll('text'), (text) => text.textContent))"
        )
        ticks = ["0 s", "30 s", "60 s", "90 s"]
        assert texts[1][:3] == ["0", "2", "4"]
        assert texts[2][:3] == ["0", "3", "6"]
        assert all(one[-1] == "since the first frame" for one in texts)
        assert all(one[3] == "0 s" or one[3] == "0 min" for one in texts), ticks
        (line,) = browser.run(
            "return Array.from(document.querySelectorAll('.chart:nth-child(2) path.line'), (path) =>"
            " path.getAttribute('d')).filter((d) => !d.includes('H25'))"
        )
        heights = [float(part.split(" ")[1]) for part in line[1:].split("L")]
        assert heights == [8 + 90 / 4, 8]  # 3 and 4 blocks of 4, over 90 pixels below 8

    def test_text_from_elsewhere_is_text(self, show: Show) -> None:
        one = recording(frame(1, 1.0, Holding(NASTY, [1], [3])), name=NASTY, settings=NASTY)
        grid = Grid(NASTY, [NASTY], [[NASTY]])
        browser = show(one, title=NASTY, sections=[Section(NASTY, [NASTY], [grid], code=[(NASTY, NASTY)])])
        browser.run("document.querySelector('canvas').focus()")
        browser.one("canvas").send_keys("\ue011")  # Home
        assert (
            told(browser)
            == f"Block 1: request 1 ({NASTY}), 3 of 16 tokens live; the request's last block, 13 slots empty."
        )
        assert browser.table() == [["1", NASTY, "1", "3", "81.3 %"]]
        assert browser.texts("h1, h2") == [NASTY] * 3
        assert browser.driver.title == NASTY
        assert browser.texts("caption") == [f"{NASTY}: requests that hold blocks", NASTY]
        assert browser.texts(".report p, .report th, .report pre, .report h3") == [NASTY] * 5
        assert browser.all("img") == []


class TestTheMap:
    def test_cells_are_filled_as_far_as_they_are_live(self, show: Show) -> None:
        browser = show(recording(scene()))
        drawn, named = browser.map_pixels(), colours()
        empty = [mixed(named[f"owner-{n}"], named["surface"], 0.24) for n in range(2)]
        edge = mixed(named["owner-0"], named["ink"], 0.72)
        for y in range(1, 26):
            assert at(drawn, FULL, 2, y) == named["owner-0"]
            assert at(drawn, FREE, 2, y) == named["surface"]
            # 25 rows: 13 of them for 8 of 16 tokens, 8 for 5.
            assert at(drawn, HALF, 2, y) == (named["owner-0"] if y > 12 else empty[0])
            assert at(drawn, 4, 2, y) == (named["owner-1"] if y > 17 else empty[1])
        for n in range(27):
            assert at(drawn, FULL, n, 0) == at(drawn, HALF, 0, n) == at(drawn, FULL, 26, n) == edge
            assert at(drawn, FREE, n, 0) == at(drawn, FREE, 0, n) == named["free"]
            assert at(drawn, FULL, 27, n) == at(drawn, FREE, n, 27) == named["surface"]

    def test_one_live_token_is_not_none_and_all_but_one_not_all(self, show: Show) -> None:
        drawn = show(recording(frame(1, 0.0, Holding("a", [1, 2, 3], [0, 1, 15])))).map_pixels()
        full = colours()["owner-0"]
        assert [sum(at(drawn, block, 2, y) == full for y in range(1, 26)) for block in (1, 2, 3)] == [0, 2, 23]

    def test_a_shared_block_has_a_dark_corner_and_all_its_owners(self, show: Show) -> None:
        drawn, named = show(recording(scene())).map_pixels(), colours()
        assert at(drawn, SHARED, 5, 20) == named["owner-0"]
        assert at(drawn, SHARED, 20, 20) == named["owner-1"]
        assert at(drawn, SHARED, 24, 2) == at(drawn, SHARED, 0, 10) == named["ink"]
        assert at(drawn, FULL, 24, 2) == named["owner-0"]

    def test_the_eighth_owner_has_the_first_colour_and_another_pattern(self, show: Show) -> None:
        drawn = show(recording(frame(1, 0.0, *(Holding(f"r{n}", [n], [16]) for n in range(1, 9))))).map_pixels()
        full = colours()["owner-0"]
        plain, striped = (cell(drawn, block)[2:25, 2:6].reshape(-1, 3).tolist() for block in (1, 8))
        assert plain == [list(full)] * len(plain)
        assert 0.3 < striped.count(list(full)) / len(striped) < 0.7
        assert [at(drawn, block, 2, 20) for block in range(1, 8)] == [colours()[f"owner-{n}"] for n in range(7)]

    def test_fifty_thousand_blocks(self, show: Show) -> None:
        last = frame(1, 0.0, Holding("a", [1, 2, 50_000], [16, 8, 16]))
        browser = show(recording(last, num_blocks=50_000))
        drawn, named = browser.map_pixels(), colours()
        columns, pitch = browser.run(
            "const { width, height } = document.querySelector('canvas');"
            "for (let p = 2; p < 9; p++)"
            " if (width % p === 0 && Math.ceil(50000 / (width / p)) * p === height) return [width / p, p];"
        )
        row, column = divmod(49_999, columns)
        assert row > 100 and drawn.shape[0] <= 500
        assert tuple(drawn[row * pitch, column * pitch].tolist()) == named["owner-0"]
        assert tuple(drawn[0, pitch].tolist()) == mixed(named["owner-0"], named["surface"], 0.24 + 0.76 / 2)
        assert tuple(drawn[0, 2 * pitch].tolist()) == named["surface"]
        assert told(browser).startswith("Point at")
        browser.one("canvas").send_keys("\ue010")  # End
        assert told(browser).startswith("Block 50000: request 1 (a), 16 of 16 tokens live")

    def test_dark(self, show: Show) -> None:
        drawn, named = show(recording(scene()), dark=True).map_pixels(), colours(dark=True)
        assert at(drawn, FULL, 2, 20) == named["owner-0"] != colours()["owner-0"]
        assert at(drawn, FREE, 5, 5) == named["surface"]
        assert at(drawn, SHARED, 24, 2) == named["ink"]

    def test_without_colours(self, show: Show) -> None:
        """Full, half full and free are told apart by brightness alone, as all requests' cells are seen in grey."""
        held = [Holding(f"r{n}", [n, n + 14], [16, 8]) for n in range(1, 8)]
        browser = show(recording(frame(1, 0.0, *held)), grey=True)
        seen = browser.screenshot("canvas.map")
        assert np.ptp(seen.astype(int), axis=2).max() <= 2  # nothing has a colour

        def brightness(block: int) -> float:
            inside = cell(seen, block)[1:26, 1:5].reshape(-1, 3)
            return float(np.mean([luminance(tuple(one.tolist())) for one in inside]))

        free = brightness(40)
        for block in range(1, 8):
            assert brightness(block) < brightness(block + 14) - 0.08 < free - 0.2, block


class TestByHand:
    def test_keys_walk_over_the_map(self, show: Show) -> None:
        browser = show(recording(scene()), width=640)
        canvas = browser.one("canvas")
        assert int(canvas.get_attribute("width")) == 20 * PITCH
        assert told(browser).startswith("Point at")
        said = []
        # Home, right, right, right, right; down; up, End, right (there is none); Escape.
        for key in "\ue011\ue014\ue014\ue014\ue014\ue015\ue013\ue010\ue014":
            canvas.send_keys(key)
            said.append(told(browser))
        assert said == [
            "Block 1: request 1 (a), 16 of 16 tokens live, no hole.",
            "Block 2: request 1 (a), 8 of 16 tokens live, 8 holes.",
            "Block 3, shared by 2: request 1 (a), 16 of 16 tokens live; request 2 (b), 16 of 16 tokens live.",
            "Block 4: request 2 (b), 5 of 16 tokens live; the request's last block, 11 slots empty.",
            "Block 5: free.",
            "Block 25: free.",
            "Block 5: free.",
            "Block 40: free.",
            "Block 40: free.",
        ]
        assert browser.one(".told").get_attribute("aria-live") == "polite"
        assert browser.one("canvas").get_attribute("aria-label") == "one: 40 blocks of 16 tokens"
        drawn = browser.map_pixels()
        assert at(drawn, 40, 27, 5) == colours()["ink"] or at(drawn, 40, 26, 5) == colours()["ink"]
        canvas.send_keys("\ue00c")
        assert told(browser).startswith("Point at")

    def test_tab_reaches_play_slider_map_and_table(self, show: Show) -> None:
        browser = show(recording(scene(), scene(2, 1001.0)))
        body, reached = browser.one("body"), []
        for _ in range(5):
            body = browser.driver.switch_to.active_element
            body.send_keys("\ue004")
            reached.append(browser.run("const e = document.activeElement; return e.tagName + '.' + e.className"))
        assert reached == ["SUMMARY.", "BUTTON.play", "INPUT.", "CANVAS.map", "DIV.scroll"]

    def test_mouse_and_finger(self, show: Show) -> None:
        browser = show(recording(scene()), width=640)
        x, y = browser.run("const b = document.querySelector('canvas').getBoundingClientRect(); return [b.x, b.y]")
        move = {"type": "mouseMoved", "button": "none"}
        browser.command("Input.dispatchMouseEvent", **move, x=x + PITCH + 9, y=y + 9)
        browser.wait(lambda: told(browser).startswith("Block 2: request 1 (a)"))
        point = [{"x": x + 4 * PITCH + 9, "y": y + PITCH + 9}]
        browser.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=point)
        browser.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        browser.wait(lambda: told(browser) == "Block 25: free.")

    def test_what_is_chosen_is_followed_and_not_read_out_again(self, show: Show) -> None:
        browser = show(recording(scene(), frame(2, 1001.0, Holding("c", [1], [2]))))
        browser.one("canvas").send_keys("\ue011")
        browser.move_slider(1)
        assert told(browser) == "Block 1: request 3 (c), 2 of 16 tokens live; the request's last block, 14 slots empty."
        assert browser.one(".told").get_attribute("aria-live") == "off"


def two_recordings() -> tuple[Recording, Recording]:
    """Of 4 and 1.5 seconds, begun at other times; in each the number of requests waiting counts the frames from 0."""
    long = recording(*(scene_at(n, 1000.0) for n in range(5)), name="long")
    short = recording(*(scene_at(n, 7000.5, 0.75) for n in range(3)), name="short")
    return long, short


def scene_at(place: int, start: float, apart: float = 1.0) -> Frame:
    return frame(place + 1, start + apart * place, Holding("a", [1], [16]), waiting=place)


class TestTime:
    def waiting(self, browser: Browser) -> list[str]:
        return [browser.figures(panel)["waiting"] for panel in range(2)]

    def test_one_slider_moves_all_recordings(self, show: Show) -> None:
        browser = show(*two_recordings())
        # It begins in the middle of the shorter one.
        assert (self.waiting(browser), browser.texts("output")) == (["0", "1"], ["0.8 s of 4.0 s"])
        over = "Ended after 1.5 s; this is its last frame."
        for value, waiting, moment in [
            (0, ["0", "0"], ""),
            (1, ["1", "1"], ""),
            (2, ["2", "2"], over),
            (3, ["3", "2"], over),
            (4, ["4", "2"], over),
            (1, ["1", "1"], ""),
        ]:
            browser.move_slider(value)
            assert (self.waiting(browser), browser.texts(".moment")) == (waiting, ["", moment])
            assert browser.one("#timeline input").get_attribute("aria-valuetext") == f"{value:.1f} s of 4.0 s"

    def test_keys_move_the_slider(self, show: Show) -> None:
        browser = show(*two_recordings())
        slider = browser.one("#timeline input")
        slider.send_keys("\ue010")  # End
        assert self.waiting(browser) == ["4", "2"]
        slider.send_keys("\ue011")  # Home
        assert self.waiting(browser) == ["0", "0"]
        slider.send_keys("\ue014")  # right: to the next frame
        assert (self.waiting(browser), browser.texts("output")) == (["1", "1"], ["1.0 s of 4.0 s"])
        assert browser.one(".follow").is_displayed() is False

    def test_play_goes_to_the_end_and_can_be_halted(self, show: Show) -> None:
        short = [recording(*(frame(n + 1, n / 20, waiting=n) for n in range(4)), name=name) for name in ("a", "b")]
        browser = show(*short)
        play = browser.one(".play")
        browser.move_slider(0)
        play.click()
        browser.wait(lambda: self.waiting(browser) == ["3", "3"] and play.text == "Play")
        browser.run("document.querySelector('.play').click(); document.querySelector('.play').click()")
        assert (play.text, self.waiting(browser)) == ("Play", ["0", "0"])

    def test_requests_have_the_same_number_in_all_recordings(self, show: Show) -> None:
        one = recording(frame(1, 0.0, Holding("a", [1], [1]), Holding("b", [2], [1])))
        browser = show(one, recording(frame(1, 0.0, Holding("c", [5], [1]), Holding("b", [2], [1]))))
        assert [row[:2] for row in browser.table(1)] == [["2", "b"], ["3", "c"]]


class TestThePage:
    def test_a_phone(self, show: Show) -> None:
        grid = Grid("Wide", ["heading of some length"] * 9, [["123,456 of 789"] * 9])
        long = recording(frame(1, 0.0, Holding("cmpl-" + "0123456789abcdef" * 4, [1], [3])), num_blocks=240)
        browser = show(long, recording(scene()), sections=[Section("Section", tables=[grid])], width=360, height=800)
        assert browser.run("return [document.documentElement.scrollWidth, innerWidth]") == [360, 360]
        assert browser.run(
            "return Array.from(document.querySelectorAll('.scroll'), (e) => e.scrollWidth - e.clientWidth)"
        ) == [0, 0]
        low = browser.run(
            "return Array.from(document.querySelectorAll('button, input, summary, a'))"
            ".filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 40).length"
        )
        assert low == 0
        tops = browser.run("return Array.from(document.querySelectorAll('.panel'), (e) => e.getBoundingClientRect().x)")
        assert len(set(tops)) == 1  # one above the other
        browser.command("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
        browser.wait(lambda: browser.one("canvas").get_attribute("width") != "0")
        browser.wait(
            lambda: (
                len(
                    set(
                        browser.run(
                            "return Array.from(document.querySelectorAll('.panel'), (e) => e.getBoundingClientRect().x)"
                        )
                    )
                )
                == 2
            )
        )

    def test_nothing_is_asked_of_anybody(self, show: Show) -> None:
        figure = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="http://127.0.0.1:9/a.png"/></svg>'
        browser = show(recording(scene()), sections=[Section("Section", figure=figure)])
        browser.move_slider(0)
        asked = [url.partition(",")[0] for url in browser.requested()]
        assert [url for url in asked if not url.startswith("data:")] == [browser.driver.current_url]
        assert "data:image/svg+xml;base64" in asked

    def test_the_policy_forbids_it(self, show: Show) -> None:
        browser = show(recording(scene()))
        browser.run(
            "window.forbidden = []; document.addEventListener('securitypolicyviolation',"
            " (e) => window.forbidden.push(e.effectiveDirective));"
            "new Image().src = 'http://127.0.0.1:9/a.png'; fetch('http://127.0.0.1:9/b').catch(() => 0);"
            "document.body.insertAdjacentHTML('beforeend', '<p onclick=\"1\" style=\"color: red\">')"
        )
        browser.wait(lambda: len(browser.run("return window.forbidden")) == 4)
        assert set(browser.run("return window.forbidden")) == {
            "img-src",
            "connect-src",
            "script-src-attr",
            "style-src-attr",
        }
        assert len(browser.errors()) >= 3  # which shows that errors are seen here

    def test_recordings_without_frames(self, show: Show) -> None:
        browser = show(recording(), sections=[Section("Only text")])
        assert browser.texts("h2") == ["Only text"]
        assert browser.all(".panel") == []
        assert not browser.one("#timeline").is_displayed() and not browser.one(".reading").is_displayed()


assert SIZE == 16

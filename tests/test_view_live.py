"""The live page in a real browser, against a server that answers as it is told."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import zip_longest
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from browser import Browser
from view_scenes import NASTY, frame, recording, shown

from vtoken.core.history import Frame, Holding, Recording
from vtoken.view import live_page

INTERVAL = 0.03
DOWN = "The server does not answer."
LOCKED, WRONG = "The server asks for its API key.", "The server does not take this key."


class PoolServer:
    """Serves the page, and the frames of ``engines`` after the number that is asked for.

    Attributes:
        key: what a request has to bear, if anything.
        status: of what is answered; 200 with frames.
        asked: the lowest ``since`` of every question so far, ``asked_each`` those of each engine, and ``bore`` the
            headers that came with them.
    """

    def __init__(self, prefix: str = "", page: str | None = None) -> None:
        self.engines: list[Recording] = []
        self.key: str | None = None
        self.status = 200
        self.asked: list[int] = []
        self.asked_each: list[list[int]] = []
        self.bore: list[str | None] = []
        self._prefix, self._page = prefix, page or live_page(INTERVAL)
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}{self._prefix}/vtoken"

    def up(self) -> None:
        server, outer = self, PoolServer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, kind, body = outer.answer(server, self.path, self.headers.get("Authorization"))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def down(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, path: str, bore: str | None) -> tuple[int, str, bytes]:
        parts = urlsplit(path)
        if parts.path == f"{self._prefix}/vtoken":
            return 200, "text/html; charset=utf-8", self._page.encode()
        if parts.path != f"{self._prefix}/v1/vtoken/pool":
            return 404, "text/plain", b""
        since = list(map(int, parse_qs(parts.query)["since"]))
        self.asked.append(min(since))
        self.asked_each.append(since)
        self.bore.append(bore)
        if self.key is not None and bore != f"Bearer {self.key}":
            return 401, "application/json", b'{"error": "Unauthorized"}'
        if self.status != 200:
            return self.status, "text/plain", b"no"
        engines = []
        for one, number in zip_longest(self.engines, since[: len(self.engines)], fillvalue=0):
            told = one.to_json()  # type: ignore[union-attr]
            told["frames"] = [frame for frame in told["frames"] if frame["number"] > number]
            engines.append(told)
        return 200, "application/json", json.dumps({"engines": engines}).encode()


@pytest.fixture
def server() -> Iterator[PoolServer]:
    made = PoolServer()
    made.up()
    yield made
    made.down()


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """At the end it asks for nothing any more, and has met no error but answers that were none."""
    yield browser
    errors = [one for one in browser.errors() if "Failed to load resource" not in one]
    browser.open("about:blank")
    assert errors == []


def now(number: int, start: float = 1000.0, **figures: Any) -> Frame:
    """A second per frame; the number of requests waiting is the frame's."""
    return frame(number, start + number, Holding("a", [1, 2], [16, number % 16]), **{"waiting": number, **figures})


def waiting(page: Browser, panel: int = 0) -> str | None:
    return page.figures(panel)["waiting"] if len(page.all(".panel")) > panel else None


def problem(page: Browser) -> str:
    return page.run("const p = document.getElementById('problem'); return p.hidden ? '' : p.textContent")


def span(page: Browser) -> list[float]:
    return page.run("const s = document.querySelector('#timeline input'); return [Number(s.min), Number(s.max)]")


def test_frames_arrive(server: PoolServer, page: Browser) -> None:
    one = recording(now(1), now(2))
    server.engines = [one]
    page.open(server.url)
    page.wait(lambda: waiting(page) == "2")
    assert page.figures() == shown(now(2))
    for number in (3, 4, 5):
        one.frames.append(now(number))
        page.wait(lambda number=number: waiting(page) == str(number))
        assert page.figures() == shown(now(number))
    assert page.table() == [["1", "a", "2", "21", "34.4 %"]]
    assert span(page) == [1001, 1005]
    assert server.asked[0] == 0 and 0 not in server.asked[1:]
    assert {2, 3, 4} <= set(server.asked)
    assert problem(page) == ""
    told = {url.partition("?")[0] for url in page.requested() if not url.startswith("data:")}
    assert told == {server.url, server.url.replace("/vtoken", "/v1/vtoken/pool")}


def test_what_has_not_come_is_not_shown(server: PoolServer, page: Browser) -> None:
    server.engines = [recording(now(1))]
    page.open(server.url)
    page.wait(lambda: len(server.asked) > 5)
    assert waiting(page) == "1" != shown(now(2))["waiting"]


def test_so_many_frames_are_kept(server: PoolServer, page: Browser) -> None:
    one = recording(*(now(number) for number in range(1, 1198)))
    server.engines = [one]
    page.open(server.url)
    page.wait(lambda: waiting(page) == "1,197")
    assert span(page) == [1001, 2197]
    one.frames.extend(now(number) for number in range(1198, 1206))
    page.wait(lambda: waiting(page) == "1,205")
    assert span(page) == [1006, 2205]


def test_the_slider_leaves_the_newest_frame_and_the_button_goes_back(server: PoolServer, page: Browser) -> None:
    one = recording(*(now(number) for number in range(1, 6)))
    server.engines = [one]
    page.open(server.url)
    page.wait(lambda: waiting(page) == "5")
    live = page.one(".follow")
    assert (live.text, live.get_attribute("aria-pressed")) == ("Live", "true")
    page.move_slider(1002)
    assert (waiting(page), live.get_attribute("aria-pressed")) == ("2", "false")
    assert page.texts("output")[0].endswith(", 3.0 s ago")
    one.frames.append(now(6))
    page.wait(lambda: span(page)[1] == 1006)
    assert waiting(page) == "2"
    live.click()
    assert (waiting(page), live.get_attribute("aria-pressed")) == ("6", "true")
    one.frames.append(now(7))
    page.wait(lambda: waiting(page) == "7")
    page.move_slider(1006)
    page.one(".play").click()
    page.wait(lambda: waiting(page) == "7" and live.get_attribute("aria-pressed") == "true")


def test_several_engines(server: PoolServer, page: Browser) -> None:
    first, second = recording(now(1), now(2), now(3), name="engine 0"), recording(now(1), name="engine 1")
    server.engines = [first, second]
    page.open(server.url)
    page.wait(lambda: (waiting(page), waiting(page, 1)) == ("3", "1"))
    assert page.texts("h2") == ["engine 0", "engine 1"]
    second.frames.append(now(2))
    page.wait(lambda: waiting(page, 1) == "2")
    first.frames.append(now(4))
    page.wait(lambda: waiting(page) == "4")
    page.wait(lambda: list(map(max, zip(*server.asked_each[1:], strict=True))) == [4, 2])  # each from its own last one
    assert server.asked_each[:2] == [[0], [3, 1]]
    assert page.run("return document.querySelectorAll('.panel').length") == 2


def test_a_server_that_was_started_again_begins_a_new_history(server: PoolServer, page: Browser) -> None:
    server.engines = [recording(*(now(number) for number in range(1, 9)))]
    page.open(server.url)
    page.wait(lambda: waiting(page) == "8")
    server.engines = [recording(now(1, 5000.0), now(2, 5000.0))]
    page.wait(lambda: waiting(page) == "2")
    assert span(page) == [5001, 5002]
    # As many frames as before, all of them others.
    server.engines = [recording(now(1, 7000.0), now(2, 7000.0, waiting=99))]
    page.wait(lambda: waiting(page) == "99")
    assert span(page) == [7001, 7002]
    server.engines = [recording(now(1, 9000.0), num_blocks=77)]
    page.wait(lambda: page.figures()["free"] == "75")
    assert len(page.all(".panel")) == 1


def test_a_server_that_is_gone_and_comes_back(server: PoolServer, page: Browser) -> None:
    one = recording(now(1))
    server.engines = [one]
    page.open(server.url)
    page.wait(lambda: waiting(page) == "1")
    server.down()
    page.wait(lambda: problem(page).startswith(DOWN))
    time = page.run("return new Date(1001000).toLocaleTimeString('en-GB')")
    assert problem(page) == f"{DOWN} What is shown is from {time}."
    assert waiting(page) == "1"
    one.frames.append(now(2))
    server.up()
    page.wait(lambda: waiting(page) == "2")
    assert problem(page) == ""


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, "This server has no pool to show: it runs without vtoken, or an older one."),
        (503, "The server answers with status 503."),
    ],
)
def test_refusals_are_told_and_it_asks_again(server: PoolServer, page: Browser, status: int, sentence: str) -> None:
    server.status = status
    page.open(server.url)
    page.wait(lambda: problem(page) == sentence)
    count = len(server.asked)
    page.wait(lambda: len(server.asked) > count + 3)
    server.engines, server.status = [recording(now(1))], 200
    page.wait(lambda: waiting(page) == "1")
    assert problem(page) == ""


def test_no_frame_yet(server: PoolServer, page: Browser) -> None:
    one = recording()
    server.engines = [one]
    page.open(server.url)
    page.wait(lambda: problem(page) == "No frame has been taken yet; the first one comes with the first request.")
    assert not page.one("#timeline").is_displayed()
    one.frames.append(now(1))
    page.wait(lambda: waiting(page) == "1")
    assert problem(page) == ""


def test_the_key(server: PoolServer, page: Browser) -> None:
    server.key, server.engines = "s3cret", [recording(now(1))]
    page.open(server.url)
    form = page.one("#key")
    page.wait(form.is_displayed)
    assert page.texts("#key p") == [LOCKED]
    field = page.one("#key input")
    assert (field.get_attribute("type"), server.bore) == ("password", [None])
    field.send_keys("wrong\n")
    page.wait(lambda: page.texts("#key p") == [WRONG] and form.is_displayed())
    assert page.run("return [sessionStorage.length, localStorage.length]") == [0, 0]
    field.send_keys("s3cret\n")
    page.wait(lambda: waiting(page) == "1")
    assert not form.is_displayed() and field.get_attribute("value") == ""
    assert server.bore[1] == "Bearer wrong" and set(server.bore[2:]) == {"Bearer s3cret"}
    assert page.run("return Object.entries(sessionStorage)") == [["vtoken-api-key", "s3cret"]]
    assert page.run("return [localStorage.length, document.cookie, location.href]") == [0, "", server.url]
    server.bore.clear()
    page.driver.refresh()
    page.wait(lambda: waiting(page) == "1")
    assert set(server.bore) == {"Bearer s3cret"}


def test_behind_a_prefix(page: Browser) -> None:
    server = PoolServer("/some/where")
    server.up()
    try:
        server.engines = [recording(now(1))]
        page.open(server.url)
        page.wait(lambda: waiting(page) == "1")
    finally:
        server.down()


def test_text_of_requests_is_text(server: PoolServer, page: Browser) -> None:
    server.engines = [recording(frame(1, 1.0, Holding(NASTY, [1], [16])), name=NASTY, settings=NASTY)]
    page.open(server.url)
    page.wait(lambda: page.texts("h2") == [NASTY])
    page.one("canvas").send_keys("\ue011")
    assert page.texts(".told") == [f"Block 1: request 1 ({NASTY}), 16 of 16 tokens live, no hole."]
    assert page.table() == [["1", NASTY, "1", "16", "0.0 %"]]
    assert page.all("img") == []


def test_once_a_second_unless_told_otherwise() -> None:
    assert '"interval":1.0' in live_page() and f'"interval":{INTERVAL}' in live_page(INTERVAL)

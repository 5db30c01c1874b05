"""Debian's chromium, driven without a screen: pages, what they say, the pixels of their maps, what they load."""

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",  # as on a phone, where they lie over the page
)
SECONDS = 30


class Browser:
    """One chromium for many pages. ``driver`` is selenium's."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False, grey: bool = False) -> None:
        """Show a page; ``grey`` as who sees no colours sees it."""
        self.logged("browser"), self.logged("performance")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command("Emulation.setEmulatedVisionDeficiency", type="achromatopsia" if grey else "none")
        self.driver.get(url)

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return Array.from(document.querySelectorAll(arguments[0]), (e) => e.textContent)", selector)

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Until it holds; fails where it does not come to."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, SECONDS, poll_frequency=0.02).until(lambda _: condition())

    def logged(self, kind: str) -> list[dict[str, Any]]:
        """What came since the last look."""
        return self.driver.get_log(kind)

    def errors(self) -> list[str]:
        """Of the page's own: exceptions, and what its policy forbade."""
        return [one["message"] for one in self.logged("browser") if one["level"] == "SEVERE"]

    def requested(self) -> list[str]:
        """Addresses asked for since the page was opened, but for the browser's own start page's."""
        events = [json.loads(one["message"])["message"] for one in self.logged("performance")]
        asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("chrome://")]

    def move_slider(self, value: float) -> None:
        self.run(
            "const s = document.querySelector('#timeline input'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('input'))",
            value,
        )

    def map_pixels(self, panel: int = 0) -> np.ndarray:
        """What is drawn on a map, uint8 [height, width, 3]."""
        coded = self.run(
            "return document.querySelectorAll('canvas.map')[arguments[0]].toDataURL('image/png').split(',')[1]", panel
        )
        return pixels(coded)

    def screenshot(self, selector: str) -> np.ndarray:
        """An element as it is seen, uint8 [height, width, 3]."""
        return pixels(self.one(selector).screenshot_as_base64)

    def figures(self, panel: int = 0) -> dict[str, str]:
        return self.run(
            "return Object.fromEntries(Array.from(document.querySelectorAll('.panel')[arguments[0]]"
            ".querySelectorAll('[data-figure]'), (e) => [e.dataset.figure, e.textContent]))",
            panel,
        )

    def table(self, panel: int = 0) -> list[list[str]]:
        return self.run(
            "return Array.from(document.querySelectorAll('.panel')[arguments[0]].querySelectorAll('tbody tr'),"
            " (row) => Array.from(row.cells, (cell) => cell.textContent))",
            panel,
        )


def pixels(coded: str) -> np.ndarray:
    """A PNG in base64 as uint8 [height, width, 3]."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(coded))).convert("RGB"))


def start_browser(profile: Path) -> Browser:
    """Skips the test where chromium or its driver is not installed."""
    pytest.importorskip("selenium")
    missing = [path for path in (CHROMIUM, DRIVER) if shutil.which(path) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: apt-get install chromium chromium-driver")
    return Browser(profile)

"""The page about a directory of results, and the recordings of the pool that the memory experiment keeps."""

import json
import re
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from block_engine import BlockEngine
from test_bench_memory import RUNS, works
from test_bench_session import Stub, given
from view_scenes import frame, recording, scene

from vtoken.core.history import Frame, Holding
from vtoken.evaluation.bench.html import write_page
from vtoken.evaluation.bench.memory import Memory
from vtoken.evaluation.bench.occupancy import watch_blocks
from vtoken.evaluation.bench.report import Report, setting
from vtoken.evaluation.recorder import packed, unpacked

RESULTS = Path(__file__).parents[1] / "docs" / "results"
FIGURES = RESULTS.parent / "figures"


class RecordedBlocks(BlockEngine):
    """Requests hold blocks one after the other, from 1 on."""

    def frame(self, number: int, time: float) -> Frame:
        ids = count(1)
        held = [Holding(name, [next(ids) for _ in live], live) for name, live in self.live_per_block().items()]
        return frame(number, time, *held)


def headings(page: str) -> list[str]:
    return re.findall(r'<section class="report"[^>]*><h2>(.*?)</h2>', page)


def data(page: str) -> Any:
    (found,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def keep(directory: Path, name: str, *values: int) -> Stub:
    """An experiment, with its results in the directory."""
    experiment = Stub(name, lambda bench: given(list(values), bench))
    about = setting("m", "float32", False, 60.0, "prompts", eager=True)
    Report(name, [{"value": value} for value in values], about).write(experiment, directory)
    return experiment


def test_a_part_for_each_experiment(tmp_path: Path) -> None:
    experiments = [keep(tmp_path, "one", 3), keep(tmp_path, "two", 9)]
    page = write_page(experiments, tmp_path)
    assert page == tmp_path / "report.html"
    text = page.read_text()
    assert headings(text) == ["one", "two"]
    assert text.count("<p>How much?</p>") == 2
    assert '<tr><th scope="row" class="number">9</th><td class="number">4.5</td></tr>' in text
    assert "<td>at most 9</td><td>9</td><td>held</td>" in text and "<td>missed</td><td>why</td>" in text
    assert text.count('<img src="data:image/svg+xml;base64,') == 2
    assert re.search(r'<p class="note">m in float32, prompts; .*; 1 minutes\.</p>', text)
    assert data(text)["recordings"] == []


def test_what_lies_there_is_on_it_and_what_is_damaged_is_not(tmp_path: Path) -> None:
    one = keep(tmp_path, "one", 3)
    for name in ("memory", "capacity"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
        shutil.copy(FIGURES / f"{name}.svg", tmp_path)
    shutil.copy(RESULTS / "sla.json", tmp_path)  # without its figure
    (tmp_path / "prefix.json").write_text("{}")
    assert headings(write_page([one], tmp_path).read_text()) == ["memory", "capacity", "one"]
    (tmp_path / "memory.json").write_text(json.dumps({"name": "memory", "runs": [{}], "setting": {}}))
    assert headings(write_page([one], tmp_path).read_text()) == ["capacity", "one"]


def test_all_results_of_the_documents(tmp_path: Path, browser: Any) -> None:
    """Old results, without recordings; ids of one figure are not those of another."""
    for path in (*RESULTS.glob("*.json"), *FIGURES.glob("*.svg")):
        shutil.copy(path, tmp_path)
    page = write_page([], tmp_path)
    browser.open(page.as_uri(), width=360, height=800)
    names = [path.stem for path in RESULTS.glob("*.json")]
    assert sorted(browser.texts(".report > h2")) == sorted(names) and len(names) == 13
    assert browser.texts("nav a") == browser.texts(".report > h2")
    images = browser.all("img")
    browser.wait(
        lambda: browser.run("return Array.from(document.images).every((i) => i.complete && i.naturalWidth > 99)")
    )
    assert len(images) == 13
    ids = browser.run("return Array.from(document.querySelectorAll('[id]'), (e) => e.id)")
    assert len(set(ids)) == len(ids)
    assert browser.run("return document.documentElement.scrollWidth") == 360
    assert browser.errors() == []


def test_frames_are_taken_while_blocks_are_watched() -> None:
    engine = RecordedBlocks(block_size=16, num_blocks=100, keep=40)
    found = watch_blocks(engine, works(prompt=64, outputs=6), frames=60)
    told = unpacked(found["recording"])
    assert (told.block_size, told.num_blocks, len(told.frames)) == (16, 100, 7)  # six steps, and the end
    live = [[sum(one.live) for one in frame.holdings] for frame in told.frames]
    assert live == [[40, 40]] * 5 + [[]] * 2
    assert [frame.holdings[1].blocks for frame in told.frames[:5]] == [[4, 5, 6]] * 5
    short = unpacked(watch_blocks(engine, works(prompt=64, outputs=30), frames=10)["recording"])
    assert 5 <= len(short.frames) <= 10
    assert "recording" not in watch_blocks(engine, works())
    assert {name: value for name, value in found.items() if name != "recording"} == watch_blocks(
        RecordedBlocks(block_size=16, num_blocks=100, keep=40), works(prompt=64, outputs=6)
    )


def test_a_recording_takes_little_room() -> None:
    one = recording(*(scene(n, 1000.0 + n) for n in range(1, 61)))
    assert unpacked(packed(one)) == one
    assert len(packed(one)) < len(json.dumps(one.to_json())) / 8


def test_recordings_of_the_memory_experiment() -> None:
    assert Memory().recordings(RUNS) == []
    runs = [{**run, "recording": packed(recording(scene(), name=""))} if run["mode"] != "pack" else run for run in RUNS]
    none, fill = Memory().recordings(runs)
    assert (none.name, fill.name) == ("h2o: naive eviction (none)", "h2o: vtoken, fill")
    assert none.frames == fill.frames == [scene()]
    assert "budget 0.5 of the prompt" in none.settings
    assert Memory().tables(runs) == Memory().tables(RUNS)


def test_recordings_are_on_the_page(tmp_path: Path) -> None:
    class Recorded(Stub):
        def recordings(self, runs: Any) -> Any:
            return [recording(scene(), name=f"pool {run['value']}") for run in runs]

    keep(tmp_path, "one", 3, 4)
    experiment = Recorded("one", lambda bench: [])
    assert [one["name"] for one in data(write_page([experiment], tmp_path).read_text())["recordings"]] == [
        "pool 3",
        "pool 4",
    ]


@pytest.mark.parametrize("damage", ["", "AAAA", packed(replace(recording(scene())))[:-8]])
def test_a_damaged_recording_leaves_its_experiment_out(tmp_path: Path, damage: str) -> None:
    for name in ("memory", "capacity"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
        shutil.copy(FIGURES / f"{name}.svg", tmp_path)
    told = json.loads((tmp_path / "memory.json").read_text())
    told["runs"][0]["recording"] = damage
    (tmp_path / "memory.json").write_text(json.dumps(told))
    assert headings(write_page([], tmp_path).read_text()) == ["capacity"]

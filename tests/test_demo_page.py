"""``vtoken demo --html``: a third run, frames of the pool, and the page that they end up in."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engines import prompts, running
from rich.console import Console
from test_cli import invoke, refused, stubbed
from test_demo import RESULT, SPEC, EngineWithEnd, make_report, run_one_events
from view_scenes import frame, recording, scene, shown

from vtoken.config import VTokenConfig
from vtoken.core.history import Frame, Holding
from vtoken.evaluation import demo
from vtoken.evaluation.child import RunSpec
from vtoken.evaluation.demo_page import demo_page
from vtoken.evaluation.plan import Plan, naive_of
from vtoken.evaluation.recorder import Recorder, read_frame
from vtoken.evaluation.report import DemoReport, comparison

assert stubbed  # a fixture, found here by its name


class Pool:
    """An engine whose frames say how many have been taken."""

    def __init__(self) -> None:
        self.taken = 0

    def step(self) -> None: ...

    def frame(self, number: int, time: float) -> Frame:
        self.taken += 1
        return frame(number, time, waiting=self.taken)


def recorded(steps: int, most: int, seconds: float, per_step: float) -> list[float]:
    """Times of the frames of a load whose steps take so long, from 0 on; the end comes a step later."""
    times: Iterator[float] = (n * per_step for n in count())
    recorder = Recorder(Pool(), most, seconds, lambda: next(times))
    for _ in range(steps):
        recorder.look()
    frames = recorder.finish()
    assert [one.number for one in frames] == list(range(1, len(frames) + 1))
    return [one.time for one in frames]


class TestRecorder:
    def test_frames_are_so_far_apart(self) -> None:
        assert recorded(10, 100, 0.25, 0.125) == [0, 0.25, 0.5, 0.75, 1.0, 1.25]
        assert recorded(3, 100, 0.25, 1.0) == [0, 1, 2, 3]

    def test_every_second_one_goes_when_there_are_too_many(self) -> None:
        assert recorded(4, 5, 0.25, 0.25) == [0, 0.25, 0.5, 0.75, 1.0]
        assert recorded(5, 5, 0.25, 0.25) == [0, 0.5, 1.0, 1.25]
        assert recorded(8, 5, 0.25, 0.25) == [0, 0.5, 1.0, 1.5, 2.0]
        assert recorded(9, 5, 0.25, 0.25) == [0, 1.0, 2.0, 2.25]

    @pytest.mark.parametrize("steps", [599, 600, 601, 5000])
    def test_a_long_load_has_300_to_600(self, steps: int) -> None:
        times = recorded(steps, 600, 0.25, 0.25)
        assert 300 <= len(times) <= 600
        assert times[-1] == steps * 0.25

    def test_by_steps(self) -> None:
        assert recorded(4, 100, 0, 7.0) == [0, 7, 14, 21, 28]
        assert recorded(6, 5, 0, 7.0) == [0, 14, 28, 42]

    def test_a_frame_comes_back_from_json(self) -> None:
        assert read_frame(json.loads(json.dumps(scene().to_json()))) == scene()
        with pytest.raises(TypeError):
            read_frame({**scene().to_json(), "more": 1})


class RecordedEngine(EngineWithEnd, Pool):
    """An engine of counts that can be looked at."""

    def __init__(self) -> None:
        EngineWithEnd.__init__(self, 4, 8)
        Pool.__init__(self)


def test_a_run_sends_its_frames_if_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RecordedEngine()
    _, events = run_one_events(monkeypatch, engine, replace(SPEC, frames=50))
    (told,) = [event for event in events if event["event"] == "frames"]
    frames = [read_frame(one) for one in told["frames"]]
    assert len(frames) == engine.taken >= 2
    assert [one.waiting for one in frames] == list(range(1, len(frames) + 1))
    engine = RecordedEngine()
    _, events = run_one_events(monkeypatch, engine, SPEC)
    assert "frames" not in [event["event"] for event in events] and engine.taken == 0


def stub_runs(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """Runs that end at once, each with a frame that tells which run it was."""
    specs: list[RunSpec] = []

    def run(spec: RunSpec, on_event: Any) -> None:
        specs.append(spec)
        on_event({"event": "started", "block_size": 16, "num_blocks": 40})
        if spec.frames:
            on_event({"event": "frames", "frames": [frame(1, 0.0, waiting=len(specs)).to_json()]})
        on_event({"event": "result", "result": replace(RESULT, tokens_evicted=len(specs)).to_json()})

    monkeypatch.setattr(demo, "run_child", run)
    return specs


def planned(naive: VTokenConfig | None) -> Plan:
    works = list(SPEC.workloads)
    return Plan(Path("m"), {"block_size": 16}, VTokenConfig(), works, list(SPEC.needles), 40, [], naive)


def test_a_third_run_evicts_naively(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = stub_runs(monkeypatch)
    report = demo.run_demo(planned(naive_of(VTokenConfig())), 2, Console(file=StringIO()))
    assert [spec.vtoken and spec.vtoken.reclaim for spec in specs] == [None, "none", "fill"] * 2
    assert [spec.frames for spec in specs] == [0, 600, 600] * 2
    assert [turn["none"].tokens_evicted for turn in report.repeats] == [2, 5]
    assert list(report.runs) == ["native", "none", "vtoken"]
    assert [(one.name, one.block_size, one.num_blocks) for one in report.recordings] == [
        ("naive eviction", 16, 40),
        ("vtoken", 16, 40),
    ]
    assert [one.frames[0].waiting for one in report.recordings] == [2, 3]  # of the first turn
    assert "blocks freed by 'none'" in report.recordings[0].settings
    assert "blocks freed by 'fill'" in report.recordings[1].settings


def test_without_a_page_there_are_two_runs_and_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = stub_runs(monkeypatch)
    report = demo.run_demo(planned(None), 1, Console(file=StringIO()))
    assert [(spec.vtoken and spec.vtoken.reclaim, spec.frames) for spec in specs] == [(None, 0), ("fill", 0)]
    assert (list(report.runs), report.recordings) == (["native", "vtoken"], [])


def test_naive_settings_differ_in_one_option() -> None:
    config = VTokenConfig(policy="random", policy_options={"seed": 3}, budget=99, prefill_evict="chunked")
    assert naive_of(config) == config.model_copy(update={"reclaim": "none"})
    assert naive_of(VTokenConfig(reclaim="pack")).reclaim == "none"
    with pytest.raises(ValueError, match=r"^vtoken: option 'reclaim' = 'none' is what --html compares with; .*\.$"):
        naive_of(VTokenConfig(reclaim="none"))


def full_report(turns: int = 1) -> DemoReport:
    made = make_report(turns)
    runs = {"native": made.runs["native"], "none": replace(RESULT, tokens_evicted=5), "vtoken": made.runs["vtoken"]}
    recordings = [recording(scene(), name="naive eviction"), recording(scene(), name="vtoken")]
    return replace(made, runs=runs, repeats=[runs] * turns, recordings=recordings)


def tables(page: str) -> list[list[list[str]]]:
    """Texts of all cells, by table and row."""
    bodies = re.findall(r"<table>.*?</table>", page, re.DOTALL)
    rows = [re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL) for body in bodies]
    return [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table] for table in rows]


def test_the_page_has_every_row_of_every_run() -> None:
    report = full_report()
    (table,) = tables(demo_page(report))
    assert table[0] == ["", "native vLLM", "naive eviction", "vtoken", "ratio"]
    assert ["tokens evicted", "0", "5", "7", "-"] in table
    assert ["output tokens/s", "60.0", "60.0", "75.0", "1.25x"] in table
    assert table[-1] == ["needles found", "6 of 6", "6 of 6", "6 of 6", ""]
    assert table[1:] == comparison(report)[1] and len(table) == 1 + 15 + 1


def test_the_page_of_several_turns_has_each_run_by_itself() -> None:
    medians, each = tables(demo_page(full_report(turns=2)))
    assert medians[0][1] == "native vLLM"
    names = ("native vLLM", "naive eviction", "vtoken")
    assert each[0] == ["", *(f"{name} {n}" for n in (1, 2) for name in names)]
    assert ["tokens evicted", *["0", "5", "7"] * 2] in each
    assert each[-1] == ["needles found", *["6 of 6"] * 6]


def test_arguments_and_settings_are_on_the_page(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(demo_page(full_report()))
    browser.open(path.as_uri())
    arguments, settings = map(json.loads, browser.texts(".report pre"))
    assert (arguments, settings) == ({"seed": 0}, {"budget": 0.25})
    assert browser.texts(".panel h2") == ["naive eviction", "vtoken"]
    assert browser.figures(0) == browser.figures(1) == shown(scene())
    assert browser.errors() == []


def test_html_writes_the_page(stubbed: dict[str, Any], tmp_path: Path) -> None:
    stubbed["report"] = full_report()
    file = tmp_path / "page.html"
    result = invoke("demo", "--model", str(stubbed["model"]), "--html", str(file))
    assert result.exit_code == 0, result.output
    assert file.read_text() == demo_page(full_report())
    assert (stubbed["checked"], stubbed["plan"].naive.reclaim) == (["fill", "none"], "none")
    assert "engine arguments of all three runs" in result.stdout
    assert "naive eviction" in result.stdout


def test_naive_eviction_that_is_refused_is_refused_before_anything_runs(
    stubbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plan: Plan, config: VTokenConfig) -> None:
        if config.reclaim == "none":
            raise ValueError("vtoken: 'none' leaves holes; use 'fill'.")

    monkeypatch.setattr(demo, "check_engine", refuse)
    monkeypatch.setattr(demo, "run_demo", lambda *_: pytest.fail("it has run"))
    result = invoke("demo", "--model", str(stubbed["model"]), "--html", str(tmp_path / "page.html"))
    assert (result.exit_code, result.stderr) == (2, "vtoken: 'none' leaves holes; use 'fill'.\n")
    assert not (tmp_path / "page.html").exists()


def test_a_folder_is_no_html_file(tmp_path: Path) -> None:
    assert f"HTML file {tmp_path} cannot be written" in refused("--html", str(tmp_path))


def test_frames_of_a_model(tiny_gqa: Path) -> None:
    """What a real engine's frames say of its pool is what the pool says."""
    config = VTokenConfig(policy="random", budget=40, sinks=2, recent=8, reclaim="none")
    options = {"block_size": 32, "max_model_len": 512, "num_gpu_blocks_override": 21, "skip_tokenizer_init": True}
    with running(tiny_gqa, config, **options) as engine:
        recorder = Recorder(engine, 100)
        for n, prompt in enumerate(prompts([150, 90], vocab=500)):
            engine.add_request(f"r{n}", prompt, 12)
        seen = []
        while engine.has_unfinished():
            engine.step()
            recorder.look()
            seen.append((engine.snapshot(), engine.live_per_block()))
        *frames, last = recorder.finish()
    assert len(frames) == len(seen) >= 12 and (last.held_blocks, last.holdings) == (0, [])
    for one, (pool, live) in zip(
        frames[:-1], seen[:-1], strict=True
    ):  # then the two end, which a frame tells a step later
        assert (one.held_blocks, one.live_tokens, one.running) == (pool.held_blocks, pool.live_tokens, pool.running)
        assert (one.tokens_evicted, one.blocks_reclaimed) == (pool.tokens_evicted, pool.blocks_reclaimed)
        assert {held.request: held.live for held in one.holdings if held.request in live} == live
        ids = [block for held in one.holdings for block in held.blocks]
        assert len(set(ids)) == len(ids) and set(ids) <= set(range(1, 21))
    # To 39 of them when the prompts end, then one of each request in every step.
    assert (frames[-2].tokens_evicted, last.tokens_evicted) == (111 + 51 + 2 * 10, 111 + 51 + 2 * 11)
    assert frames[-2].dead_tokens > 100


def test_holdings_survive_the_way_to_the_page() -> None:
    one = frame(1, 0.5, Holding("a", [3, 1], [16, 2]))
    assert '"holdings":[{"request":"a","blocks":[3,1],"live":[16,2]}]' in demo_page(
        replace(full_report(), recordings=[recording(one)])
    )

"""What is made of the runs of ``contention``, and that the unrelated work is there, and ends."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from engines import prompts, running

from vtoken.evaluation.bench import burner
from vtoken.evaluation.bench.burner import burn, burning, usable_cores
from vtoken.evaluation.bench.contention import BUSY, QUIET, Contention, kept_against, settings
from vtoken.evaluation.bench.contention_task import run_timed
from vtoken.evaluation.bench.intervals import Interval
from vtoken.evaluation.workloads import Workload
from vtoken.kernels.cpu.copy_engine import ThreadCopyEngine

EXPERIMENT = Contention()
QUALITY = {
    "variant": "quality",
    "policy": "h2o",
    "budget": 0.75,
    "needles": 6,
    "needles_found": 4,
    "native_needles_found": 6,
    "log_likelihood_change": -0.125,
}


def run(variant: str, state: str, repeat: int, throughput: float, waited: float | None = None) -> dict[str, Any]:
    """Twenty steps of which the last takes 20 ms, the others 10."""
    return {
        "variant": variant,
        "repeat": repeat,
        "state": state,
        "cores": 2,
        "copy_wait_ms": waited,
        "step_ms": [10.0] * 19 + [20.0 if state == QUIET else 50.0],
        "output_tokens_per_s": throughput,
        "seconds": 2.0,
        "tokens_evicted": 0 if variant == "native" else 24,
        "tokens_moved": 0 if variant == "native" else 3,
        "preemptions": 0,
    }


@pytest.fixture
def runs() -> list[dict[str, Any]]:
    """In the second repeat fill loses a quarter more than native does."""
    return [
        QUALITY,
        run("native", QUIET, 0, 80.0),
        run("native", BUSY, 0, 40.0),
        run("fill", QUIET, 0, 60.0, 2.0),
        run("fill", BUSY, 0, 30.0, 10.0),
        run("native", BUSY, 1, 40.0),
        run("native", QUIET, 1, 80.0),
        run("fill", BUSY, 1, 30.0, 30.0),
        run("fill", QUIET, 1, 80.0, 2.0),
    ]


def test_each_variant_has_a_row(runs: list[dict[str, Any]]) -> None:
    table, kept = EXPERIMENT.tables(runs)
    native, fill = table.rows
    assert native[0] == "native vLLM"
    for cell, throughput in ((native[1], 80.0), (native[2], 40.0)):
        assert (cell.median, cell.low, cell.high) == (throughput, *[pytest.approx(throughput)] * 2)
    assert native[3].median == pytest.approx(0.5)
    # Between the 19th and the 20th of 20 steps, a twentieth of the way: 10.5 and 12.
    assert (native[4].median, native[5].median) == (pytest.approx(10.5), pytest.approx(12.0))
    assert native[6].median == pytest.approx(12 / 10.5)
    assert list(native[7:]) == [None, None, 0, 0]
    assert (fill[1].median, fill[2].median) == (70.0, 30.0)
    assert fill[3].median == pytest.approx((0.5 * 0.375) ** 0.5)
    assert (fill[7].median, fill[8].median, *fill[9:]) == (0.001, pytest.approx(0.01), 96, 12)
    assert "on each of the 2 cores" in table.note and "4 of 6 hidden numbers" in table.note
    assert [list(row) for row in kept.rows] == [["fill / native", kept_against(runs)["fill / native"], 2]]
    # 1 and 0.75.
    assert kept.rows[0][1].median == pytest.approx(0.75**0.5)


def test_the_same_variant_twice_is_the_floor(runs: list[dict[str, Any]]) -> None:
    again = [{**one, "variant": "fill again"} for one in runs if one["variant"] == "fill"]
    packed = [{**one, "variant": "pack"} for one in runs if one["variant"] == "native"]
    found = kept_against([*runs, *again, *packed])
    assert list(found) == ["fill / native", "pack / native", "fill / the same again (A/A)"]
    assert found["fill / the same again (A/A)"] == Interval(1.0, 1.0, 1.0, 2)
    assert found["pack / native"] == Interval(1.0, 1.0, 1.0, 2)


def verdicts(runs: list[dict[str, Any]]) -> dict[str, tuple[bool, str, str]]:
    return {check.what: (check.held, check.kind, check.found) for check in EXPERIMENT.checks(runs)}


EVICTING = "runs with evictions, vtoken, fill"
COPYING = "runs with copies that may have to wait, vtoken, fill"
SLOWED = "the unrelated work slows native vLLM down, busy / quiet"
LEFT = "throughput left under contention, fill / native"
WAITED = "share of a busy run that the host waits for copies, vtoken, fill"


def test_checks(runs: list[dict[str, Any]]) -> None:
    found = verdicts(runs)
    assert found.keys() == {EVICTING, COPYING, SLOWED, LEFT, WAITED}
    assert found[EVICTING] == found[COPYING] == (True, "must", "4")
    assert found[SLOWED] == (True, "aim", "0.50")
    assert found[LEFT][:2] == (True, "aim")
    assert found[LEFT][2].startswith("0.866 (0.")
    assert found[WAITED][:2] == (True, "aim")


def test_checks_that_fail(runs: list[dict[str, Any]]) -> None:
    for one in runs[1:]:
        if one["variant"] == "native":
            one["output_tokens_per_s"] = 80.0
        elif one["state"] == BUSY:
            one["output_tokens_per_s"], one["copy_wait_ms"] = 30.0, 40.0
        else:
            one["output_tokens_per_s"], one["tokens_evicted"], one["tokens_moved"] = 60.0, 0, 0
    assert verdicts(runs) == {
        EVICTING: (False, "must", "2"),
        COPYING: (False, "must", "2"),
        SLOWED: (False, "aim", "1.00"),
        LEFT: (False, "aim", "0.500"),
        WAITED: (False, "aim", "2.00 %"),
    }


def test_the_figure_shows_both_states(runs: list[dict[str, Any]]) -> None:
    throughput, steps = EXPERIMENT.figure(runs).axes
    assert [bar.get_height() for bar in throughput.patches] == [80.0, 70.0, 40.0, 30.0]
    assert [bar.get_height() for bar in steps.patches] == pytest.approx([10.5, 10.5, 12.0, 12.0])
    assert [label.get_text() for label in throughput.get_xticklabels()] == ["native vLLM", "vtoken,\nfill"]


def test_cores_are_busy_for_as_long_as_they_should_be() -> None:
    (core, *_) = usable_cores()
    with burning([core], 60.0) as burners:
        (one,) = burners
        assert one.poll() is None
        assert os.sched_getaffinity(one.pid) == {core}
    assert one.poll() is not None
    with burning([], 60.0) as burners:
        assert burners == []


def test_no_core_stays_busy_after_a_failure() -> None:
    with pytest.raises(KeyError), burning(usable_cores()[:1], 60.0) as burners:
        raise KeyError
    assert [one.poll() is not None for one in burners] == [True]


def test_unrelated_work_that_ends_too_soon_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burner, "BURN", ("sh", "-c", "echo burning"))
    with pytest.raises(RuntimeError, match="ended after 9 seconds, before the run did"), burning([0], 9.0) as burners:
        burners[0].wait()
    monkeypatch.setattr(burner, "BURN", ("true",))
    with pytest.raises(RuntimeError, match="did not start"), burning([0], 9.0):
        pass


def test_a_burner_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: pinned.append(cores))
    times = iter([0.0, 1.0, 2.0, 3.0])
    burn(7, 2.5, times.__next__)  # until the fourth look
    assert pinned == [{7}] and list(times) == []
    parents = iter([5, 5, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    burn(7, 2.5, lambda: 0.0)  # until whoever started it is gone
    assert list(parents) == []


def test_waiting_for_copies_is_timed(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    works = [asdict(Workload(f"w{n}", prompt, 20)) for n, prompt in enumerate(prompts([64, 64], 500))]
    stock = ThreadCopyEngine.finish
    config = settings("fill")
    assert config is not None
    with running(tiny("llama-gqa"), config, skip_tokenizer_init=True) as engine:
        told = run_timed(engine, works)
        # 64 down to 40, and by 8 more after 8 and after 16 tokens, each.
        assert told["tokens_evicted"] == 2 * (24 + 8 + 8)
        assert told["tokens_moved"] > 0
        assert 0 < told["copy_wait_ms"] < 1e3 * told["seconds"]
        assert len(told["series"]) == told["steps"]
        assert ThreadCopyEngine.finish is stock


def test_variants() -> None:
    assert settings("native") is None
    assert settings("fill") == settings("fill again")
    pack = settings("pack")
    assert pack is not None and (pack.reclaim, pack.copies, pack.check_interval) == ("pack", "async", 1)

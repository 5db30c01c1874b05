"""What the indirection costs: repeats until A and A agree, the engine's side, tables and checks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import prompts, running
from told_engines import ToldBench, quality

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench import overhead_task
from vtoken.evaluation.bench.overhead import Overhead
from vtoken.evaluation.bench.overhead_shown import MOST_REPEATS
from vtoken.evaluation.load import RunError
from vtoken.vllm_plugin.phase_timer import PHASES

HOOKS, EVICTING = "hooks on, nothing to evict", "one eviction per request and step"


def load(variant: str, repeat: int, ms: float, evicted: int = 0) -> dict[str, Any]:
    return {
        "part": "load",
        "concurrency": 16,
        "repeat": repeat,
        "variant": variant,
        "step_ms": [ms] * 24,
        "tokens_evicted": evicted,
        "output_tokens_per_s": 16e3 / ms,
        "tpot_p95_ms": ms,
    }


def breakdown(variant: str, hooks: float, evicted: int = 0, **fields: Any) -> dict[str, Any]:
    phases = dict.fromkeys(PHASES, 0.0) | {"forward": 90.0, "schedule": 10.0 - hooks, "hooks": hooks}
    return {
        "part": "breakdown",
        "concurrency": 16,
        "variant": variant,
        "steps": 32,
        "step_ms": 100.0,
        "phases": phases,
        "hooks_share": hooks / 100,
        "relocation_share": 0.0,
        "tokens_evicted": evicted,
        **fields,
    }


def copies(mode: str, repeat: int, stall: float, **fields: Any) -> dict[str, Any]:
    return {
        "part": "copies",
        "variant": mode,
        "repeat": repeat,
        "relocations": 2,
        "tokens_moved": 128,
        "stall_ms": stall,
        "copy_ms": 4.0,
        "output_tokens_per_s": 80.0,
        "tokens_evicted": 256,
        **fields,
    }


def runs(
    stock: float = 100.0, again: tuple[float, float] = (99.0, 101.0), hooks: float = 100.5, **changed: Any
) -> list[dict[str, Any]]:
    found = []
    for repeat in range(6):
        ours = load(HOOKS, repeat, hooks, changed.get("evicted", 0))
        found += [load("stock", repeat, stock), load("stock again", repeat, again[repeat % 2]), ours]
    for repeat in range(2):
        found += [
            breakdown("stock", 0.0, repeat=repeat),
            breakdown(HOOKS, changed.get("in_hooks", 0.8), repeat=repeat),
            breakdown(EVICTING, 1.9, changed.get("dying", 512), repeat=repeat),
        ]
    stall = changed.get("stall", 1.5)
    stalls = {"async": stall, "inline": 4.0, "force_sync": 4.5, "async again": stall}
    found += [copies(mode, n, stall, **changed.get(mode, {})) for n in range(2) for mode, stall in stalls.items()]
    return [*found, *({"part": "quality", **quality(policy)} for policy in ("streaming_llm", "random"))]


def test_tables() -> None:
    of_load, shares, phases, of_copies, of_quality = Overhead().tables(runs())
    # Half-width of six logarithms of 0.99 and 1.01: t(0.975, 5) = 2.5706 times 0.010955 / sqrt(6).
    assert of_load.shown() == [
        ["16", "output tokens/s", "6", "160.0", "159.2", "99.5 % (98.9 % to 100.1 %)", "100.0 % (98.9 % to 101.2 %)"],
        [
            "16",
            "p95 ms per output token",
            "6",
            "100.0",
            "100.5",
            "100.5 % (99.9 % to 101.1 %)",
            "100.0 % (98.9 % to 101.2 %)",
        ],
    ]
    assert shares.shown() == [
        ["16", HOOKS, "0.0", "100.0", "0.80", "0.80 %", "0.00"],
        ["16", EVICTING, "16.0", "100.0", "1.90", "1.90 %", "0.00"],
    ]
    assert [row[0] for row in phases.shown()] == [*PHASES, "step"]
    assert phases.shown()[2] == ["forward", "90.00", "90.00", "90.00"]
    assert of_copies.shown()[0] == ["async", "4", "256", "4.00", "1.50", "80.0", "100.0 %"]
    assert [row[0] for row in of_copies.shown()] == ["async", "inline", "force_sync", "async again"]
    assert [row[0] for row in of_quality.shown()] == ["streaming_llm", "random"]


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"evicted": 1}, ["evictions while the indirection alone is measured"]),
        ({"again": (90.0, 110.0)}, ["half-width", "half-width"]),
        ({"hooks": 103.0}, ["output tokens/s: hooks / stock", "p95 ms per output token: hooks / stock"]),
        ({"hooks": 90.0}, []),
        ({"in_hooks": 1.0}, ["nothing to evict: time inside our hooks"]),
        ({"dying": 511}, ["one eviction per request and step: evictions"]),
        ({"inline": {"tokens_moved": 0}}, ["copies inline: every run evicts and moves"]),
        ({"force_sync": {"tokens_evicted": 0}}, ["copies force_sync: every run evicts and moves"]),
        ({"stall": 4.5}, ["the host stands still for async copies"]),
    ],
)
def test_each_check_can_fail(changed: dict[str, Any], missed: list[str]) -> None:
    found = [check.what for check in Overhead().checks(runs(**changed)) if not check.held]
    assert len(found) == len(missed), found
    assert all(part in what for part, what in zip(missed, found, strict=True)), found


def test_what_must_not_fail() -> None:
    checks = Overhead().checks(runs(evicted=1, dying=0, stall=9.0))
    assert [check.kind for check in checks if not check.held] == ["must", "must", "aim"]


def test_figure() -> None:
    ratios, phases, stalls = Overhead().figure(runs()).axes
    assert [label.get_text().replace("\n", " ") for label in ratios.get_yticklabels()] == [
        "16 requests, output tokens/s",
        "16 requests, p95 ms per output token",
    ]
    assert "16 requests" in phases.get_title()
    assert phases.get_xticklabels()[0].get_text() == "stock\n(forward: 90 ms)"
    assert [text.get_text() for text in phases.get_legend().get_texts()] == [
        phase for phase in reversed(PHASES) if phase != "forward"
    ]
    assert [round(bar.get_height(), 1) for bar in stalls.patches] == [4.0, 4.0, 4.0, 1.5, 4.0, 4.5]


class TestMeasure:
    """Against engines that answer at once."""

    def measure(self, noise: float, **options: Any) -> tuple[ToldBench, list[dict[str, Any]], list[Any]]:
        asked: list[Any] = []
        turns = {"n": 0}

        def answer(variant: str, task: str, arguments: dict[str, Any]) -> Any:
            asked.append((variant, task, arguments))
            if task == "decode":
                turns["n"] += variant == "native again"
                off = noise * (-1) ** (turns["n"] // 3) if variant == "native again" else 0.0
                return {"step_ms": [100.0 + off] * arguments["steps"], "tokens_evicted": 0}
            if task == "break_down":
                return {"step_ms": 100.0, "tokens_evicted": 0, "steps": arguments["steps"]}
            if task == "decode_copying":
                return {"step_ms": [100.0], "tokens_evicted": 9}
            return None

        bench = ToldBench(answer, **options)
        return bench, Overhead().measure(bench), asked

    def test_five_repeats_are_enough_where_a_and_a_agree(self) -> None:
        bench, found, asked = self.measure(0.5)
        loads = [(one["concurrency"], one["variant"]) for one in found if one["part"] == "load"]
        assert [loads.count((n, "stock")) for n in (16, 48)] == [5, 5] and len(loads) == 2 * 3 * 5
        assert [len(one["step_ms"]) for one in found if one["part"] == "load"] == [24] * 30
        # The budget counts, and the steps that are run do not reach it.
        begun = [a for variant, task, a in asked if task == "begin" and variant == "fill" and a.get("extra_args")]
        assert [a["extra_args"] for a in begun] == [{"vtoken.budget": 48 * 32}, {"vtoken.budget": 16 * 32}]
        assert json.loads(json.dumps(found)) == found
        assert len(bench.started) == 4

    def test_more_where_they_do_not(self) -> None:
        _, found, _ = self.measure(20.0)
        loads = [one["concurrency"] for one in found if one["part"] == "load" and one["variant"] == "stock"]
        assert loads.count(16) == MOST_REPEATS
        assert loads.count(48) == MOST_REPEATS  # and 48 requests have room for so many

    def test_the_quick_form_is_content(self) -> None:
        _, found, _ = self.measure(20.0, quick=True)
        assert [one["repeat"] for one in found if one["part"] == "load" and one["variant"] == "stock"] == [0, 1]


class Decoding:
    """An engine that computes a token of each request in a step, or leaves some out."""

    def __init__(self, leaves_out: int = 0) -> None:
        self.names: list[str] = []
        self.steps, self._leaves_out = 0, leaves_out

    def add_request(self, name: str, prompt: list[int], max_tokens: int, extra_args: Any) -> None:
        self.names.append(name)

    def step(self) -> list[Any]:
        self.steps += 1
        # The prompts take three steps.
        done = self.names if self.steps > 3 else self.names[: self.steps]
        return [SimpleNamespace(request_id=name) for name in done[self._leaves_out if self.steps > 3 else 0 :]]

    def snapshot(self) -> Any:
        return SimpleNamespace(tokens_evicted=2 * self.steps)

    def abort(self, name: str) -> None:
        self.names.remove(name)

    def has_unfinished(self) -> bool:
        return bool(self.names)


def test_requests_decode_from_call_to_call() -> None:
    engine = Decoding()
    assert overhead_task.begin(engine, [[1]] * 4, 100) == {"steps": 4 + 4}
    found = overhead_task.decode(engine, 4, 5)
    assert len(found["step_ms"]) == 5 and found["tokens_evicted"] == 10
    overhead_task.end(engine, 4)
    assert engine.names == []


def test_a_request_that_is_left_out_is_noticed() -> None:
    with pytest.raises(RunError, match="a step computed 3 of 4 requests"):
        overhead_task.begin(Decoding(leaves_out=1), [[1]] * 4, 100)


def test_phases_and_copies_of_a_real_engine(tiny_gqa: Path) -> None:
    config = VTokenConfig(policy="random", budget=48, interval=4, copies="inline")
    some = prompts([96, 96], 200)
    with running(tiny_gqa, config, skip_tokenizer_init=True) as engine:
        overhead_task.begin(engine, some, 60)
        found = overhead_task.break_down(engine, 2, 4)
        assert found["tokens_evicted"] == 2 * 4 and found["step_ms"] == pytest.approx(sum(found["phases"].values()))
        assert set(found["phases"]) == set(PHASES)
        for phase in ("schedule", "prepare inputs", "forward", "sample", "hooks", "update", "front end"):
            assert found["phases"][phase] > 0, phase
        assert found["hooks_share"] == pytest.approx(found["phases"]["hooks"] / found["step_ms"])
        for mode in ("async", "inline", "force_sync"):
            copied = overhead_task.decode_copying(engine, 2, 8, mode)
            assert copied["tokens_evicted"] == 2 * 8 and copied["relocations"] == 2, mode
            assert copied["tokens_moved"] > 0 and copied["stall_ms"] > 0
        overhead_task.end(engine, 2)
        assert not engine.has_unfinished() and engine.snapshot().held_blocks == 0

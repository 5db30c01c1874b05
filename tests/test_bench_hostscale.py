"""Bookkeeping over the number of requests: tables, figure and checks of made-up runs, and one small run."""

import pytest

from vtoken.evaluation.bench.hostscale import Hostscale, time_hooks


def run(requests: int, hooks: float, repeat: int = 0, mode: str = "fill", evicted: int | None = None) -> dict:
    return {
        "mode": mode,
        "requests": requests,
        "repeat": repeat,
        "steps": 10,
        "tokens_evicted": 10 * requests if evicted is None else evicted,
        "hooks_ms": hooks,
        "vllm_ms": 2 * hooks,
    }


RUNS = [
    *(run(16, hooks, n) for n, hooks in enumerate([1.0, 1.0])),
    *(run(256, hooks, n) for n, hooks in enumerate([8.0, 8.0])),
    *(run(4096, hooks, n) for n, hooks in enumerate([128.0, 128.0])),
]


def test_table() -> None:
    (table,) = Hostscale().tables(RUNS)
    assert table.shown() == [
        ["vtoken, fill", "16", "1.00", "62.5", "2.00"],
        ["vtoken, fill", "256", "8.00", "31.2", "16.00"],
        ["vtoken, fill", "4,096", "128.00", "31.2", "256.00"],
    ]
    spread = Hostscale().tables([run(16, 1.0), run(16, 3.0, 1), run(16, 2.0, 2)])[0]
    assert spread.shown()[0][2:4] == ["2.00 (-0.48 to 4.48)", "125.0 (-30.3 to 280.3)"]


def test_figure() -> None:
    (axes,) = Hostscale().figure(RUNS).axes
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    assert list(named["vLLM's own scheduler"].get_ydata()) == [2.0, 16.0, 256.0]
    assert list(named["hooks of vtoken, fill"].lines[0].get_ydata()) == [1.0, 8.0, 128.0]
    assert list(named["in proportion"].get_ydata()) == [0.5, 8.0, 128.0]


class TestChecks:
    def test_in_proportion(self) -> None:
        evicted, growth = Hostscale().checks(RUNS)
        assert (evicted.kind, evicted.found, evicted.held) == ("must", "1 to 1", True)
        assert (growth.kind, growth.found, growth.held) == ("aim", "1.00 times", True)

    def test_growth_that_is_too_much(self) -> None:
        _, growth = Hostscale().checks([{**run(256, 8.0), "vllm_ms": 1.0}, {**run(4096, 161.0), "vllm_ms": 18.0}])
        assert (growth.found, growth.held) == ("1.26 times", False)
        assert growth.reason == "in the same steps a request costs vLLM's own scheduler 1.12 times as much"
        _, growth = Hostscale().checks([run(256, 8.0), run(4096, 160.0)])
        assert growth.held

    def test_evictions_that_did_not_fire(self) -> None:
        (evicted,) = Hostscale().checks([run(16, 1.0), run(16, 1.0, evicted=159)])
        assert (evicted.kind, evicted.held) == ("must", False)

    def test_small_sizes_say_nothing_of_growth(self) -> None:
        assert len(Hostscale().checks([run(16, 1.0), run(64, 9.0), run(256, 90.0)])) == 1


@pytest.mark.parametrize("mode", ["fill", "none"])
def test_a_small_run(mode: str) -> None:
    found = time_hooks(requests=5, reclaim=mode, steps=3, repeat=1)
    assert (found["mode"], found["requests"], found["repeat"], found["tokens_evicted"]) == (mode, 5, 1, 15)
    assert found["hooks_ms"] > 0 and found["vllm_ms"] > 0


def test_requests_that_do_not_decode_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtoken.evaluation.bench.hostscale.WARM_UP_STEPS", 0)  # the prompts are computed, too
    with pytest.raises(RuntimeError, match="a step of 5 requests computed 1280 tokens"):
        time_hooks(requests=5, reclaim="fill", steps=3, repeat=0)

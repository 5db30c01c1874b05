"""The sweep under a latency bound: which points are tried, which one is selected, and what is said of it."""

import json
from collections import Counter
from typing import Any

import pytest
from told_engines import ToldBench, policy_of, quality

from vtoken.evaluation.bench.sla import Sla

# p95 ms per output token by clients; naive eviction at 8 clients sets the bound: 1.05 x 100.
P95 = {
    "native": {4: 90.0, 8: 130.0, 16: 200.0},
    "none": {4: 80.0, 8: 100.0, 16: 150.0},
    "pack": {4: 80.0, 8: 95.0, 16: 108.0},
    "fill": {4: 70.0, 8: 90.0, 16: 104.0},
    "fill again": {4: 70.0, 8: 90.0, 16: 104.0},
}


def figures(variant: str, clients: int) -> dict[str, Any]:
    p95 = P95[variant][clients]
    return {
        "requests": 12,
        "output_tokens": 12 * 64,
        "seconds": 40.0,
        "output_tokens_per_s": 1000 * clients / p95,
        "tpot_p95_ms": p95,
        "mean_running": clients / 2,
        "preemptions": 3 if variant == "native" else 0,
        "tokens_evicted": 0 if variant == "native" else 500,
    }


def run(variant: str, policy: str, clients: int, repeat: int = 0, **fields: Any) -> dict[str, Any]:
    about = {
        "part": "load",
        "variant": variant,
        "policy": policy,
        "clients": clients,
        "repeat": repeat,
        "blocks": 30,
        "full_blocks": 6,
        "base": 8,
        "prompt_tokens": 128,
    }
    return {**about, **figures(variant, clients), **fields}


def runs(**changed: dict[str, Any]) -> list[dict[str, Any]]:
    points = [("native", 8), ("native", 4), ("none", 8), ("none", 16), ("pack", 8), ("pack", 16)]
    points += [("fill", 8), ("fill", 16), ("fill again", 16)]
    loads = [run(way, "h2o", clients, repeat, **changed.get(way, {})) for repeat in range(2) for way, clients in points]
    alone = {"part": "prompts alone", "seconds_each": 0.5, "requests": 24}
    return [alone, *loads, {"part": "quality", **quality("h2o")}]


def test_selected_points() -> None:
    selected, every, of_quality = Sla().tables(runs())
    assert [row[:5] for row in selected.shown()] == [
        ["h2o", "native", "4", "2", "90"],
        ["h2o", "none", "8", "2", "100"],
        ["h2o", "pack", "8", "2", "95"],
        ["h2o", "fill", "16", "2", "104"],
    ]
    # 16 / 104 ms against 8 / 100 ms; prompts: 12 of 0.5 s in 40 s.
    assert selected.shown()[3][5:] == ["153.8", "1.92", "8.0", "0", "15 %"]
    assert [row[5] for row in every.shown()] == ["yes", "no", "yes", "no", "yes", "no", "yes", "yes"]
    assert (
        "Bound: 105 ms (h2o), set with 8 clients. 30 blocks, and a request that evicts nothing takes 6" in selected.note
    )
    assert "The A/A pair (fill again / fill, 16 clients): 1.00 x (1.00 to 1.00), p95 1.00 x" in selected.note
    assert of_quality.shown() == [["h2o", "4 of 6", "5 of 6", "-0.125"]]


def test_nobody_within_the_bound() -> None:
    found = [one for one in runs(fill={"tpot_p95_ms": 106.0}) if one.get("variant") != "fill again"]
    assert Sla().tables(found)[0].shown()[3][:4] == ["h2o", "fill", "none", ""]
    (missed,) = [check for check in Sla().checks(found) if not check.held]
    assert missed.found == "nothing within the bound"
    Sla().figure(found)


@pytest.mark.parametrize(
    ("variant", "fields", "missed"),
    [
        ("pack", {"tokens_evicted": 0}, ["pack, h2o: every run evicts"]),
        (
            "none",
            {"output_tokens_per_s": 200.0},
            ["h2o: fill's output tokens/s at its selected point, against naive eviction's"],
        ),
        ("pack", {}, []),
    ],
)
def test_each_check_can_fail(variant: str, fields: dict[str, Any], missed: list[str]) -> None:
    assert [check.what for check in Sla().checks(runs(**{variant: fields})) if not check.held] == missed


def test_figure() -> None:
    latency, rate = Sla().figure(runs()).axes
    assert latency.get_title() == "h2o" and rate.get_xlabel() == "clients"
    labels = latency.get_legend_handles_labels()[1]
    assert labels == ["native vLLM", "naive eviction (none)", "vtoken, pack", "vtoken, fill", "bound"]
    assert latency.lines[-1].get_ydata() == [105.0, 105.0]


def test_sweep() -> None:
    asked: Counter[tuple[str, str | None, int]] = Counter()

    def answer(variant: str, task: str, arguments: dict[str, Any]) -> Any:
        assert task == "run_load"
        works, clients = arguments["workloads"], arguments["concurrency"]
        if works[0]["max_tokens"] == 1:
            assert (variant, clients, len(works)) == ("native", 1, 24)
            return {"seconds": 12.0}
        assert len(works) == 3 * clients // 2
        asked[variant, policy_of(arguments), clients] += 1
        return figures(variant, clients)

    bench = ToldBench(answer)
    found = Sla().measure(bench)
    expected = {
        ("native", None, 8): 1,  # above the bound, and not close to it: fewer clients are tried
        ("native", None, 4): 5,
        ("fill again", "h2o", 16): 4,
    }
    for policy, repeats in dict.fromkeys(("h2o", "scissorhands", "random"), 5).items():
        expected |= {
            ("none", policy, 8): repeats,
            ("none", policy, 16): 1,
            ("pack", policy, 8): repeats,
            ("pack", policy, 16): repeats,  # above the bound by less than 15 %
            ("fill", policy, 8): repeats,  # not selected, and not far below the bound
            ("fill", policy, 16): repeats,
        }
    assert asked == expected
    assert found[0] == {"part": "prompts alone", "seconds_each": 0.5, "requests": 24}
    assert json.loads(json.dumps(found)) == found
    assert len(bench.started) == 5
    assert {spec.engine_args["num_gpu_blocks_override"] for spec in bench.started} == {5 * 6 + 1}
    assert [one["policy"] for one in found if one["part"] == "quality"] == ["h2o", "scissorhands", "random"]
    assert all(check.held for check in Sla().checks(found))


def test_the_a_a_pair_has_common_repeats_although_fill_fits_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("fill", "fill again"):
        monkeypatch.setitem(P95, way, {4: 200.0, 8: 300.0, 16: 400.0})

    def answer(variant: str, task: str, arguments: dict[str, Any]) -> Any:
        return (
            {"seconds": 12.0} if arguments["workloads"][0]["max_tokens"] == 1 else figures(variant, clients(arguments))
        )

    found = Sla().measure(ToldBench(answer))
    assert "The A/A pair (fill again / fill, 8 clients): 1.00 x" in Sla().tables(found)[0].note


def clients(arguments: dict[str, Any]) -> int:
    return int(arguments["concurrency"])

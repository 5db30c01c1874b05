"""Beginnings that prompts share: hits, blocks, and later requests that find what was shared untouched."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_engine import SEEN, SHOWN, StubBench
from engines import running

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.prefix import FULL, OFF, Prefix, _groups
from vtoken.evaluation.bench.prefix_task import run_groups

NATIVE = {
    "kind": "model",
    "outputs": 12,
    "degree": 2,
    "mode": "native",
    "half": 64,
    "requests": 4,
    "block_size": 32,
    "held": [40, 40],
    "blocks_per_request": 10.0,
    "hits": [0, 64, 0, 64],
    "probe_hits": [64, 64],
    "probe_outputs": [[5, -1.25], [6, -0.5]],
    "tokens_evicted": 0,
    "tokens_moved": 0,
    "preemptions": 0,
    "quality": SEEN,
}
MODEL = [
    NATIVE,
    *(
        {**NATIVE, "mode": mode, "blocks_per_request": blocks, "tokens_evicted": 300}
        for mode, blocks in (("none", 8.0), ("pack", 6.0), ("fill", 4.0))
    ),
]

COUNTED = [{**run, "kind": "counted", "half": 8192, "block_size": 16, "hits": [0, 8192, 0, 8192]} for run in MODEL]
RUNS = MODEL + COUNTED


def test_tables() -> None:
    model, counted = Prefix().tables(RUNS)
    assert model.shown() == [["2", "128", "128", "8.0", "6.0", "4.0", "-25 %", "-50 %", *SHOWN]]
    assert counted.shown() == [["2", "16,384", "16,384", "8.0", "6.0", "4.0", "-25 %", "-50 %"]]
    assert "8,192 shared + 8,192 private + 12 generated tokens, blocks of 16" in counted.note
    assert "prompts without hits: after a hit, h2o has not seen the queries" in model.note
    assert "hit, h2o" not in counted.note


def test_a_mode_that_was_not_run_is_left_out() -> None:
    runs = [run for run in RUNS if run["kind"] == "counted" or run["mode"] != "pack"]
    assert Prefix().tables(runs)[0].shown() == [["2", "128", "128", "8.0", "", "4.0", "", "-50 %", *SHOWN]]
    assert len(Prefix().checks(runs)) == (2 * 4 + 1) + (3 * 2 + 1)
    assert len(Prefix().figure(runs).axes[0].get_lines()) == 2


def test_hits_that_differ_are_shown() -> None:
    runs = copy.deepcopy(RUNS)
    runs[2]["hits"] = [0, 64, 0, 32]
    assert Prefix().tables(runs)[0].shown()[0][2] == "128 / 96"


def test_all_checks_hold() -> None:
    checks = Prefix().checks(RUNS)
    assert len(checks) == (3 * 4 + 1) + (3 * 2 + 1) and all(check.held for check in checks)


@pytest.mark.parametrize(
    ("name", "value", "failing"),
    [
        ("tokens_evicted", 0, "model, 2 sharing, fill: tokens evicted, preemptions"),
        ("preemptions", 1, "model, 2 sharing, fill: tokens evicted, preemptions"),
        ("hits", [0, 64, 0, 32], "model, 2 sharing, fill: tokens of each prompt from the cache"),
        ("probe_hits", [64, 32], "model, 2 sharing, fill: what later requests take from the cache"),
        ("probe_outputs", [[5, -1.25], [7, -0.5]], "model, 2 sharing, fill: shared blocks untouched"),
        ("probe_outputs", [[5, -1.25], [6, -0.502]], "model, 2 sharing, fill: shared blocks untouched"),
        ("blocks_per_request", 5.8, "model, 2 sharing, fill: blocks per request against none"),
    ],
)
def test_each_check_can_fail(name: str, value: Any, failing: str) -> None:
    runs = copy.deepcopy(RUNS)
    runs[3][name] = value
    (failed,) = [check.what for check in Prefix().checks(runs) if not check.held]
    assert failed.startswith(failing)


def test_counted_hits_are_held_against_native() -> None:
    runs = copy.deepcopy(RUNS)
    runs[7]["hits"] = [0, 8192, 0, 8176]
    failed = [check.what for check in Prefix().checks(runs) if not check.held]
    assert failed == ["counted, 2 sharing, fill: tokens of each prompt from the cache"]


def test_figure() -> None:
    blocks, counted, hits = Prefix().figure(RUNS).axes
    assert [list(line.get_ydata()) for line in blocks.get_lines()] == [[8.0], [6.0], [4.0]]
    assert counted.get_title() == "counted: 8,192 + 8,192 tokens, blocks of 16"
    assert [bar.get_height() for bar in hits.patches] == [128, 128]


def test_groups_share_their_first_half_and_nothing_else() -> None:
    groups = _groups(StubBench(), FULL)
    firsts = []
    for degree, group in groups.items():
        assert len(group.prompts) == 8 and len(group.probes) == 8 // degree
        halves = [tuple(prompt[:64]) for prompt in group.prompts]
        assert halves == [half for half in dict.fromkeys(halves) for _ in range(degree)]
        assert [tuple(probe[:64]) for probe in group.probes] == list(dict.fromkeys(halves))
        assert len({tuple(prompt) for prompt in [*group.prompts, *group.probes]}) == 8 + 8 // degree
        firsts += dict.fromkeys(halves)
    assert len(set(firsts)) == 8 + 4 + 2 + 1


def test_a_model_whose_shared_blocks_are_hit(tiny_gqa: Path) -> None:
    rng = np.random.default_rng(0)
    one, two, *tails = (rng.integers(3, 500, 64).tolist() for _ in range(8))
    prompts = [one + tails[0], one + tails[1], two + tails[2], two + tails[3]]
    probes = [one + tails[4], two + tails[5]]
    config = VTokenConfig(policy="h2o", budget=0.5)
    with running(tiny_gqa, config, enable_prefix_caching=True, skip_tokenizer_init=True) as engine:
        found = run_groups(engine, prompts, 12, probes, OFF)
        # What was evicted from nobody: the same probes once more, when all blocks are free.
        again = run_groups(engine, probes, 12, probes, OFF)
    assert found["hits"] == [0, 64, 0, 64] and found["probe_hits"] == [64, 64]
    assert (found["tokens_evicted"], found["preemptions"]) == (4 * (65 + 11), 0)
    assert len(found["held"]) == 8 and found["blocks_per_request"] == sum(found["held"]) / 8 / 4
    for (token, score), (other, same) in zip(found["probe_outputs"], again["probe_outputs"], strict=True):
        assert token == other and score == pytest.approx(same, abs=1e-4)

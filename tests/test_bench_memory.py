"""The blocks that requests hold, looked into after every step, and the table of the three ways of reclaiming."""

import copy
from pathlib import Path
from typing import Any

import pytest
from block_engine import SEEN, SHOWN, BlockEngine
from engines import running

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.load import as_arguments
from vtoken.evaluation.bench.memory import Memory, distinct
from vtoken.evaluation.bench.occupancy import at_most_half_full, watch_blocks
from vtoken.evaluation.load import RunError
from vtoken.evaluation.recorded_victims import POLICY
from vtoken.evaluation.workloads import Workload
from vtoken.vllm_plugin.engine import FORCED_TOKENS, FORCED_TOKENS_PROCESSOR


def works(count: int = 2, prompt: int = 8, outputs: int = 4) -> list[dict[str, Any]]:
    return as_arguments([Workload(f"r{n}", [1] * prompt, outputs) for n in range(count)])


def test_blocks_are_counted_while_requests_decode() -> None:
    found = watch_blocks(BlockEngine(block_size=4, num_blocks=100, keep=6), works(), outputs=True)
    # After each of three steps 6 live tokens in blocks of 4 and 2; after the fourth nothing is left to see.
    expected = {
        "requests": 2,
        "block_size": 4,
        "utilization": 0.75,
        "waste_ratio": 0.25,
        "waste": [0] * 5 + [6] + [0] * 14,
        "waste_quartiles": [0.25, 0.25, 0.25],
        "blocks_per_request": 2.0,
        "needed_per_request": 2.0,
        "looked": 6,
        "not_dense": 0,
        "wasteful": 0,
        "pool_differs": 0,
        "full": [0, 0, 6, 0, 6],
        "held": [0, 4, 4, 4],
        "live": [0, 12, 12, 12],
        "needed": [0, 4, 4, 4],
        "seen": [0, 2, 2, 2],
        "preemptions": 0,
        "tokens_evicted": 2 * (2 + 1 + 1),
        "outputs": {"r0": [0] * 4, "r1": [0] * 4},
    }
    assert expected.items() <= found.items()


def test_holes_are_noticed() -> None:
    engine = BlockEngine(block_size=4, num_blocks=100, keep=6)
    engine.holes = True
    found = watch_blocks(engine, works())
    assert (found["looked"], found["not_dense"], found["wasteful"], found["pool_differs"]) == (6, 6, 6, 3)
    assert (found["blocks_per_request"], found["needed_per_request"], found["utilization"]) == (6.0, 2.0, 0.25)
    assert found["full"] == [0, 36, 0, 0, 0]
    assert found["waste"] == [0] * 15 + [6] + [0] * 4


def test_a_last_block_with_one_token_is_not_wasteful() -> None:
    found = watch_blocks(BlockEngine(block_size=4, num_blocks=100, keep=5), works(1))
    assert found["utilization"] == 5 / 8 and (found["not_dense"], found["wasteful"]) == (0, 0)


def test_the_waste_ratio_is_that_of_each_request_after_each_step() -> None:
    # Prompts of 4, 6 and 9 tokens, of which all are kept.
    asked = as_arguments([Workload(f"r{n}", [1] * prompt, 4) for n, prompt in enumerate((4, 6, 9))])
    found = watch_blocks(BlockEngine(block_size=4, num_blocks=100), asked)
    # 4, 5 and 6 of 4, 8 and 8 slots; 6, 7 and 8 of 8; 9, 10 and 11 of 12.
    assert found["waste_quartiles"] == pytest.approx([1 / 12, 1 / 6, 1 / 4])
    # Nothing twice; a twelfth, an eighth, a sixth; a quarter three times; three eighths.
    assert sum(found["waste"]) == 9
    assert {n: count for n, count in enumerate(found["waste"]) if count} == {0: 2, 1: 1, 2: 1, 3: 1, 5: 3, 7: 1}


def test_requests_that_never_decode_are_refused() -> None:
    with pytest.raises(RunError, match="2 tokens or more"):
        watch_blocks(BlockEngine(block_size=4, num_blocks=100), works(outputs=1))


def test_half_full() -> None:
    assert at_most_half_full([0, 1, 2, 3, 4]) == 0.3
    assert at_most_half_full([0, 1, 1, 1, 1, 1]) == 0.4


def test_of_equal_prompts_one_is_taken() -> None:
    some = [Workload("a", [1, 2], 3), Workload("b", [1], 3), Workload("c", [1, 2], 3)]
    assert [work.request_id for work in distinct(some)] == ["a", "b"]


ANY = {
    "requests": 2,
    "block_size": 32,
    "same_outputs": True,
    "looked": 10,
    "not_dense": 0,
    "wasteful": 0,
    "pool_differs": 0,
    "preemptions": 0,
    "tokens_evicted": 90,
    "live": [0, 100, 100],
    "seen": [0, 2, 2],
    "quality": SEEN,
}
RUNS = [
    {**ANY, "policy": "h2o", "mode": mode, "utilization": use, "blocks_per_request": blocks, "tokens_moved": moved}
    | {"held": [0, 2 * blocks, 2 * blocks]}
    for mode, use, blocks, moved in (("none", 0.4, 10.0, 0), ("pack", 0.6, 6.0, 70), ("fill", 0.9, 4.0, 20))
]


def test_table() -> None:
    (table,) = Memory().tables(RUNS)
    assert table.shown() == [
        ["h2o", "none", "40.0 %", "", "10.00", "", "90", "0", *SHOWN],
        ["h2o", "pack", "60.0 %", "+50.0 %", "6.00", "-40.0 %", "90", "70", *SHOWN],
        ["h2o", "fill", "90.0 %", "+125.0 %", "4.00", "-60.0 %", "90", "20", *SHOWN],
    ]


def test_all_checks_hold() -> None:
    checks = Memory().checks(RUNS)
    assert len(checks) == 8 and all(check.held for check in checks)


@pytest.mark.parametrize(
    ("mode", "name", "value", "failing"),
    [
        ("fill", "not_dense", 1, "blocks of a request"),
        ("fill", "wasteful", 1, "waste ratio F"),
        ("fill", "looked", 0, "blocks of a request"),
        ("pack", "tokens_evicted", 89, "tokens evicted under"),
        ("pack", "pool_differs", 1, "missing from vLLM's pool"),
        ("none", "same_outputs", False, "outputs, and live tokens"),
        ("none", "live", [0, 100, 99], "outputs, and live tokens"),
        ("none", "preemptions", 1, "preemptions"),
        ("fill", "utilization", 0.48, "slots in use"),
        ("fill", "blocks_per_request", 7.4, "blocks per request"),
    ],
)
def test_each_check_can_fail(mode: str, name: str, value: Any, failing: str) -> None:
    runs = copy.deepcopy(RUNS)
    next(run for run in runs if run["mode"] == mode)[name] = value
    failed = [check.what for check in Memory().checks(runs) if not check.held]
    assert any(failing in what for what in failed)
    assert len(failed) <= 2


def test_nothing_evicted_fails() -> None:
    failed = [check.what for check in Memory().checks([{**run, "tokens_evicted": 0} for run in RUNS]) if not check.held]
    assert failed == ["h2o: tokens evicted under none, pack, fill"]


def test_figure_shows_blocks_per_request() -> None:
    figure = Memory().figure(RUNS)
    held, use = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in held.get_lines()}
    assert lines == {
        "naive eviction (none)": [10.0, 10.0],
        "vtoken, pack": [6.0, 6.0],
        "vtoken, fill": [4.0, 4.0],
    }
    assert [round(bar.get_height()) for bar in use.patches] == [40, 60, 90]


def test_victims_are_replayed_on_a_model(tiny_gqa: Path, tmp_path: Path) -> None:
    some = [Workload(f"r{n}", list(range(3 + n, 103 + 20 * n)), 8) for n in range(2)]
    file = str(tmp_path / "victims.json")
    arguments: dict[str, Any] = {"logits_processors": [FORCED_TOKENS_PROCESSOR], "skip_tokenizer_init": True}
    with running(tiny_gqa, VTokenConfig(policy="random", budget=0.5, record_trace=True), **arguments) as engine:
        fill = watch_blocks(engine, as_arguments(some), record=file, outputs=True)
    assert (fill["looked"], fill["not_dense"], fill["wasteful"], fill["pool_differs"]) == (14, 0, 0, 0)
    assert fill["tokens_evicted"] == (51 + 60) + 2 * 7
    outputs = fill["outputs"]
    again = [
        Workload(work.request_id, work.prompt_token_ids, 8, None, {"vtoken.budget": 0.5, FORCED_TOKENS: given})
        for work, given in zip(some, outputs.values(), strict=True)
    ]
    options: dict[str, Any] = {"policy": POLICY, "policy_options": {"file": file}, "reclaim": "none"}
    with running(tiny_gqa, VTokenConfig(budget=1024, **options), **arguments) as engine:
        none = watch_blocks(engine, as_arguments(again), outputs=True)
    assert none["outputs"] == outputs and none["live"] == fill["live"]
    assert none["tokens_evicted"] == fill["tokens_evicted"] and none["not_dense"] > 0
    assert none["blocks_per_request"] > fill["blocks_per_request"]

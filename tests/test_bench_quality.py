"""What is made of the runs of ``quality``, and that all settings are asked the same."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import EOS, ByteTokenizer
from engines import prompts, running

from vtoken.evaluation.bench.intervals import Interval
from vtoken.evaluation.bench.quality import Asked, Quality, Sizes, ask_all, engine_settings, questions_of, rouge_l
from vtoken.evaluation.bench.quality_of import finish, offering
from vtoken.evaluation.bench.quality_shown import pairs_of
from vtoken.evaluation.bench.quality_task import answer_and_write
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.load import RunError
from vtoken.evaluation.questions import Question
from vtoken.evaluation.workloads import Workload
from vtoken.vllm_plugin.engine import FORCED_TOKENS_PROCESSOR

EXPERIMENT = Quality()


def run(variant: str, policy: str | None, texts: list[str], likelihood: float, **more: Any) -> dict[str, Any]:
    """Texts "p0", "p1", ...; two needles, of which native finds both, two passages and a document."""
    named = {f"p{n}": text for n, text in enumerate(texts)}
    return {
        "variant": variant,
        "policy": policy,
        "budget": None if policy is None else 0.5,
        "needles": {"n0": True, "n1": policy is None},
        "documents": {"d": likelihood},
        "passages": {"t0": likelihood, "t1": likelihood - 1.0},
        "texts": named,
        "lengths": {name: len(text.split()) for name, text in named.items()},
        "rouge_l": rouge_l({"p0": "a b c d", "p1": "e f g h"}, named),
        "tokens_evicted": 0 if policy is None else 10,
        "seconds": 1.0,
        **more,
    }


@pytest.fixture
def runs() -> list[dict[str, Any]]:
    return [
        run("native", None, ["a b c d", "e f g h"], -2.0),
        run("fill", "h2o", ["a b c d", "e f x y"], -2.25),
        run("fill", "random", ["a x y z", "e f"], -2.5),
        run("none", "h2o", ["a b c d", "e f g y"], -2.25),
    ]


def test_each_setting_has_a_row(runs: list[dict[str, Any]]) -> None:
    table, _ = EXPERIMENT.tables(runs)
    full, h2o, random = table.rows
    assert list(full) == ["full cache", None, None, None, "2 of 2", None, pytest.approx(2.718281828**2.5), None, None]
    assert list(h2o[:2]) == ["h2o", 0.5]
    # Half of the words in order: precision and recall are both a half.
    assert h2o[2] == Interval(0.75, 0.5, 1.0, 2)
    assert list(h2o[3:5]) == ["1 of 2", "1 of 2"]
    assert h2o[5] == Interval(-0.25, -0.25, -0.25, 1)
    assert h2o[6] == pytest.approx(2.718281828**2.75)
    assert h2o[7] == Interval(-0.25, -0.25, -0.25, 2)
    assert h2o[8] == 10
    # One word in four, and two of four with nothing else: F1 of 1 and a half is two thirds.
    assert random[2].median == pytest.approx((1 / 4 + 2 / 3) / 2)
    assert "at most 4 tokens" in table.note
    assert "1 references" in table.note and "2 passages" in table.note


def test_pairs_are_the_same_prompt_and_setting(runs: list[dict[str, Any]]) -> None:
    assert list(pairs_of(runs)) == [("h2o", 0.5)]
    same, other = pairs_of(runs)["h2o", 0.5]
    assert (same.none, same.fill, same.identical, same.length_ratio) == (1.0, 1.0, True, 1.0)
    assert (other.none, other.fill, other.identical, other.length_ratio) == (0.75, 0.5, False, 1.0)
    assert (same.same_words, other.same_words) == (4, 2)
    rows = EXPERIMENT.tables(runs)[1].rows
    assert [list(row[:2]) for row in rows] == [["h2o", 0.5], ["all", None]]
    assert list(rows[1][2:5]) == [2, 0.875, 0.75]
    assert rows[1][5] == Interval(-0.125, -0.25, 0.0, 2)
    assert list(rows[1][6:]) == [0.5, "1 of 2", 1.0]


def test_the_interval_of_the_difference_is_over_prompts(runs: list[dict[str, Any]]) -> None:
    twice = [*runs, run("none", "random", ["a x y z", "e f"], -2.5)]
    # Four pairs of two prompts: the second one's mean difference is half of h2o's.
    table = EXPERIMENT.tables(twice)[1]
    assert table.rows[-1][5] == Interval(-0.0625, -0.125, 0.0, 2)
    assert table.rows[-1][2] == 4 and table.note.startswith("2 different prompts, each under every setting.")


def test_a_prompt_that_comes_again_is_no_further_pair(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["a" * 120, "b" * 130, "a" * 120, "too short"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    sizes = Sizes(needles=0, passages=1, documents=0, length=64)
    asked = questions_of(BenchRequests(ByteTokenizer(), 8192, path), sizes)
    assert [work.prompt_token_ids for work in asked.prompts] == [list(b"a" * 120), list(b"b" * 130)]
    assert len({work.request_id for work in asked.prompts}) == 2


def verdicts(runs: list[dict[str, Any]]) -> list[tuple[bool, str, str]]:
    return [(check.held, check.kind, check.found) for check in EXPERIMENT.checks(runs)]


def test_checks(runs: list[dict[str, Any]]) -> None:
    assert verdicts(runs) == [
        (True, "must", "3"),
        (True, "aim", "-0.1250 (-0.2500 to +0.0000)"),
        (False, "aim", "50.0%"),
        (True, "aim", "1.00"),
    ]
    runs[2]["tokens_evicted"] = 0
    runs[1]["texts"], runs[1]["rouge_l"] = runs[3]["texts"], runs[3]["rouge_l"]
    runs[1]["lengths"] = {"p0": 5, "p1": 5}
    assert verdicts(runs) == [
        (False, "must", "2; none under random 0.5, fill"),
        (True, "aim", "+0.0000 (+0.0000 to +0.0000)"),
        (True, "aim", "100.0%"),
        (False, "aim", "1.25"),
    ]
    runs[1]["rouge_l"] = {"p0": 0.9, "p1": 0.7}
    assert verdicts(runs)[1] == (False, "aim", "-0.0750 (-0.1000 to -0.0500)")


def test_what_a_miss_is_told_with(runs: list[dict[str, Any]]) -> None:
    _, change, close, length = EXPERIMENT.checks(runs)
    assert change.reason == "1 of 2 pairs of texts differ: 0 score higher under fill, 1 lower"
    assert close.reason == "1 of 2 pairs of texts differ, half of these only after 2 words"
    assert length.reason == "of 2 texts 0 are longer under fill and 0 shorter: they end elsewhere"
    runs[1]["lengths"] = {"p0": 5, "p1": 3}
    assert EXPERIMENT.checks(runs)[3].reason == "of 2 texts 1 are longer under fill and 1 shorter: they end elsewhere"


def test_the_figure_shows_all_four(runs: list[dict[str, Any]]) -> None:
    agreement, needles, likelihood, paired = EXPERIMENT.figure(runs).axes
    assert [bar.get_height() for bar in agreement.patches] == [0.75, pytest.approx((1 / 4 + 2 / 3) / 2)]
    assert [label.get_text() for label in agreement.get_xticklabels()] == ["h2o", "random"]
    assert [bar.get_height() for bar in needles.patches] == [0.5, 0.5]
    assert needles.lines[0].get_ydata() == [1.0, 1.0]
    assert [bar.get_height() for bar in likelihood.patches] == [-0.25, -0.5]
    (points,) = paired.collections
    assert points.get_offsets().tolist() == [[1.0, 1.0], [0.75, 0.5]]


def test_a_text_without_words_agrees_with_itself() -> None:
    assert rouge_l({"p": "+++", "q": "+++", "r": "one"}, {"p": "+++", "q": "---", "r": "One"}) == {
        "p": 1.0,
        "q": 0.0,
        "r": 1.0,
    }


ENGINE = {
    "skip_tokenizer_init": True,
    "logits_processors": [FORCED_TOKENS_PROCESSOR],
    "logprobs_mode": "raw_logprobs",
}
H2O = {"vtoken.policy": "h2o", "vtoken.budget": 0.5}


def asked() -> dict[str, Any]:
    one, two, three = prompts([200, 150, 180], EOS)
    questions = [Question("n", one[:-1], one[-1:], 4, ["x"]), Question("t", two[:-1], [two[-1], 7, 8, 9])]
    return {
        "questions": [dataclasses.asdict(question) for question in questions],
        "workloads": [dataclasses.asdict(Workload("w", three, 6))],
    }


def test_prompts_that_are_computed_once_give_the_same(tiny: Callable[[str], Path]) -> None:
    """The experiment leaves prefix caching on, so that every prompt is computed once and not for each setting."""
    config = offering(("h2o", "snapkv"), {"h2o": {"whole_prompt": True}})
    told = []
    for caching in (False, True):
        with running(tiny("llama-gqa"), config, **ENGINE, enable_prefix_caching=caching) as engine:
            answer_and_write(engine, **asked(), extra_args={"vtoken.policy": "snapkv", "vtoken.budget": 0.25})
            told.append(
                [
                    answer_and_write(engine, **asked(), extra_args=extra)
                    for extra in (H2O, {"vtoken.policy": "snapkv", "vtoken.budget": 0.5})
                ]
            )
    for plain, cached in zip(*told, strict=True):
        assert plain["texts"] == cached["texts"]
        assert plain["tokens_evicted"] == cached["tokens_evicted"] > 0
        for (tokens, scores), (others, scored) in zip(plain["answers"], cached["answers"], strict=True):
            assert tokens == others
            assert scores == pytest.approx(scored, abs=1e-4)
    assert told[0][0]["answers"][1][1] != pytest.approx(told[0][1]["answers"][1][1], abs=1e-4)


def test_a_text_ends_where_the_model_ends_it(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """For this model every even token is an end of text."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(0, EOS, 2))}))
    work = Workload("w", prompts([40], EOS)[0], 24)
    arguments = {"skip_tokenizer_init": True, "generation_config": str(tmp_path)}
    with running(tiny("llama-gqa"), None, **arguments) as engine:
        engine.add_request("all", work.prompt_token_ids, work.max_tokens)
        whole = finish(engine)["all"].token_ids
        (ended,) = answer_and_write(engine, [], [dataclasses.asdict(work)], {})["texts"]
    assert len(whole) == 24
    first = next(n for n, token in enumerate(whole) if token % 2 == 0)
    assert first < 23 and ended == whole[: first + 1]


class Told:
    """An engine's process that answers with what it was asked; ``seen`` keeps that."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def do(self, task: str, **arguments: Any) -> dict[str, Any]:
        assert task == "vtoken.evaluation.bench.quality_task:answer_and_write"
        self.seen.append(arguments)
        answers = [(q["forced"] + [65] * q["free"], [-9.0] + [-1.0] * 4) for q in arguments["questions"]]
        return {"answers": answers, "texts": [[66, 67] for _ in arguments["workloads"]], "tokens_evicted": 3}


def test_what_is_asked_and_what_is_made_of_the_answers() -> None:
    engine = Told()
    everything = Asked(
        [Question("n", [1], [2], 3, ["AA"]), Question("m", [1], [2], 3, ["B"])],
        [Question("d", [3], [4, 5])],
        [Question("t", [6], [7, 8])],
        [Workload("w", [9], 2)],
    )
    found = ask_all(engine, everything, "tova", 0.25, lambda tokens: bytes(tokens).decode())  # type: ignore[arg-type]
    assert engine.seen[0]["extra_args"] == {"vtoken.policy": "tova", "vtoken.budget": 0.25}
    assert found.pop("seconds") >= 0
    assert found == {
        "needles": {"n": True, "m": False},
        "documents": {"d": -1.0},
        "passages": {"t": -1.0},
        "texts": {"w": "BC"},
        "lengths": {"w": 2},
        "tokens_evicted": 3,
    }
    ask_all(engine, everything, None, None, lambda tokens: "")  # type: ignore[arg-type]
    assert engine.seen[1]["extra_args"] == {}


def test_the_quick_form_asks_the_engine_that_is_there_anyway() -> None:
    from vtoken.evaluation.bench.bench import POLICIES

    assert engine_settings("native", quick=True) is None
    assert engine_settings("fill", quick=True) == offering(POLICIES)
    none = engine_settings("none", quick=False)
    assert none is not None
    assert (none.reclaim, none.request_policies["h2o"], none.request_policies["tova"]) == (
        "none",
        {"whole_prompt": True},
        {},
    )


def test_a_failure_is_told() -> None:
    class Engine:
        def __init__(self, reason: str) -> None:
            self.reason, self.left = reason, 1

        def snapshot(self) -> Any:
            return type("Snapshot", (), {"tokens_evicted": 0})

        def add_request(self, request_id: str, *args: Any, stop_at_end: bool, **settings: Any) -> None:
            assert stop_at_end and settings == {"extra_args": None}

        def has_unfinished(self) -> bool:
            return self.left > 0

        def step(self) -> list[Any]:
            self.left -= 1
            return [type("Entry", (), {"request_id": "w", "token_ids": [5], "finish_reason": self.reason})]

    work = [dataclasses.asdict(Workload("w", [1], 4))]
    told = answer_and_write(Engine("stop"), [], work, {})
    assert told == {"answers": [], "texts": [[5]], "tokens_evicted": 0}
    with pytest.raises(RunError, match="request w ended early: error"):
        answer_and_write(Engine("error"), [], work, {})

"""The quality measurement: its questions, how they are asked, and what is made of the answers."""

import json
import math
import shutil
import sys
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer
from fake_engine import FakeProgress, FakeSnapshot
from rich.console import Console

from vtoken.cli import TABLE_WIDTH
from vtoken.config import VTokenConfig
from vtoken.evaluation import quality, quality_run, questions
from vtoken.evaluation.load import RunError
from vtoken.evaluation.quality import QualityPlan, QualitySpec, make_quality_plan, run_quality
from vtoken.evaluation.quality_report import QualityReport, QualityRun, bootstrap_interval, quality_table, summary
from vtoken.evaluation.quality_run import Answer, ask
from vtoken.evaluation.questions import Question, Wishes, data_directory, load_questions, spread
from vtoken.evaluation.workloads import _source

TOKENIZER = ByteTokenizer()
DECODE = TOKENIZER.decode
NEEDLE = Question("n", [5, 6, 7], [8], 3, ["42"])
DOCUMENT = Question("d", [5, 6], [7, 10, 11])


def text(tokens: list[int]) -> str:
    return DECODE(tokens)


# ---- Questions ---------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory: needles with prompts of 100, 200, ... tokens, and documents, one without a reference."""
    needles = [
        {"id": f"n{i}", "prompt": "x" * (100 * i - 4), "answer_prefix": "is a", "answers": [str(i)]}
        for i in range(1, 7)
    ]
    documents = [{"id": f"d{i}", "prompt": "y" * 99 + ":", "references": ["one", "two"][i:]} for i in range(3)]
    directory = tmp_path / "data"
    directory.mkdir()
    for name, records in (("needle.jsonl", needles), ("long.jsonl", documents)):
        (directory / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


def test_questions_hold_the_last_token_of_a_prompt_back(data: Path) -> None:
    loaded, note = load_questions(TOKENIZER, Wishes(data=data))
    assert [question.question_id for question in loaded] == ["n1", "n2", "n3", "n4", "n5", "n6", "d0", "d1"]
    needle, document = loaded[0], loaded[6]
    assert text(needle.prompt_token_ids + needle.forced) == "x" * 96 + "is a"
    assert (text(needle.forced), needle.free, needle.answers) == ("a", 24, ["1"])
    assert (len(document.prompt_token_ids), text(document.forced)) == (99, ": one")
    assert (document.free, document.answers) == (0, None)
    assert text(loaded[7].forced) == ": two"
    assert (needle.total_tokens, document.total_tokens) == (99 + 25, 99 + 5)
    assert note == f"questions from {data}"


def test_questions_are_spread_over_the_prompts_that_are_short_enough(data: Path) -> None:
    loaded, _ = load_questions(TOKENIZER, Wishes(needles=2, documents=1, max_prompt=400, data=data))
    assert [question.question_id for question in loaded] == ["n1", "n3", "d0"]
    loaded, _ = load_questions(TOKENIZER, Wishes(needles=0, max_prompt=100, data=data))
    assert [question.question_id for question in loaded] == ["d0", "d1"]
    assert spread("abcdef", 4) == ["a", "b", "d", "e"]
    assert spread("abc", 9) == spread("abc", None) == ["a", "b", "c"]


def test_passages_of_plain_texts_are_spread_over_them_and_what_follows_is_scored(data: Path) -> None:
    (data / "text").mkdir()
    for name, length in (("long", 5000), ("tale", 2000), ("short", 100)):
        (data / "text" / f"{name}.txt").write_text("".join(chr(97 + n % 26) for n in range(length)))
    loaded, _ = load_questions(TOKENIZER, Wishes(needles=0, documents=0, passages=7, max_prompt=500, data=data))
    assert [q.question_id for q in loaded] == ["long-0", "long-1", "tale-0", "tale-1", "tale-2"]
    room = 5000 - 500 - 64
    for question, start in zip(loaded, (0, room // 2), strict=False):
        assert (len(question.prompt_token_ids), len(question.forced), question.free) == (499, 65, 0)
        assert text(question.prompt_token_ids)[0] == chr(97 + start % 26)
        assert text(question.forced)[0] == chr(97 + (start + 499) % 26)


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"max_prompt": 99}, "--max-prompt 99 leaves none of the 6 prompts in .*needle.jsonl; raise it"),
        ({"needles": 0, "documents": 0, "passages": 0}, "leave nothing to ask"),
        ({"data": Path("/no/such/folder")}, "--data = /no/such/folder is no directory; name the one that holds"),
    ],
)
def test_questions_that_cannot_be_asked(data: Path, wishes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_questions(TOKENIZER, Wishes(**{"data": data, **wishes}))


@pytest.mark.parametrize("line", ["{", "[]", "7", '{"id": "n"}'])
def test_damaged_data_is_one_sentence(data: Path, line: str) -> None:
    (data / "needle.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"needle.jsonl, line 1 is damaged \(.*\); mend it or remove it\.$"):
        load_questions(TOKENIZER, Wishes(data=data))
    (data / "needle.jsonl").unlink()
    with pytest.raises(ValueError, match=r"needle.jsonl cannot be read .*; give --data another directory\.$"):
        load_questions(TOKENIZER, Wishes(data=data))


def test_where_data_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside, named = tmp_path / "beside", tmp_path / "named"
    monkeypatch.setattr(questions, "BESIDE_THE_CHECKOUT", beside)
    monkeypatch.delenv("VTOKEN_DATA", raising=False)
    assert data_directory() is None
    beside.mkdir()
    assert data_directory() == beside
    monkeypatch.setenv("VTOKEN_DATA", str(named))
    with pytest.raises(ValueError, match=r"VTOKEN_DATA = .*named is no directory"):
        data_directory()
    named.mkdir()
    assert data_directory() == named
    assert data_directory(tmp_path) == tmp_path


def test_without_data_the_library_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "data_directory", lambda given: None)
    loaded, note = load_questions(TOKENIZER, Wishes(needles=2, documents=3, max_prompt=700))
    assert [question.answers is None for question in loaded] == [False, False, True, True, True]
    assert [len(question.prompt_token_ids) for question in loaded] == [699] * 5
    for needle in loaded[:2]:
        assert f"is: {needle.answers[0]}." in text(needle.prompt_token_ids)
    for document in loaded[2:]:
        assert len(document.forced) == 1 + 64
        whole = text(document.prompt_token_ids + document.forced)
        assert whole in _source(document.question_id.split("-")[0])
    assert "Python's library" in note


def test_the_shared_data() -> None:
    directory = data_directory()
    if directory is None:
        pytest.skip("there is no data: set VTOKEN_DATA")
    loaded, _ = load_questions(TOKENIZER, Wishes(max_prompt=10**6))
    needles = [question for question in loaded if question.answers is not None]
    assert (len(needles), len(loaded) - len(needles)) == (30, 21)
    assert all(text(question.prompt_token_ids + question.forced).endswith("provided text is") for question in needles)
    assert all(text(question.forced).startswith(": ") for question in loaded[30:45])
    assert [len(question.forced) for question in loaded[45:]] == [65] * 6


# ---- Asking ------------------------------------------------------------------------------------------------


class ScriptedEngine:
    """Answers with a given output after a prompt of two forwards; every token's log-probability is -token."""

    def __init__(self, output: list[int], evicts: int = 3, finish_reason: str = "length") -> None:
        self.asked: dict[str, Any] = {}
        self.ended = False
        self.now = 0.0
        self._output, self._evicts, self._finish_reason = output, evicts, finish_reason
        self._evicted = self._steps = 0
        self._says: list[int] = []

    def clock(self) -> float:
        return self.now

    def add_request(self, request_id: str, prompt: list[int], max_tokens: int, **options: Any) -> None:
        self.asked[request_id] = (prompt, max_tokens, options)
        self._steps = 0
        self._says = [*options["forced_tokens"], *self._output][:max_tokens]

    def has_unfinished(self) -> bool:
        return self._steps < 2 + len(self._says) - 1

    def step(self) -> list[Any]:
        self._steps += 1
        self.now += 10.0 if self._steps <= 2 else 1.0
        self._evicted += self._evicts if self._steps == 2 else 0
        if self._steps < 2:
            return []
        tokens = self._says[: self._steps - 1]
        progress = FakeProgress("r", tokens, not self.has_unfinished(), self._finish_reason)
        return [SimpleNamespace(**vars(progress), logprobs=[{token: -float(token)} for token in tokens])]

    def snapshot(self) -> FakeSnapshot:
        held = [0, 7, 3][min(self._steps, 2)]
        return FakeSnapshot(held, 0, running=1, waiting=0, tokens_evicted=self._evicted)

    def shutdown(self) -> None:
        self.ended = True


def test_a_needle_is_found_in_what_the_model_chose() -> None:
    engine = ScriptedEngine(list(b" 42"))
    assert ask(engine, NEEDLE, DECODE, engine.clock) == Answer(
        question_id="n",
        prompt_tokens=4,
        found=True,
        text=" 42",
        log_likelihood=None,
        scored_tokens=0,
        tokens_evicted=3,
        peak_blocks=7,
        prefill_s=20.0,
        decode_step_s=1.0,
    )
    assert engine.asked == {"n": ([5, 6, 7], 4, {"logprobs": 0, "forced_tokens": [8]})}
    assert ask(ScriptedEngine(list(b" 24")), NEEDLE, DECODE).found is False


def test_a_reference_is_scored_without_the_token_held_back() -> None:
    answer = ask(ScriptedEngine([]), DOCUMENT, DECODE)
    assert (answer.found, answer.text) == (None, None)
    assert (answer.log_likelihood, answer.scored_tokens) == (-(10 + 11) / 2, 2)


def test_what_breaks_off_while_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="question n ended early: error"):
        ask(ScriptedEngine([1, 2, 3], finish_reason="error"), NEEDLE, DECODE)
    stubborn = ScriptedEngine([1, 2, 3])
    monkeypatch.setattr(stubborn, "add_request", lambda *a, **k: vars(stubborn).update(_says=[1, 1, 1, 1]))
    with pytest.raises(RunError, match="question n did not get the tokens that were forced"):
        ask(stubborn, NEEDLE, DECODE)
    stuck = ScriptedEngine([1])
    monkeypatch.setattr(stuck, "step", list)
    monkeypatch.setattr(stuck, "snapshot", lambda: FakeSnapshot(0, 0, running=0, waiting=1))
    with pytest.raises(RunError, match="question n is never scheduled"):
        ask(stuck, NEEDLE, DECODE)


def run_events(
    monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine, spec: QualitySpec
) -> tuple[int, list[dict[str, Any]]]:
    import vtoken.vllm_plugin.engine as real

    monkeypatch.setattr(real, "make_engine", lambda model, config, **engine_args: engine)
    monkeypatch.setattr(quality_run, "load_tokenizer", lambda model: TOKENIZER)
    events: list[dict[str, Any]] = []
    code = quality_run.run(json.loads(json.dumps(spec.to_json())), lambda **event: events.append(event))
    assert engine.ended
    return code, events


def test_a_run_answers_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(list(b" 42"))
    code, events = run_events(monkeypatch, engine, QualitySpec("m", {}, VTokenConfig(), [NEEDLE, DOCUMENT]))
    assert (code, [event["event"] for event in events]) == (0, ["started", "answer", "answer"])
    assert [Answer(**event["answer"]).question_id for event in events[1:]] == ["n", "d"]
    assert list(engine.asked) == ["warm-up", "n", "d"]


def test_a_run_without_eviction_fails_unless_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    code, events = run_events(
        monkeypatch, ScriptedEngine([1, 2, 3], evicts=0), QualitySpec("m", {}, VTokenConfig(), [NEEDLE])
    )
    assert (code, events[-1]["message"]) == (1, "question n was answered without any eviction.")
    code, _ = run_events(monkeypatch, ScriptedEngine([1, 2, 3], evicts=0), QualitySpec("m", {}, None, [NEEDLE]))
    assert code == 0


# ---- Plan and runs -----------------------------------------------------------------------------------------


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A model that needs no files."""
    description = SimpleNamespace(
        max_position_embeddings=8192, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3, head_dim=64
    )
    description.hidden_size = 576
    monkeypatch.setattr(quality, "load_model_description", lambda model: (description, TOKENIZER))
    monkeypatch.setattr("vtoken.evaluation.plan.model_dtype", lambda: "float32")
    return description


def test_the_plan_holds_the_longest_question(described: SimpleNamespace, data: Path) -> None:
    plan = make_quality_plan(Path("m"), [VTokenConfig(budget=0.5)], Wishes(data=data))
    assert (plan.engine_args["num_gpu_blocks_override"], plan.engine_args["max_model_len"]) == (
        21,
        640,
    )  # of 624 tokens
    assert plan.engine_args["enforce_eager"] is True
    assert plan.engine_args["logits_processors"] == ["vtoken.vllm_plugin.forced_tokens:ForcedTokens"]
    assert plan.engine_args["logprobs_mode"] == "raw_logprobs"
    described.max_position_embeddings = 600
    with pytest.raises(ValueError, match="question n6 needs 624 tokens, but the context of m is 600; use a smaller"):
        make_quality_plan(Path("m"), [], Wishes(data=data))


@pytest.mark.usefixtures("described")
def test_a_budget_that_evicts_nothing_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match="a budget of 100 tokens keeps all 99 tokens of question n1"):
        make_quality_plan(Path("m"), [VTokenConfig(budget=100)], Wishes(data=data))
    make_quality_plan(Path("m"), [VTokenConfig(budget=99)], Wishes(data=data))


ANSWER = Answer("n", 100, True, " 42", None, 0, 10, 7, 2.0, 0.05)


def answers(*likelihoods: float, found: bool = True, evicted: int = 10) -> list[Answer]:
    """One needle, and a document per log-likelihood."""
    documents = [
        replace(ANSWER, question_id=f"d{i}", found=None, text=None, log_likelihood=value, scored_tokens=2)
        for i, value in enumerate(likelihoods)
    ]
    return [replace(answer, tokens_evicted=evicted) for answer in [replace(ANSWER, found=found), *documents]]


def make_quality_report() -> QualityReport:
    config = VTokenConfig(policy="h2o", budget=0.25)
    runs = [
        QualityRun(None, answers(-1.0, -2.0, -3.0, evicted=0), 60.0),
        QualityRun(config, answers(-1.5, -2.5, -4.5, found=False), 61.5),
    ]
    return QualityReport("m", {"seed": 0}, "questions from a test", runs)


def test_report_as_json() -> None:
    native, h2o = make_quality_report().to_json()["runs"]
    assert (native["policy"], native["budget"], native["vtoken_config"]) == ("none", None, None)
    assert (native["log_likelihood"], native["difference"], native["difference_interval"]) == (-2.0, None, None)
    assert (native["needles_found"], h2o["needles_found"], h2o["needles"], h2o["documents"]) == (1, 0, 1, 3)
    assert (h2o["tokens_evicted"], h2o["peak_blocks"], h2o["seconds"]) == (40, 7, 61.5)
    assert h2o["difference"] == pytest.approx(-2.5 / 3)
    assert h2o["log_likelihood"] == pytest.approx(-8.5 / 3)
    assert h2o["vtoken_config"]["policy"] == "h2o"
    assert [Answer(**answer) for answer in h2o["answers"]] == make_quality_report().runs[1].answers


def test_differences_are_paired_by_document() -> None:
    report = make_quality_report()
    run = report.runs[1]
    assert report.differences(run) == [-0.5, -0.5, -1.5]
    backwards = replace(run, answers=run.answers[::-1])
    assert sorted(report.differences(backwards)) == [-1.5, -0.5, -0.5]


def test_report_as_a_table() -> None:
    output = StringIO()
    report = make_quality_report()
    Console(file=output, width=TABLE_WIDTH).print(quality_table(report))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.getvalue().splitlines() if "│" in line]
    low, high = bootstrap_interval([-0.5, -0.5, -1.5])
    assert rows == [
        ["none", "all", "1 of 1", "-2.000", "", "", "0", "7", "2.0 s", "50 ms"],
        [
            *("h2o", "0.25", "0 of 1", "-2.833", "-0.833", f"{low:+.3f} to {high:+.3f}"),
            *("40", "7", "2.0 s", "50 ms"),
        ],
    ]
    assert summary(report, report.runs[1]) == (
        "h2o 0.25: 0 of 1 needles, -2.833 nats/token (-0.833), 40 tokens evicted, 62 s"
    )


def test_the_interval_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(3).normal(-0.4, 0.5, 12)
    expected = stats.bootstrap((values,), np.mean, method="percentile", random_state=0).confidence_interval
    assert bootstrap_interval(values.tolist()) == pytest.approx((expected.low, expected.high), abs=0.02)
    assert bootstrap_interval(values.tolist()) == bootstrap_interval(values.tolist())
    assert bootstrap_interval([-1.0] * 5) == (-1.0, -1.0)
    assert bootstrap_interval([-1.0]) is bootstrap_interval([]) is None


@pytest.fixture
def small_plan() -> QualityPlan:
    configs = [VTokenConfig(budget=budget) for budget in (0.25, 64)]
    return QualityPlan(Path("m"), {"block_size": 32}, configs, [NEEDLE, DOCUMENT], "questions from a test")


def test_every_setting_is_run_and_saved_after_native(monkeypatch: pytest.MonkeyPatch, small_plan: QualityPlan) -> None:
    specs: list[QualitySpec] = []

    def run(spec: QualitySpec, on_event: Any, command: Any) -> None:
        specs.append(spec)
        assert command == (sys.executable, "-m", "vtoken.evaluation.quality_run")
        on_event({"event": "started"})
        for name in "nd":
            on_event({"event": "answer", "answer": asdict(replace(ANSWER, question_id=name))})

    monkeypatch.setattr(quality, "run_child", run)
    saved: list[int] = []
    output = StringIO()
    report = run_quality(small_plan, Console(file=output), save=lambda report: saved.append(len(report.runs)))
    assert [spec.vtoken for spec in specs] == [run.config for run in report.runs] == [None, *small_plan.configs]
    assert saved == [1, 2, 3]
    assert "snapkv 64: 2 of 2 needles" in output.getvalue()


def test_a_run_that_breaks_off(monkeypatch: pytest.MonkeyPatch, small_plan: QualityPlan) -> None:
    def out_of_memory(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(quality, "run_child", out_of_memory)
    with pytest.raises(RuntimeError, match="the run of none broke off: out of memory"):
        run_quality(small_plan, Console(file=StringIO()))
    monkeypatch.setattr(quality, "run_child", lambda *arguments: None)
    with pytest.raises(RuntimeError, match="the run of none ended with 0 of 2 answers"):
        run_quality(small_plan, Console(file=StringIO()))


# ---- Real engines ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quality_on_real_engines(tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model with a real tokenizer: what native vLLM says is what a dense pass says."""
    pytest.importorskip("vllm")
    import oracle
    import torch
    from tiny_models import tiny_model

    model = tiny_model(tmp_path / "tiny", vocab=49152)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, model)
    folder = tmp_path / "data"
    folder.mkdir()
    story = "The rabbit looked at its watch, sighed, and went on down the path. " * 12
    needle = {"id": "n", "prompt": story, "answer_prefix": "The watch was", "answers": ["gold"]}
    documents = [
        {"id": f"d{i}", "prompt": story + f"{i}:", "references": ["the path and the rabbit"]} for i in range(2)
    ]
    (folder / "needle.jsonl").write_text(json.dumps(needle))
    (folder / "long.jsonl").write_text("\n".join(json.dumps(document) for document in documents))
    # As exact as the dense pass, also on a processor on which the default would be bfloat16.
    monkeypatch.setattr("vtoken.evaluation.plan.model_dtype", lambda: "float32")
    plan = make_quality_plan(model, [VTokenConfig(budget=0.3)], Wishes(data=folder))
    report = run_quality(plan, Console(file=StringIO()))
    native, evicted = report.runs
    assert native.tokens_evicted == 0
    reference = oracle.load_reference(model)
    for question in plan.questions[1:]:
        tokens = question.prompt_token_ids + question.forced
        with torch.inference_mode():
            logprobs = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        start = len(question.prompt_token_ids) + 1
        own = [logprobs[at - 1, tokens[at]].item() for at in range(start, len(tokens))]
        assert native.log_likelihoods[question.question_id] == pytest.approx(sum(own) / len(own), abs=1e-3)
        assert abs(evicted.log_likelihoods[question.question_id] - sum(own) / len(own)) > 1e-2
    for question, answer in zip(plan.questions, evicted.answers, strict=True):
        length = len(question.prompt_token_ids)
        kept = math.ceil(0.3 * length) - 1
        assert answer.tokens_evicted == length - kept + question.max_tokens - 1
    assert evicted.peak_blocks < native.peak_blocks

"""``vtoken bench`` from the command line to the files, with experiments that need no engine."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer
from typer.testing import CliRunner, Result

from vtoken import cli, cli_bench
from vtoken.evaluation import questions
from vtoken.evaluation.bench import catalogue, session
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import Bench
from vtoken.evaluation.bench.engines import EnginePool, EngineSpec
from vtoken.evaluation.bench.figures import new_figure
from vtoken.evaluation.bench.report import Report, setting, setting_line
from vtoken.evaluation.bench.tables import Column, Table

FILES = ["one.json", "one.md", "one.png", "one.svg", "report.html"]
TOLD = "vtoken: something that must hold did not; see the lines marked FAILED above.\n"


class Stub(Experiment):
    """Its runs are values; what is above 9 must not be, and above 5 is an aim missed."""

    question = "How much?"

    def __init__(self, name: str, measure: Callable[[Bench], list[Any]]) -> None:
        self.name, self._measure = name, measure  # type: ignore[misc]

    def measure(self, bench: Bench) -> list[Run]:
        return [{"value": value} for value in self._measure(bench)]

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        return [
            Table("Values", [Column("value"), Column("half", 1)], [(run["value"], run["value"] / 2) for run in runs])
        ]

    def figure(self, runs: Sequence[Run]) -> Any:
        figure, axis = new_figure()
        axis.plot([run["value"] for run in runs])
        return figure

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        most = max(run["value"] for run in runs)
        return [
            Check("most", "at most 9", str(most), most <= 9),
            Check("most", "5", str(most), most <= 5, "aim", "why"),
        ]


def given(values: list[Any], bench: Bench) -> list[Any]:
    return values


class Engine:
    def ready(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model that nobody looks at, and no data directory."""
    text_config = SimpleNamespace(max_position_embeddings=4096)
    monkeypatch.setattr(session, "load_model_description", lambda model: (text_config, ByteTokenizer()))
    monkeypatch.setattr(session, "EnginePool", lambda: EnginePool(lambda spec, settle: Engine()))  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(cli, "own_model", lambda: Path("/models/small"))
    monkeypatch.delenv(questions.DATA_VARIABLE, raising=False)
    monkeypatch.setattr(questions, "BESIDE_THE_CHECKOUT", tmp_path / "nowhere")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts experiments with these values, or functions that return them, in the place of all others."""

    def put(**measured: Any) -> None:
        experiments = {
            name: Stub(name, values if callable(values) else partial(given, values))
            for name, values in measured.items()
        }
        monkeypatch.setattr(
            catalogue,
            "load_experiments",
            lambda name: list(experiments.values()) if name == "all" else [experiments[name]],
        )

    return put


def invoke(out: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(cli.app, ["bench", *arguments, "--out", str(out)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(out: Path, *arguments: str) -> str:
    result = invoke(out, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


def content(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def refuse(bench: Bench) -> list[Any]:
    raise ValueError("vtoken: none of [bold] fits; use another.")


def test_what_is_written(tmp_path: Path, stub: Callable[..., None]) -> None:
    stub(one=[3, 5])
    result = invoke(tmp_path / "new" / "out", "one", "--quick")
    assert (result.exit_code, result.stderr) == (0, "")
    assert names(tmp_path / "new" / "out") == FILES
    written = content(tmp_path / "new" / "out" / "one.json")
    assert list(written) == ["name", "runs", "setting", "question", "tables", "checks"]
    assert written["name"] == "one"
    assert written["runs"] == [{"value": 3}, {"value": 5}]
    assert written["question"] == "How much?"
    assert written["tables"] == [
        {"title": "Values", "columns": ["value", "half"], "rows": [[3, 1.5], [5, 2.5]], "note": ""}
    ]
    assert [check["held"] for check in written["checks"]] == [True, True]
    about = written["setting"]
    assert (about["model"], about["quick"], about["prompts"], about["compiled"]) == (
        "small",
        True,
        "prompts about Python's own library",
        False,
    )
    shown = (tmp_path / "new" / "out" / "one.md").read_text()
    assert shown.startswith("How much?\n\n**Values**\n\n| value | half |\n|---:|---:|\n| 3 | 1.5 |\n| 5 | 2.5 |\n")
    assert "written: " in result.stdout
    assert "one: 0 s, 0 engines started" in result.stdout


@pytest.mark.parametrize(("value", "code", "line"), [(5, 0, "held"), (9, 0, "missed"), (10, 1, "FAILED")])
def test_what_must_hold_decides_the_exit_code(
    tmp_path: Path, stub: Callable[..., None], value: int, code: int, line: str
) -> None:
    stub(one=[value])
    for again in ([], ["--again"]):
        result = invoke(tmp_path, "one", *again)
        assert (result.exit_code, result.stderr) == (code, TOLD if code else "")
        assert line in result.stdout
        assert ("FAILED" in result.stdout) == (code == 1)


def test_one_failure_among_several_counts(tmp_path: Path, stub: Callable[..., None]) -> None:
    stub(one=[10], two=[1])
    assert invoke(tmp_path, "all").exit_code == 1
    assert invoke(tmp_path, "all", "--again").exit_code == 1
    assert invoke(tmp_path, "two", "--again").exit_code == 0


def test_again_shows_what_lies_there(tmp_path: Path, stub: Callable[..., None]) -> None:
    stub(one=[3])
    invoke(tmp_path, "one")
    before = content(tmp_path / "one.json")
    (tmp_path / "one.json").write_text(json.dumps({**before, "runs": [{"value": 4}], "tables": []}))
    for name in FILES[1:]:
        (tmp_path / name).unlink()
    stub(one=refuse)
    result = invoke(tmp_path, "one", "--again")
    assert (result.exit_code, result.stderr) == (0, "")
    assert names(tmp_path) == FILES
    after = content(tmp_path / "one.json")
    assert after["setting"] == before["setting"]
    assert after["tables"][0]["rows"] == [[4, 2.0]]
    assert "| 4 | 2.0 |" in (tmp_path / "one.md").read_text()


def test_raw_runs_are_kept_where_tables_cannot_be_made(tmp_path: Path, stub: Callable[..., None]) -> None:
    stub(one=[3, None])
    with pytest.raises(TypeError):
        invoke(tmp_path, "one")
    assert names(tmp_path) == ["one.json"]
    written = content(tmp_path / "one.json")
    assert list(written) == ["name", "runs", "setting"]
    assert written["runs"] == [{"value": 3}, {"value": None}]
    assert written["setting"]["model"] == "small"


def test_a_refusal_of_one_among_several_is_told_and_the_others_run(tmp_path: Path, stub: Callable[..., None]) -> None:
    stub(one=refuse, two=[1], three=refuse, four=[2])
    result = invoke(tmp_path, "all", "--quick")
    assert (result.exit_code, result.stderr) == (1, TOLD)
    told = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert told == [
        "FAILED one: none of [bold] fits; use another.",
        "FAILED three: none of [bold] fits; use another.",
    ]
    assert [name for name in names(tmp_path) if name.endswith(".json")] == ["four.json", "two.json"]


def test_a_refusal_of_the_only_one_is_refused(tmp_path: Path, stub: Callable[..., None]) -> None:
    stub(one=refuse)
    assert refused(tmp_path, "one") == "vtoken: none of [bold] fits; use another."
    assert names(tmp_path) == []


def test_a_run_that_breaks_off_ends_all_and_keeps_what_was_measured(tmp_path: Path, stub: Callable[..., None]) -> None:
    def broken(bench: Bench) -> list[Any]:
        raise RuntimeError("an engine ended")

    stub(one=[1], two=broken, three=[1])
    result = invoke(tmp_path, "all")
    assert (result.exit_code, result.stderr) == (1, "vtoken: an engine ended\n")
    assert names(tmp_path) == FILES[:-1]  # the page comes at the end


def test_a_file_without_a_fitting_prompt_stops_only_those_that_need_one(
    tmp_path: Path, stub: Callable[..., None]
) -> None:
    (tmp_path / "my.jsonl").write_text('{"prompt": "hello"}\n')
    stub(
        one=lambda bench: [len(bench.requests.chat(1, 20, 10))],
        two=lambda bench: [len(bench.requests.exactly(2, 10))],
    )
    result = invoke(tmp_path, "all", "--workload", str(tmp_path / "my.jsonl"))
    assert result.exit_code == 1
    assert "FAILED one: none of the 1 prompts from my.jsonl has 10 to 20 tokens, as this experiment " in result.stdout
    assert content(tmp_path / "two.json")["setting"]["prompts"] == "prompts from my.jsonl"


def test_each_experiment_says_what_it_was_handed(tmp_path: Path, stub: Callable[..., None]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chat.jsonl").write_text('{"id": "a", "prompt": "hello"}\n')
    stub(
        one=lambda bench: [len(bench.requests.exactly(2, 10))],
        two=lambda bench: [len(bench.requests.chat(2, 10))],
        three=lambda bench: [len(bench.requests.chat(2, 10) + bench.requests.exactly(2, 10))],
    )
    assert invoke(tmp_path, "all", "--data", str(tmp_path / "data")).exit_code == 0
    assert {name: content(tmp_path / f"{name}.json")["setting"]["prompts"] for name in ("one", "two", "three")} == {
        "one": "prompts about Python's own library",
        "two": "prompts from the data directory",
        "three": "prompts from the data directory and about Python's own library",
    }


def test_a_wrong_data_directory_is_refused_at_once(tmp_path: Path, stub: Callable[..., None]) -> None:
    ran: list[Bench] = []
    stub(one=ran.append, two=ran.append)
    sentence = "vtoken: --data = /no/such is no directory; name the one that holds needle.jsonl and long.jsonl."
    assert refused(tmp_path, "all", "--data", "/no/such") == sentence
    wishes = session.Wishes(Path("/models/small"), tmp_path, data=Path("/no/such"))
    with pytest.raises(ValueError, match=r"^--data = /no/such is no directory"):
        session.measure_all(catalogue.load_experiments("all"), wishes, session.Console(quiet=True))
    assert ran == []


def test_the_data_directory_of_the_environment_is_looked_at(
    tmp_path: Path, stub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(questions.DATA_VARIABLE, "/no/such")
    stub(one=[1])
    monkeypatch.setattr(cli, "own_model", lambda: pytest.fail("the model is fetched first"))
    assert refused(tmp_path, "one").startswith("vtoken: VTOKEN_DATA = /no/such is no directory; name ")


def test_a_folder_that_cannot_be_written(tmp_path: Path, stub: Callable[..., None]) -> None:
    ran: list[Bench] = []
    stub(one=ran.append)
    (tmp_path / "file").touch()
    for again in ([], ["--again"]):
        sentence = refused(tmp_path / "file" / "out", "one", *again)
        start = (
            f"vtoken: --out {tmp_path / 'file' / 'out'} cannot be written (Not a directory); give another directory."
        )
        assert sentence == start
    assert ran == []


def test_libraries_are_asked_for_before_anything_else(
    tmp_path: Path, stub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(one=[1])
    invoke(tmp_path, "one")
    missing = {"matplotlib", "scipy", "rouge_score"}
    monkeypatch.setattr(cli_bench, "find_spec", lambda name: None if name in missing else SimpleNamespace())
    remedy = "; run: pip install 'vtoken[bench]'"
    assert refused(tmp_path, "one", "--again") == f"vtoken: vtoken bench needs matplotlib and scipy{remedy}"
    assert refused(tmp_path, "one") == f"vtoken: vtoken bench needs matplotlib and scipy and rouge_score{remedy}"
    missing -= {"matplotlib", "scipy"}
    assert invoke(tmp_path, "one", "--again").exit_code == 0


@pytest.mark.parametrize(
    ("damage", "rest"),
    [
        (
            '{"name": ',
            "is no result of vtoken bench (Expecting value: line 1 column 10 (char 9))",
        ),
        ("[]", "is no result of vtoken bench (list indices must be integers or slices, not str)"),
        ('{"name": "one", "runs": [{"value": 1}]}', "is no result of vtoken bench ('setting')"),
        ({"runs": []}, "holds no runs"),
        ({"runs": {}}, "holds no runs"),
        ({"runs": {"value": 1}}, "holds no runs"),
        ({"runs": [{}]}, "is damaged or of another version (KeyError: 'value')"),
        (
            {"runs": [1]},
            "is damaged or of another version (TypeError: 'int' object is not subscriptable)",
        ),
        (
            {"runs": [{"value": None}]},
            "is damaged or of another version (TypeError: unsupported operand type(s) for /: 'NoneType' and 'int')",
        ),
        ({"setting": {}}, "is damaged or of another version (KeyError: 'quick')"),
    ],
)
def test_damaged_results_are_one_sentence(
    tmp_path: Path, stub: Callable[..., None], damage: str | dict[str, Any], rest: str
) -> None:
    stub(one=[3])
    invoke(tmp_path, "one")
    path = tmp_path / "one.json"
    path.write_text(damage if isinstance(damage, str) else json.dumps({**content(path), **damage}))
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    assert refused(tmp_path, "one", "--again") == f"vtoken: {path} {rest}; measure it again."
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_results_that_are_missing_or_of_another_experiment(tmp_path: Path, stub: Callable[..., None]) -> None:
    stub(one=[3], two=[4])
    path = tmp_path / "one.json"
    assert refused(tmp_path, "one", "--again") == (
        f"vtoken: {path} is no result of vtoken bench (No such file or directory); measure it again."
    )
    invoke(tmp_path, "two")
    (tmp_path / "two.json").rename(path)
    assert refused(tmp_path, "one", "--again") == (
        f"vtoken: {path} holds results of 'two'; rename it, or measure one again."
    )


@pytest.mark.parametrize(("eager", "compiled"), [((True, True), False), ((True, False), True), ((False,), True)])
def test_whether_anything_was_compiled_is_of_each_experiment(
    tmp_path: Path, stub: Callable[..., None], eager: tuple[bool, ...], compiled: bool
) -> None:
    def start(bench: Bench, *kinds: bool) -> list[Any]:
        for copy, kind in enumerate(kinds):
            bench.engines.get(EngineSpec("m", None, {"enforce_eager": kind}, copy))
        return [1]

    stub(zero=lambda bench: start(bench, False, True), one=lambda bench: start(bench, *eager))
    result = invoke(tmp_path, "all")
    assert content(tmp_path / "zero.json")["setting"]["compiled"] is True
    assert content(tmp_path / "one.json")["setting"]["compiled"] is compiled
    assert (", vLLM's compilation off, " in (tmp_path / "one.md").read_text()) is not compiled
    assert f"one: 0 s, {len(eager)} engines started" in result.stdout


def test_engines_of_one_experiment_end_with_it_but_for_the_quick_form(
    tmp_path: Path, stub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def refuse_late(bench: Bench) -> list[Any]:
        bench.engines.get(EngineSpec("m", None, {}))
        return refuse(bench)

    def look(bench: Bench) -> list[Any]:
        closed.append("two")
        return [1]

    monkeypatch.setattr(Engine, "close", lambda engine: closed.append("closed"))
    stub(one=refuse_late, two=look)
    invoke(tmp_path, "all")
    invoke(tmp_path, "all", "--quick")
    assert closed == ["closed", "two", "two", "closed"]


def test_the_setting_as_a_sentence() -> None:
    about = setting("m", "float32", False, 90.0, "prompts from x", eager=True)
    about |= {"vllm": "1.2", "torch": "2.3", "cores": 4, "processor": "Chip"}
    line = "m in float32, prompts from x; vLLM 1.2, torch 2.3{}, 4 cores of Chip; 1.5 minutes{}."
    quick = ", quick form: sizes too small to say what anything is worth"
    assert setting_line(about) == line.format(", vLLM's compilation off", "")
    assert setting_line({**about, "compiled": True, "quick": True}) == line.format("", quick)
    del about["compiled"]
    assert setting_line(about) == line.format("", "")


def test_an_old_result_stays_where_writing_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("one", [{"value": 1}], {})
    report.keep(tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Report("one", [{"value": 2}], {}).keep(tmp_path)
    assert content(tmp_path / "one.json")["runs"] == [{"value": 1}]

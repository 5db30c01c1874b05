"""Where the prompts of experiments come from, and what is said of that."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer

from vtoken.evaluation import questions
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.workloads import Workload, passages

TOKENIZER = ByteTokenizer()
LIBRARY = "prompts about Python's own library"


def texts(works: list[Workload]) -> list[str]:
    return [TOKENIZER.decode(work.prompt_token_ids) for work in works]


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with two prompts in each file, and 28 tokens of text."""
    directory = tmp_path / "data"
    (directory / "text").mkdir(parents=True)
    write_lines(directory / "chat.jsonl", {"id": "a", "prompt": "hello"}, {"id": "b", "prompt": "good day"})
    write_lines(
        directory / "long.jsonl",
        {"id": "s", "kind": "summary", "prompt": "sum it up"},
        {"id": "q", "kind": "multi-document QA", "prompt": "answer it"},
    )
    (directory / "text" / "b.txt").write_text("opqrstuvwxyz!?")
    (directory / "text" / "a.txt").write_text("abcdefghijklmn")
    return directory


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(questions.DATA_VARIABLE, raising=False)
    monkeypatch.setattr(questions, "BESIDE_THE_CHECKOUT", tmp_path / "nowhere")


def from_file(tmp_path: Path, *prompts: str, data: Path | None = None) -> BenchRequests:
    path = write_lines(tmp_path / "my.jsonl", *({"prompt": prompt} for prompt in prompts))
    return BenchRequests(TOKENIZER, 4096, path, data)


def test_prompts_of_an_exact_length_are_cut_out_of_the_users_file(tmp_path: Path, data: Path) -> None:
    requests = from_file(tmp_path, "abcdef", "ghijkl", data=data)
    works = requests.exactly(3, 5, max_tokens=7)
    assert texts(works) == ["abcde", "efghi", "ijkla"]
    assert [(work.request_id, work.max_tokens) for work in works] == [("text-0", 7), ("text-1", 7), ("text-2", 7)]
    assert requests.source == "prompts from my.jsonl"
    assert requests.exactly(3, 5, max_tokens=7) == works


def test_a_short_file_comes_round_again(tmp_path: Path) -> None:
    requests = from_file(tmp_path, "abc", "d")
    assert texts(requests.exactly(4, 10)) == ["abcdabcdab", "bcdabcdabc", "cdabcdabcd", "dabcdabcda"]
    assert texts(requests.exactly(2, 8)) == ["abcdabcd", "cdabcdab"]
    assert texts(requests.exactly(6, 3)) == ["abc", "bcd", "cda", "dab", "abc", "bcd"]


@pytest.mark.parametrize(("count", "tokens"), [(1, 1), (5, 1), (3, 7), (7, 7), (4, 8), (6, 29)])
def test_prompts_differ_where_there_is_text_enough(tmp_path: Path, count: int, tokens: int) -> None:
    cut = texts(from_file(tmp_path, "abcd", "efg").exactly(count, tokens))
    assert [len(text) for text in cut] == [tokens] * count
    assert len(set(cut)) == count
    assert all(text in "abcdefg" * 6 for text in cut)


def test_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 5}\n')
    with pytest.raises(ValueError, match=r"my\.jsonl, line 2: 'prompt' must be a text that is not empty\.$"):
        BenchRequests(TOKENIZER, 4096, path).exactly(1, 4)


def test_prompts_of_an_exact_length_are_cut_out_of_the_data_directory(data: Path) -> None:
    requests = BenchRequests(TOKENIZER, 4096, data=data)
    assert requests.source == "prompts from the data directory"
    assert texts(requests.exactly(3, 10)) == ["abcdefghij", "ghijklmnop", "mnopqrstuv"]
    assert texts(requests.chat(2, 100)) == ["hello", "good day"]
    assert requests.source == "prompts from the data directory"


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_without_text_enough_is_not_named(data: Path, there: bool) -> None:
    if not there:
        for path in (data / "text").iterdir():
            path.unlink()
    requests = BenchRequests(TOKENIZER, 4096, data=data)
    works = requests.exactly(2, 40)
    wanted = passages(TOKENIZER, 40)
    assert [work.prompt_token_ids for work in works] == [next(wanted)[2] for _ in range(2)]
    assert requests.source == LIBRARY
    requests.chat(1, 100)
    requests.exactly(2, 40)
    assert requests.source == "prompts about Python's own library and from the data directory"


def test_without_data_or_file_the_library_is_named(no_data: None) -> None:
    requests = BenchRequests(TOKENIZER, 4096)
    assert requests.source == LIBRARY
    works = requests.exactly(2, 40)
    assert [work.request_id for work in works] == ["argparse-0", "ast-0"]
    assert [len(work.prompt_token_ids) for work in works] == [40, 40]
    requests.chat(1, 64)
    assert requests.source == LIBRARY


def test_a_file_takes_the_place_of_chat_and_long_prompts(tmp_path: Path, data: Path) -> None:
    requests = from_file(tmp_path, "abcdef", "ghi", data=data)
    assert texts(requests.chat(3, 100)) == ["abcdef", "ghi", "abcdef"]
    assert texts(requests.long(1, 100, "summary", shortest=4)) == ["abcdef"]
    assert requests.source == "prompts from my.jsonl"
    with pytest.raises(ValueError, match=r"^none of the 2 prompts from my\.jsonl has 7 to 9 tokens, as this exp"):
        requests.chat(1, 9, 7)


def test_kinds_of_long_prompts(data: Path) -> None:
    requests = BenchRequests(TOKENIZER, 4096, data=data)
    assert [work.request_id for work in requests.long(2, 100)] == ["0-s", "1-q"]
    assert [work.request_id for work in requests.long(1, 100, "multi-document QA")] == ["0-q"]
    with pytest.raises(ValueError, match=r"^none of the 1 prompts from the data directory has 1 to 3 tokens"):
        requests.long(1, 3, "summary")


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    requests = BenchRequests(TOKENIZER, 4096, data=tmp_path / "no")
    for ask in (lambda: requests.source, lambda: requests.chat(1, 9), lambda: requests.exactly(1, 9)):
        with pytest.raises(ValueError, match=r"^--data = .*/no is no directory; name the one that holds "):
            ask()


ASKS: dict[str, Callable[[BenchRequests], object]] = {
    "chat.jsonl": lambda requests: requests.chat(1, 100),
    "long.jsonl": lambda requests: requests.long(1, 100),
    "text/a.txt": lambda requests: requests.exactly(1, 4),
    "text/b.txt": lambda requests: requests.quality_questions(quick=True),
}


@pytest.mark.parametrize("name", ["chat.jsonl", "long.jsonl"])
def test_a_file_that_is_missing(data: Path, name: str) -> None:
    (data / name).unlink()
    with pytest.raises(ValueError) as refused:
        ASKS[name](BenchRequests(TOKENIZER, 4096, data=data))
    sentence = f"{data / name} cannot be read (No such file or directory); give --data another directory."
    assert str(refused.value) == sentence


@pytest.mark.parametrize("name", ASKS)
def test_a_file_that_is_no_text(data: Path, name: str) -> None:
    (data / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError) as refused:
        ASKS[name](BenchRequests(TOKENIZER, 4096, data=data))
    assert str(refused.value) == (
        f"{data / name} cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); "
        "give --data another directory."
    )


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        ('{"id": "c"', " is damaged (Expecting ',' delimiter: line 1 column 11 (char 10)); mend it or remove it."),
        ('{"prompt": "c"}', ": must be a JSON object with an 'id'; add one."),
        ("7", ": must be a JSON object with an 'id'; add one."),
        ('{"id": "c"}', ": must have either 'prompt' or 'messages'; add one of them and not both."),
        ('{"id": "c", "prompt": ""}', ": 'prompt' must be a text that is not empty."),
    ],
)
@pytest.mark.parametrize("name", ["chat.jsonl", "long.jsonl"])
def test_a_damaged_line_is_named(data: Path, name: str, line: str, rest: str) -> None:
    (data / name).write_text('{"id": "a", "prompt": "hello"}\n' + line + "\n")
    with pytest.raises(ValueError) as refused:
        ASKS[name](BenchRequests(TOKENIZER, 4096, data=data))
    assert str(refused.value) == f"{data / name}, line 2{rest}"


def test_quality_needs_passages(data: Path) -> None:
    requests = BenchRequests(TOKENIZER, 4096, data=data)
    with pytest.raises(ValueError) as refused:
        requests.quality_questions(quick=True)
    sentence = f"{data / 'text'} has no *.txt of more than 576 tokens, which quality is measured on; put longer texts"
    assert str(refused.value) == f"{sentence} there."
    for name in "ab":
        (data / "text" / f"{name}.txt").write_text("x" * 577)
    asked = requests.quality_questions(quick=False)
    assert [question.question_id for question in asked[6:]] == ["a-0", "a-1", "b-0", "b-1"]
    assert requests.source == "prompts from the data directory"

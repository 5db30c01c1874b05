"""The demo's own requests, needles, and prompt files."""

from pathlib import Path

import pytest
from byte_tokenizer import ByteTokenizer

from vtoken.evaluation.prompt_file import read_prompt_file
from vtoken.evaluation.workloads import (
    DEMO_PROMPT_TOKENS,
    MODULES,
    NEEDLE_DEPTHS,
    Workload,
    _source,
    explain_requests,
    load_tokenizer,
    needle_length,
    needle_requests,
)

TOKENIZER = ByteTokenizer()


def text(work: Workload) -> str:
    return TOKENIZER.decode(work.prompt_token_ids)


def test_demo_requests_have_exact_lengths_and_different_text() -> None:
    works = explain_requests(TOKENIZER)
    assert len(works) == 32
    assert [len(work.prompt_token_ids) for work in works[:4]] == [1536, 1573, 1610, 1647]
    assert all(len(work.prompt_token_ids) in DEMO_PROMPT_TOKENS for work in works)
    assert all(work.max_tokens == 256 and work.answers is None for work in works)
    assert len({work.request_id for work in works}) == len({text(work) for work in works}) == 32
    assert len({len(work.prompt_token_ids) % 32 for work in works}) >= 24


def test_demo_requests_keep_the_chat_template_whole() -> None:
    for work in explain_requests(TOKENIZER, count=3):
        assert text(work).startswith("<user>Here is the beginning of the source code")
        assert text(work).endswith("how they work together.</><assistant>")
    assert "`argparse`" in text(explain_requests(TOKENIZER, count=1)[0])


def test_demo_requests_are_deterministic_and_go_on_after_the_last_module() -> None:
    count = len(MODULES.split()) + 5
    works = explain_requests(TOKENIZER, count, max_tokens=7)
    assert works == explain_requests(TOKENIZER, count, max_tokens=7)
    assert works[-1].request_id == "cmd-1"
    assert works[-1].max_tokens == 7
    assert len({text(work) for work in works}) == count


def test_every_module_exists_in_this_python_with_enough_text() -> None:
    # A token of source text is about three characters.
    assert {name: len(_source(name)) for name in MODULES.split() if len(_source(name)) < 3 * 1664} == {}


def test_missing_source_is_no_text() -> None:
    assert _source("no_such_module_anywhere") == ""
    assert _source("sys") == ""


def test_needles_lie_at_their_depths() -> None:
    works = needle_requests(TOKENIZER, 1000)
    assert len(works) == len(NEEDLE_DEPTHS) == 6
    places = []
    for work in works:
        (answer,) = work.answers or []
        assert len(work.prompt_token_ids) == 1000
        assert text(work).count(answer) == 1
        assert text(work).endswith("mentioned in the provided text is")
        places.append(text(work).index(answer) / 1000)
    assert places == sorted(places)
    assert places[0] < 0.3
    assert places[-1] > 0.7
    assert works == needle_requests(TOKENIZER, 1000)
    assert len({work.answers[0] for work in works if work.answers}) == 6


def test_needle_length_follows_the_load_within_bounds() -> None:
    assert [needle_length([Workload("r", [0] * n, 1)]) for n in (10, 700, 9000)] == [512, 700, 1536]


def test_needle_prompt_too_short_for_its_question() -> None:
    with pytest.raises(ValueError, match="too short for its question"):
        needle_requests(TOKENIZER, 40)


def read(tmp_path: Path, content: str, **options: int) -> list[Workload]:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    settings = {"context": 100, "max_tokens": 10, **options}
    return read_prompt_file(path, TOKENIZER, **settings)


def test_prompt_file(tmp_path: Path) -> None:
    works = read(
        tmp_path,
        '{"prompt": "abc"}\n\n  \n{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "id": 7}\n',
    )
    assert works == [
        Workload("line-1", list(b"abc"), 10),
        Workload("line-4", list(b"<user>hi</><assistant>"), 3),
    ]


def test_prompt_file_limit(tmp_path: Path) -> None:
    assert [work.request_id for work in read(tmp_path, '{"prompt": "a"}\n' * 3, limit=2)] == ["line-1", "line-2"]


def test_messages_without_a_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", None, raising=False)
    (work,) = read(tmp_path, '{"messages": [{"role": "user", "content": "hi"}]}')
    assert text(work) == "hi\n\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not valid JSON"),
        ("[1]", "line 1: must be a JSON object"),
        ('\n{"text": "a"}', "line 2: must have either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "line 1: must have either"),
        ('{"prompt": 3}', "line 1: 'prompt' must be a text"),
        ('{"prompt": ""}', "line 1: 'prompt' must be a text that is not empty"),
        ('{"messages": []}', "line 1: 'messages' must be a list"),
        ('{"messages": "hi"}', "line 1: 'messages' must be a list"),
        ('{"messages": ["hi"]}', "line 1: 'messages' must be a list"),
        ('{"messages": [{"role": "user"}]}', "line 1: 'messages' must be a list"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "line 1: the model's chat template refuses"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: 'max_tokens' is 0"),
        ('{"prompt": "a", "max_tokens": true}', "line 1: 'max_tokens' is True"),
        ('{"prompt": "a", "max_tokens": "9"}', "line 1: 'max_tokens' is '9'"),
        ('{"prompt": "' + "a" * 91 + '"}', "line 1: 91 prompt tokens and 10 output tokens exceed .* 100 tokens"),
        ("\n \n", "holds no request"),
        ("", "holds no request"),
    ],
)
def test_prompt_file_errors(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, content)
    assert "prompts.jsonl" in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_prompt_file_missing_or_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_prompt_file(tmp_path / "absent.jsonl", TOKENIZER, 100, 10)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read as UTF-8"):
        read_prompt_file(tmp_path / "binary.jsonl", TOKENIZER, 100, 10)


@pytest.mark.slow
def test_demo_requests_with_the_real_tokenizer(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    works = explain_requests(tokenizer)
    assert [len(work.prompt_token_ids) for work in works[:4]] == [1536, 1573, 1610, 1647]
    start = tokenizer.decode(works[0].prompt_token_ids)[:200]
    assert start.count("<|im_start|>system\n") == 1
    assert [len(work.prompt_token_ids) for work in needle_requests(tokenizer, 1536)] == [1536] * 6

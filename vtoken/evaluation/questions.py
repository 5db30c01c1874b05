"""What the quality measurement asks: hidden numbers to find, and texts whose continuation should stay likely."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vtoken.evaluation.workloads import NEEDLE_OUTPUT_TOKENS, NEEDLE_PROMPT_TOKENS, encode, needle_requests, passages

DATA_VARIABLE = "VTOKEN_DATA"
BESIDE_THE_CHECKOUT = Path(__file__).resolve().parents[3] / "shared" / "data"
NEEDLE_FILE = "needle.jsonl"
DOCUMENT_FILE = "long.jsonl"
LIBRARY_DOCUMENTS = 8
CONTINUATION_TOKENS = 64
PASSAGE_TOKENS = 1024

Item = TypeVar("Item")


@dataclass(frozen=True)
class Question:
    """One request: a needle (``answers`` is set) or a document with a reference.

    The last token of the prompt is held back, and comes first among the forced ones. What a prompt's own forward says
    about the next token still rests on the whole prompt; with one token held back, everything that counts is said by
    a forward after the reduction.

    Attributes:
        question_id: unique among the questions.
        prompt_token_ids: the prompt without its last token.
        forced: output tokens that are given: the one held back, and a document's reference.
        free: output tokens that the model chooses after them, greedily.
        answers: texts of which one should appear in what the model chooses.
    """

    question_id: str
    prompt_token_ids: list[int]
    forced: list[int]
    free: int = 0
    answers: list[str] | None = None

    @property
    def max_tokens(self) -> int:
        return len(self.forced) + self.free

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True)
class Wishes:
    """How many questions of each kind (None: all there are), on prompts of at most so many tokens, from which data."""

    needles: int | None = None
    documents: int | None = None
    passages: int = 6
    max_prompt: int = 2500
    data: Path | None = None


def load_questions(tokenizer: Any, wishes: Wishes) -> tuple[list[Question], str]:
    """The questions and a note that says where they come from.

    They come from ``needle.jsonl``, ``long.jsonl`` and ``text/*.txt`` in the data directory (see ``data_directory``),
    and without one from the text of Python's own library.

    Raises:
        ValueError: one sentence, for data that is missing or damaged, or has no prompt that is short enough.
    """
    if wishes.needles == wishes.documents == wishes.passages == 0:
        raise ValueError("--needles 0, --documents 0 and --passages 0 leave nothing to ask; raise one of them.")
    directory = data_directory(wishes.data)
    if directory is None:
        return library_questions(tokenizer, wishes), "questions from the text of Python's library"
    needles = _from_file(directory / NEEDLE_FILE, _needle, tokenizer, wishes.needles, wishes.max_prompt)
    documents = _from_file(directory / DOCUMENT_FILE, _document, tokenizer, wishes.documents, wishes.max_prompt)
    texts = _from_texts(directory / "text", tokenizer, wishes.passages, min(wishes.max_prompt, PASSAGE_TOKENS))
    return needles + documents + texts, f"questions from {directory}"


def data_directory(given: Path | None = None) -> Path | None:
    """``given``, else VTOKEN_DATA, else ``shared/data`` beside the checkout where there is one.

    Raises:
        ValueError: one sentence, where the one that was asked for does not exist.
    """
    named = os.environ.get(DATA_VARIABLE)
    if given is None and not named:
        return BESIDE_THE_CHECKOUT if BESIDE_THE_CHECKOUT.is_dir() else None
    directory = given if given is not None else Path(str(named))
    if not directory.is_dir():
        source = "--data" if given is not None else DATA_VARIABLE
        raise ValueError(
            f"{source} = {directory} is no directory; name the one that holds {NEEDLE_FILE} and {DOCUMENT_FILE}."
        )
    return directory


def read_data(path: Path) -> str:
    """A file's text. Raises ValueError, in one sentence, where it is missing or no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read ({reason}); give --data another directory.") from None


def damaged(path: Path, line: int, error: Exception) -> ValueError:
    """What to raise for a line that cannot be used."""
    return ValueError(f"{path}, line {line} is damaged ({error}); mend it or remove it.")


def spread(items: Sequence[Item], count: int | None) -> list[Item]:
    """``count`` of the items, evenly over all of them, in their order; all of them where there are not so many."""
    count = len(items) if count is None else min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _from_file(
    path: Path,
    make: Callable[[dict[str, Any], Any], Question | None],
    tokenizer: Any,
    count: int | None,
    max_prompt: int,
) -> list[Question]:
    if count == 0:
        return []
    questions = []
    for number, line in enumerate(read_data(path).splitlines(), start=1):
        try:
            question = make(json.loads(line), tokenizer)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise damaged(path, number, error) from None
        if question is not None:
            questions.append(question)
    short = [question for question in questions if len(question.prompt_token_ids) < max_prompt]
    if not short:
        raise ValueError(f"--max-prompt {max_prompt} leaves none of the {len(questions)} prompts in {path}; raise it.")
    return spread(short, count)


def _from_texts(directory: Path, tokenizer: Any, count: int, length: int) -> list[Question]:
    """``count`` passages of ``length`` tokens, evenly over all plain texts; what follows each one is scored."""
    paths = sorted(directory.glob("*.txt"))
    questions = []
    for number, path in enumerate(paths):
        tokens = encode(tokenizer, read_data(path))
        share = (number + 1) * count // len(paths) - number * count // len(paths)
        room = len(tokens) - length - CONTINUATION_TOKENS
        for part in range(share if room > 0 else 0):
            text = tokens[part * room // share :][: length + CONTINUATION_TOKENS]
            questions.append(Question(f"{path.stem}-{part}", text[: length - 1], text[length - 1 :]))
    return questions


def _needle(record: dict[str, Any], tokenizer: Any) -> Question:
    prompt = _tokens(tokenizer, record["prompt"] + record["answer_prefix"])
    return Question(record["id"], prompt[:-1], prompt[-1:], NEEDLE_OUTPUT_TOKENS, record["answers"])


def _document(record: dict[str, Any], tokenizer: Any) -> Question | None:
    if not record["references"]:
        return None
    prompt = _tokens(tokenizer, record["prompt"])
    return Question(record["id"], prompt[:-1], prompt[-1:] + encode(tokenizer, " " + record["references"][0]))


def _tokens(tokenizer: Any, text: str) -> list[int]:
    """A prompt's tokens, with the markers that the model expects at its start."""
    return list(tokenizer(text)["input_ids"])


def library_questions(tokenizer: Any, wishes: Wishes) -> list[Question]:
    """Questions from the text of Python's own library: needles of exactly ``max_prompt`` tokens, and documents."""
    length = min(wishes.max_prompt, max(NEEDLE_PROMPT_TOKENS))
    needles = [
        Question(work.request_id, work.prompt_token_ids[:-1], work.prompt_token_ids[-1:], work.max_tokens, work.answers)
        for work in (needle_requests(tokenizer, length) if wishes.needles != 0 else [])
    ]
    documents: list[Question] = []
    texts = passages(tokenizer, length + CONTINUATION_TOKENS)
    for _ in range(LIBRARY_DOCUMENTS if wishes.documents is None else wishes.documents):
        name, part, text = next(texts)
        documents.append(Question(f"{name}-{part}", text[: length - 1], text[length - 1 :]))
    return spread(needles, wishes.needles) + documents

"""The prompts of experiments: of a file of the user's, else of the data directory, else of Python's library."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vtoken.evaluation.prompt_file import read_prompt_file, tokens_of
from vtoken.evaluation.questions import (
    CONTINUATION_TOKENS,
    Question,
    Wishes,
    damaged,
    data_directory,
    library_questions,
    load_questions,
    read_data,
    spread,
)
from vtoken.evaluation.workloads import Workload, encode, explain_requests, passages

OUTPUT_TOKENS = 128
QUALITY_PROMPT = 512
QUALITY_NEEDLES = 6
QUALITY_PASSAGES = 4
FROM_DATA, FROM_LIBRARY = "from the data directory", "about Python's own library"


@dataclass(frozen=True)
class BenchRequests:
    """Where prompts come from, and where those that were handed out came from.

    Attributes:
        tokenizer: of the model.
        context: tokens that the model can hold.
        file: a user's JSON lines (see ``read_prompt_file``), which then take the place of all others.
        data: the directory that was asked for; else see ``data_directory``.
    """

    tokenizer: Any
    context: int
    file: Path | None = None
    data: Path | None = None
    _handed_out: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def source(self) -> str:
        """In words: of the prompts that were handed out, and before that of those that are looked at first.

        Raises:
            ValueError: one sentence, where the data directory that was asked for does not exist.
        """
        return "prompts " + " and ".join(dict.fromkeys(self._handed_out or [self._first()]))

    def chat(self, count: int, longest: int, shortest: int = 1, max_tokens: int = OUTPUT_TOKENS) -> list[Workload]:
        """``count`` chat prompts of ``shortest`` to ``longest`` tokens, spread over all there are, in their order.

        Each is to produce ``max_tokens`` tokens. Where there are too few, they come again.
        """
        return self._some("chat.jsonl", count, shortest, longest, max_tokens)

    def long(
        self, count: int, longest: int, kind: str = "", shortest: int = 1, max_tokens: int = OUTPUT_TOKENS
    ) -> list[Workload]:
        """The same of long prompts; ``kind`` is "summary", "multi-document QA", or empty for both."""
        return self._some("long.jsonl", count, shortest, longest, max_tokens, kind)

    def exactly(self, count: int, tokens: int, max_tokens: int = OUTPUT_TOKENS) -> list[Workload]:
        """``count`` different prompts of exactly ``tokens`` tokens, of running text.

        Of the user's file that is all its prompts, one after the other and then round again, and of the data directory
        all its texts; where these are shorter than one prompt, Python's library.
        """
        if self.file is not None:
            self._handed_out.append(self._first())
            works = read_prompt_file(self.file, self.tokenizer, self.context, max_tokens=1)
            ring = [token for work in works for token in work.prompt_token_ids]
            step = max(len(ring) // count, 1)
            text = ring * (tokens // len(ring) + 2)  # enough for a prompt from any place in the ring
            starts = [(n * step) % len(ring) for n in range(count)]
            return [Workload(f"text-{n}", text[at : at + tokens], max_tokens) for n, at in enumerate(starts)]
        directory = data_directory(self.data)
        if directory is not None:
            paths = sorted((directory / "text").glob("*.txt"))
            text = [token for path in paths for token in encode(self.tokenizer, read_data(path))]
            if len(text) >= tokens:
                self._handed_out.append(FROM_DATA)
                step = max((len(text) - tokens) // count, 1)
                starts = [(n * step) % (len(text) - tokens + 1) for n in range(count)]
                return [Workload(f"text-{n}", text[at : at + tokens], max_tokens) for n, at in enumerate(starts)]
        self._handed_out.append(FROM_LIBRARY)
        texts = passages(self.tokenizer, tokens)
        return [
            Workload(f"{name}-{part}", text, max_tokens) for name, part, text in (next(texts) for _ in range(count))
        ]

    def quality_questions(self, quick: bool) -> list[Question]:
        """The small set of questions that every gain is seen beside: needles, and passages to go on with."""
        wishes = Wishes(QUALITY_NEEDLES, QUALITY_PASSAGES, QUALITY_PASSAGES, QUALITY_PROMPT, self.data)
        needles = library_questions(self.tokenizer, replace(wishes, documents=0))
        if (directory := data_directory(self.data)) is not None:
            texts, _ = load_questions(self.tokenizer, replace(wishes, needles=0, documents=0))
            if not texts:
                raise ValueError(
                    f"{directory / 'text'} has no *.txt of more than {QUALITY_PROMPT + CONTINUATION_TOKENS} tokens, "
                    "which quality is measured on; put longer texts there."
                )
        else:
            texts = library_questions(self.tokenizer, replace(wishes, needles=0))
        return needles[:2] + texts[:2] if quick else needles + texts

    def _some(
        self, name: str, count: int, shortest: int, longest: int, max_tokens: int, kind: str = ""
    ) -> list[Workload]:
        if self.file is not None:
            every = read_prompt_file(self.file, self.tokenizer, self.context, max_tokens)
        elif (directory := data_directory(self.data)) is not None:
            every = _from_file(directory / name, self.tokenizer, max_tokens, kind)
        else:
            works = explain_requests(self.tokenizer, count, max_tokens)
            every = [replace(work, prompt_token_ids=work.prompt_token_ids[-longest:]) for work in works]
        fitting = [work for work in every if shortest <= len(work.prompt_token_ids) <= longest]
        if not fitting:
            raise ValueError(
                f"none of the {len(every)} prompts {self._first()} has {shortest} to {longest} tokens, as this "
                "experiment needs; give --workload other prompts."
            )
        self._handed_out.append(self._first())
        chosen = spread(fitting, count)
        repeated = [chosen[n % len(chosen)] for n in range(count)]
        return [replace(work, request_id=f"{n}-{work.request_id}") for n, work in enumerate(repeated)]

    def _first(self) -> str:
        """Where prompts are looked for first, which for all but those of an exact length is where they are found."""
        if self.file is not None:
            return f"from {self.file.name}"
        return FROM_LIBRARY if data_directory(self.data) is None else FROM_DATA


def _from_file(path: Path, tokenizer: Any, max_tokens: int, kind: str) -> list[Workload]:
    works = []
    for number, line in enumerate(read_data(path).splitlines(), start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "id" not in record:
                raise ValueError("must be a JSON object with an 'id'; add one.")
            if kind in ("", record.get("kind")):
                works.append(Workload(record["id"], tokens_of(record, tokenizer), max_tokens))
        except json.JSONDecodeError as error:
            raise damaged(path, number, error) from None
        except ValueError as error:  # a sentence, which lacks only the place
            raise ValueError(f"{path}, line {number}: {error}") from None
    return works

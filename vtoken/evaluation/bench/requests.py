"""The prompts of experiments: of a file of the user's, else of the data directory, else of Python's library."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vtoken.evaluation.prompt_file import read_prompt_file, tokens_of
from vtoken.evaluation.questions import Question, Wishes, data_directory, library_questions, load_questions, spread
from vtoken.evaluation.workloads import Workload, encode, explain_requests, passages

OUTPUT_TOKENS = 128
QUALITY_PROMPT = 512
QUALITY_NEEDLES = 6
QUALITY_PASSAGES = 4


@dataclass(frozen=True)
class BenchRequests:
    """Where prompts come from.

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

    @property
    def source(self) -> str:
        """In words."""
        if self.file is not None:
            return f"prompts from {self.file.name}"
        return "prompts from the data directory" if data_directory(self.data) else "prompts about Python's own library"

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
        """``count`` different prompts of exactly ``tokens`` tokens, of running text."""
        directory = None if self.file else data_directory(self.data)
        if directory is not None:
            text = [
                t for path in sorted((directory / "text").glob("*.txt")) for t in encode(self.tokenizer, _read(path))
            ]
            if len(text) >= tokens:
                step = max((len(text) - tokens) // count, 1)
                starts = [(n * step) % (len(text) - tokens + 1) for n in range(count)]
                return [Workload(f"text-{n}", text[at : at + tokens], max_tokens) for n, at in enumerate(starts)]
        texts = passages(self.tokenizer, tokens)
        return [
            Workload(f"{name}-{part}", text, max_tokens) for name, part, text in (next(texts) for _ in range(count))
        ]

    def quality_questions(self, quick: bool) -> list[Question]:
        """The small set of questions that every gain is seen beside: needles, and passages to go on with."""
        wishes = Wishes(QUALITY_NEEDLES, QUALITY_PASSAGES, QUALITY_PASSAGES, QUALITY_PROMPT, self.data)
        needles = library_questions(self.tokenizer, replace(wishes, documents=0))
        if data_directory(self.data) is not None:
            texts, _ = load_questions(self.tokenizer, replace(wishes, needles=0, documents=0))
        else:
            texts = library_questions(self.tokenizer, replace(wishes, needles=0))
        return needles[:2] + texts[:2] if quick else needles + texts

    def _some(
        self, name: str, count: int, shortest: int, longest: int, max_tokens: int, kind: str = ""
    ) -> list[Workload]:
        if self.file is not None:
            every = read_prompt_file(self.file, self.tokenizer, self.context, max_tokens)
        elif (directory := data_directory(self.data)) is not None:
            records = [json.loads(line) for line in _read(directory / name).splitlines()]
            every = [
                Workload(record["id"], tokens_of(record, self.tokenizer), max_tokens)
                for record in records
                if kind in ("", record.get("kind"))
            ]
        else:
            works = explain_requests(self.tokenizer, count, max_tokens)
            every = [replace(work, prompt_token_ids=work.prompt_token_ids[-longest:]) for work in works]
        fitting = [work for work in every if shortest <= len(work.prompt_token_ids) <= longest]
        if not fitting:
            raise ValueError(
                f"none of the {len(every)} {self.source} has {shortest} to {longest} tokens, as this experiment needs; "
                "give --workload other prompts."
            )
        chosen = spread(fitting, count)
        repeated = [chosen[n % len(chosen)] for n in range(count)]
        return [replace(work, request_id=f"{n}-{work.request_id}") for n, work in enumerate(repeated)]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")

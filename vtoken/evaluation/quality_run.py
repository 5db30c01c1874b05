"""The questions under one setting, in a process of its own (see ``run_one``)."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from vtoken.evaluation.load import IDLE_STEPS_BEFORE_GIVING_UP, RunError, Snapshot
from vtoken.evaluation.questions import Question
from vtoken.evaluation.run_one import Emit, listen, with_engine
from vtoken.evaluation.workloads import load_tokenizer

WARM_UP_TOKENS = 256


class Engine(Protocol):
    """The part of ``vtoken.vllm_plugin``'s engine that asking needs."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        max_tokens: int,
        *,
        logprobs: int | None = None,
        forced_tokens: list[int] | None = None,
    ) -> None: ...
    def step(self) -> Sequence[Any]: ...
    def has_unfinished(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True)
class Answer:
    """What came of one question. Field names are the keys of the JSON report.

    Attributes:
        question_id: of the question.
        prompt_tokens: in the prompt, the token held back included.
        found: whether a needle's number was named; None for a document.
        text: what the model chose for a needle; None for a document.
        log_likelihood: mean over the tokens of a document's reference, nats per token; None for a needle.
        scored_tokens: of that reference.
        tokens_evicted: while the question was asked.
        peak_blocks: held after a step, at most.
        prefill_s: seconds until the prompt was computed and reduced.
        decode_step_s: mean seconds of a decode step.
    """

    question_id: str
    prompt_tokens: int
    found: bool | None
    text: str | None
    log_likelihood: float | None
    scored_tokens: int
    tokens_evicted: int
    peak_blocks: int
    prefill_s: float
    decode_step_s: float


def main() -> int:
    return listen(run)


def run(spec: dict[str, Any], emit: Emit) -> int:
    """Ask what ``spec`` says (see ``QualitySpec``) and emit "started", and one "answer" event per question."""

    def work(engine: Engine) -> None:
        emit(event="started")
        questions = [Question(**question) for question in spec["questions"]]
        if not questions:
            return
        tokenizer = load_tokenizer(spec["model"])
        first = questions[0]
        ask(engine, Question("warm-up", first.prompt_token_ids[:WARM_UP_TOKENS], first.forced[:1], 2), tokenizer.decode)
        for question in questions:
            answer = ask(engine, question, tokenizer.decode)
            if spec["vtoken"] is not None and answer.tokens_evicted == 0:
                raise RunError(f"question {question.question_id} was answered without any eviction.")
            emit(event="answer", answer=asdict(answer))

    return with_engine(spec, emit, work)


def ask(
    engine: Engine,
    question: Question,
    decode: Callable[[list[int]], str],
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Ask one question and wait for its answer.

    Args:
        engine: with no unfinished request.
        question: what to ask.
        decode: token ids to text.
        clock: seconds.

    Raises:
        RunError: the request failed, could not be scheduled, or did not say what it was forced to.
    """
    evicted_before = engine.snapshot().tokens_evicted
    start = clock()
    engine.add_request(
        question.question_id,
        question.prompt_token_ids,
        question.max_tokens,
        logprobs=0,
        forced_tokens=question.forced,
    )
    last: Any = None
    first_at = last_at = start
    peak = idle = 0
    while engine.has_unfinished():
        for entry in engine.step():
            last_at = clock()
            first_at = first_at if last else last_at
            last = entry
        state = engine.snapshot()
        peak = max(peak, state.held_blocks)
        idle = 0 if state.running else idle + 1
        if idle >= IDLE_STEPS_BEFORE_GIVING_UP:
            raise RunError(f"question {question.question_id} is never scheduled.")
    if last is None or last.finish_reason != "length":
        raise RunError(f"question {question.question_id} ended early: {last.finish_reason if last else 'no output'}.")
    forced = len(question.forced)
    if last.token_ids[:forced] != question.forced:
        raise RunError(f"question {question.question_id} did not get the tokens that were forced.")
    chosen = decode(last.token_ids[forced:]) if question.answers is not None else None
    scored = [table[token] for token, table in zip(last.token_ids[1:forced], last.logprobs[1:forced], strict=True)]
    return Answer(
        question_id=question.question_id,
        prompt_tokens=len(question.prompt_token_ids) + 1,
        found=None if chosen is None else any(answer in chosen for answer in question.answers or ()),
        text=chosen,
        log_likelihood=sum(scored) / len(scored) if scored else None,
        scored_tokens=len(scored),
        tokens_evicted=engine.snapshot().tokens_evicted - evicted_before,
        peak_blocks=peak,
        prefill_s=first_at - start,
        decode_step_s=(last_at - first_at) / max(len(last.token_ids) - 1, 1),
    )


if __name__ == "__main__":
    sys.exit(main())

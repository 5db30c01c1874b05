"""The engine's side of ``quality``: questions and prompts together; a text ends where the model ends it."""

from typing import Any

from vtoken.evaluation.bench.quality_of import answer, finish, submit
from vtoken.evaluation.load import RunError
from vtoken.evaluation.questions import Question
from vtoken.evaluation.workloads import Workload

ANSWER_AND_WRITE = "vtoken.evaluation.bench.quality_task:answer_and_write"


def answer_and_write(
    engine: Any, questions: list[dict[str, Any]], workloads: list[dict[str, Any]], extra_args: dict[str, Any]
) -> dict[str, Any]:
    """Run questions and prompts, all at once.

    Args:
        engine: with no unfinished request.
        questions: fields of ``Question``.
        workloads: fields of ``Workload``.
        extra_args: of each request.

    Returns:
        answers: as of ``ask``; texts: each prompt's output tokens; tokens_evicted.

    Raises:
        RunError: a request failed, or did not say what it was forced to.
    """
    before = engine.snapshot().tokens_evicted
    asked = [Question(**question) for question in questions]
    works = [Workload(**work) for work in workloads]
    for question in asked:
        submit(engine, question, extra_args)
    for work in works:
        engine.add_request(
            work.request_id,
            work.prompt_token_ids,
            work.max_tokens,
            stop_at_end=True,
            extra_args=extra_args or None,
        )
    last = finish(engine)
    texts = []
    for work in works:
        entry = last.get(work.request_id)
        if entry is None or entry.finish_reason not in ("length", "stop"):
            reason = entry.finish_reason if entry else "no output"
            raise RunError(f"request {work.request_id} ended early: {reason}")
        texts.append(entry.token_ids)
    return {
        "answers": [answer(question, last.get(question.question_id)) for question in asked],
        "texts": texts,
        "tokens_evicted": engine.snapshot().tokens_evicted - before,
    }

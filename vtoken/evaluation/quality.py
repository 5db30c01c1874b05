"""The same questions under native vLLM and under every policy and budget, an engine for each."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vtoken.config import VTokenConfig
from vtoken.core.budget import resolve_budget
from vtoken.evaluation.child import run_child
from vtoken.evaluation.plan import BLOCK_SIZE, engine_arguments, load_model_description
from vtoken.evaluation.quality_report import NATIVE, QualityReport, QualityRun, summary
from vtoken.evaluation.quality_run import Answer
from vtoken.evaluation.questions import Question, Wishes, load_questions
from vtoken.vllm_plugin.engine import FORCED_TOKENS_PROCESSOR

RUN_QUALITY = (sys.executable, "-m", "vtoken.evaluation.quality_run")


@dataclass(frozen=True)
class QualitySpec:
    """One run: ``vtoken`` is None for native vLLM; without questions the engine only starts and ends."""

    model: str
    engine_args: dict[str, Any]
    vtoken: VTokenConfig | None
    questions: Sequence[Question] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "engine_args": self.engine_args,
            "vtoken": self.vtoken.model_dump() if self.vtoken else None,
            "questions": [asdict(question) for question in self.questions],
        }


@dataclass(frozen=True)
class QualityPlan:
    """The questions and the engines they go to; ``configs`` come after native vLLM."""

    model: Path
    engine_args: dict[str, Any]
    configs: list[VTokenConfig]
    questions: list[Question]
    note: str


def make_quality_plan(model: Path, configs: Sequence[VTokenConfig], wishes: Wishes) -> QualityPlan:
    """Choose the questions and the engine arguments.

    Raises:
        ValueError: one sentence, for a model or data that cannot be used, or a budget that evicts nothing.
    """
    text_config, tokenizer = load_model_description(model)
    questions, note = load_questions(tokenizer, wishes)
    for config in configs:
        for question in questions:
            _check_that_it_evicts(config, question)
    longest = max(questions, key=lambda question: question.total_tokens)
    context = int(text_config.max_position_embeddings)
    if longest.total_tokens > context:
        raise ValueError(
            f"question {longest.question_id} needs {longest.total_tokens} tokens, but the context of {model} is "
            f"{context}; use a smaller --max-prompt, or a model with a longer context."
        )
    num_blocks = -(-longest.total_tokens // BLOCK_SIZE)
    engine_args = engine_arguments(text_config, num_blocks, min(num_blocks * BLOCK_SIZE, context), eager=True)
    # What a policy knows must not depend on which prompt came before.
    engine_args["enable_prefix_caching"] = False
    engine_args |= {"logits_processors": [FORCED_TOKENS_PROCESSOR], "logprobs_mode": "raw_logprobs"}
    return QualityPlan(model, engine_args, list(configs), questions, note)


def check_quality_engines(plan: QualityPlan) -> None:
    """Start one engine with vtoken and end it: what is refused is better refused before minutes of native vLLM.

    Raises:
        ValueError: one sentence with the reason.
    """
    for config in plan.configs[:1]:
        run_child(QualitySpec(str(plan.model), plan.engine_args, config), lambda event: None, RUN_QUALITY)


def run_quality(
    plan: QualityPlan, console: Console, save: Callable[[QualityReport], None] = lambda report: None
) -> QualityReport:
    """Ask native vLLM, then each configuration; ``save`` is called with what is known after each of them.

    Raises:
        ValueError: one sentence, for a configuration that is refused at start-up.
        RuntimeError: a run broke off.
    """
    report = QualityReport(str(plan.model), plan.engine_args, plan.note, [])
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed} of {task.total} questions"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        for config in (None, *plan.configs):
            report.runs.append(_run(plan, config, bar))
            console.print(summary(report, report.runs[-1]))
            save(report)
    return report


def _run(plan: QualityPlan, config: VTokenConfig | None, bar: Progress) -> QualityRun:
    """One run in a process of its own."""
    label = f"{config.policy} {config.budget}" if config else NATIVE
    task = bar.add_task(label, total=len(plan.questions))
    answers: list[Answer] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "answer":
            answers.append(Answer(**event["answer"]))
            bar.advance(task)

    start = time.monotonic()
    try:
        run_child(QualitySpec(str(plan.model), plan.engine_args, config, plan.questions), on_event, RUN_QUALITY)
    except RuntimeError as error:
        raise RuntimeError(f"the run of {label} broke off: {error}") from None
    if [answer.question_id for answer in answers] != [question.question_id for question in plan.questions]:
        raise RuntimeError(f"the run of {label} ended with {len(answers)} of {len(plan.questions)} answers")
    bar.remove_task(task)
    return QualityRun(config, answers, time.monotonic() - start)


def _check_that_it_evicts(config: VTokenConfig, question: Question) -> None:
    tokens = len(question.prompt_token_ids)
    budget = resolve_budget(config, tokens)
    if tokens <= budget - config.interval:
        raise ValueError(
            f"a budget of {budget} tokens keeps all {tokens} tokens of question {question.question_id}; use smaller "
            "--budgets, protect fewer tokens, or ask longer prompts."
        )

"""What a policy at a budget costs in quality, to be seen beside everything that it gains.

Whatever the way of reclaiming, the same tokens are attended, so one engine answers for all of them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from vtoken.config import RequestOptions, VTokenConfig
from vtoken.evaluation.bench.engines import RunningEngine
from vtoken.evaluation.bench.tables import Column
from vtoken.evaluation.load import RunError
from vtoken.evaluation.questions import Question
from vtoken.vllm_plugin.engine import FORCED_TOKENS_PROCESSOR

ASK = "vtoken.evaluation.bench.quality_of:ask"
ENGINE_ARGS: dict[str, Any] = {
    "num_blocks": 256,
    "max_model_len": 1024,
    "logits_processors": [FORCED_TOKENS_PROCESSOR],
    "logprobs_mode": "raw_logprobs",
}
"""Of the engines that are asked; an experiment with the same ones shares them."""
QUALITY_COLUMNS = (
    Column("needles found"),
    Column("native finds"),
    Column("log-likelihood against native, nats per token", 3, signed=True),
)
"""For a table, beside what was gained; filled by ``quality_cells``."""


class QualityOf:
    """Asks a small set of questions, all at once, and each setting only once.

    Args:
        engine: ``Bench.engine``.
        questions: needles and passages.
        decode: token ids to text.
        policies: which a request may ask for.
    """

    def __init__(
        self,
        engine: Callable[..., RunningEngine],
        questions: Sequence[Question],
        decode: Callable[[list[int]], str],
        policies: Sequence[str],
    ) -> None:
        self._engine, self._questions, self._decode = engine, questions, decode
        self._policies = policies
        self._known: dict[str, dict[str, Any]] = {}

    def __call__(self, policy: str, budget: int | float, **settings: Any) -> dict[str, Any]:
        """See ``Bench.quality_of``.

        Args:
            policy, budget: of every question.
            settings: further ones, of ``VTokenConfig``.

        Returns:
            needles, needles_found, native_needles_found; log_likelihood, in nats per token of the passages'
            continuations, and log_likelihood_change, against native vLLM; tokens_evicted.
        """
        key = json.dumps([policy, budget, settings], sort_keys=True)
        if key not in self._known:
            if "native" not in self._known:
                self._engine(None, **ENGINE_ARGS)  # starts while the other one does
            of_engine = {name: value for name, value in settings.items() if name not in RequestOptions.model_fields}
            of_request = {name: value for name, value in settings.items() if name in RequestOptions.model_fields}
            config = offering(self._policies, **of_engine)
            asked = {"policy": policy, "budget": budget, **of_request}
            found = self._ask(config, {f"vtoken.{name}": value for name, value in asked.items()})
            native = self._ask(None, {})
            self._known[key] = {
                "policy": policy,
                "budget": budget,
                **found,
                "native_needles_found": native["needles_found"],
                "log_likelihood_change": found["log_likelihood"] - native["log_likelihood"],
            }
        return self._known[key]

    def _ask(self, config: VTokenConfig | None, extra_args: dict[str, Any]) -> dict[str, Any]:
        if config is None and "native" in self._known:
            return self._known["native"]
        engine = self._engine(config, **ENGINE_ARGS)
        told = engine.do(ASK, questions=[asdict(question) for question in self._questions], extra_args=extra_args)
        if config is not None and told["tokens_evicted"] == 0:
            raise RuntimeError(f"nothing was evicted under {extra_args}, so there is no quality to tell")
        hits, likelihoods = [], []
        for question, (tokens, scores) in zip(self._questions, told["answers"], strict=True):
            if question.answers is not None:
                text = self._decode(tokens[len(question.forced) :])
                hits.append(any(answer in text for answer in question.answers))
            else:
                likelihoods.append(fmean(scores[1:]))
        found = {
            "needles": len(hits),
            "needles_found": sum(hits),
            "log_likelihood": fmean(likelihoods),
            "tokens_evicted": told["tokens_evicted"],
        }
        if config is None:
            self._known["native"] = found
        return found


def quality_cells(quality: Mapping[str, Any]) -> tuple[str, str, float]:
    """What ``QualityOf`` returned, under ``QUALITY_COLUMNS``."""
    needles = quality["needles"]
    return (
        f"{quality['needles_found']} of {needles}",
        f"{quality['native_needles_found']} of {needles}",
        quality["log_likelihood_change"],
    )


def in_words(quality: Mapping[str, Any]) -> str:
    """What ``QualityOf`` found, as a sentence for a table's note."""
    return (
        f"Quality of {quality['policy']} at {quality['budget']:g}, however blocks are reclaimed: "
        f"{quality['needles_found']} of {quality['needles']} hidden numbers found (full cache: "
        f"{quality['native_needles_found']}), log-likelihood of running text {quality['log_likelihood_change']:+.3f} "
        "nats per token against the full cache."
    )


def offering(
    policies: Sequence[str], options: Mapping[str, dict[str, Any]] | None = None, **settings: Any
) -> VTokenConfig:
    """Settings of an engine whose requests name their policy and budget.

    Args:
        policies: which they may ask for.
        options: of policies, by name.
        settings: further ones, of ``VTokenConfig``.
    """
    on_offer = {name: (options or {}).get(name, {}) for name in policies}
    return VTokenConfig(policy="streaming_llm", budget=0.5, request_policies=on_offer, **settings)


def ask(engine: Any, questions: list[dict[str, Any]], extra_args: dict[str, Any]) -> dict[str, Any]:
    """Ask all questions at once.

    Returns:
        answers: for each question its output tokens, and the log-likelihood of each forced one; tokens_evicted.

    Raises:
        RunError: a request failed, or did not say what it was forced to.
    """
    before = engine.snapshot().tokens_evicted
    asked = [Question(**question) for question in questions]
    for question in asked:
        submit(engine, question, extra_args)
    last = finish(engine)
    answers = [answer(question, last.get(question.question_id)) for question in asked]
    return {"answers": answers, "tokens_evicted": engine.snapshot().tokens_evicted - before}


def submit(engine: Any, question: Question, extra_args: dict[str, Any]) -> None:
    engine.add_request(
        question.question_id,
        question.prompt_token_ids,
        question.max_tokens,
        logprobs=0,
        forced_tokens=question.forced,
        extra_args=extra_args or None,
    )


def finish(engine: Any) -> dict[str, Any]:
    """Run all requests to their ends; returns each one's last progress."""
    last: dict[str, Any] = {}
    while engine.has_unfinished():
        last |= {entry.request_id: entry for entry in engine.step()}
    return last


def answer(question: Question, entry: Any) -> tuple[list[int], list[float]]:
    """Output tokens, and the log-likelihood of each forced one. Raises RunError, as ``ask``."""
    forced = len(question.forced)
    if entry is None or entry.finish_reason != "length" or entry.token_ids[:forced] != question.forced:
        raise RunError(f"question {question.question_id} was not answered as it was asked")
    scores = [row[token] for token, row in zip(entry.token_ids[:forced], entry.logprobs[:forced], strict=True)]
    return entry.token_ids, scores

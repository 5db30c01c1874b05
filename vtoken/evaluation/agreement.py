"""Do the ways of reclaiming blocks compute the same? The same prompts, the same victims, logit by logit.

Where tokens are taken greedily, rounding may flip a near tie and everything after it. So one run records victims and
outputs, and the others are given both: every logit of every output can then be compared.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.core.trace import Incarnation, Trace
from vtoken.evaluation.recorded_victims import POLICY, write_victims
from vtoken.evaluation.workloads import Workload

TOP = 5
"""Logits that are compared at each output: the likeliest of either run that both have listed."""


@dataclass(frozen=True)
class Run:
    """One request's outcome.

    Attributes:
        token_ids: what it produced, or was given.
        logits: for each output the likeliest tokens' raw logits.
        life: its forwards, and what it forgot after each.
    """

    token_ids: list[int]
    logits: list[dict[int, float]]
    life: Incarnation


@dataclass(frozen=True)
class ModeRun:
    """All requests under one configuration, with the engine's totals."""

    config: VTokenConfig
    runs: dict[str, Run]
    tokens_evicted: int
    tokens_moved: int
    blocks_reclaimed: int


@dataclass
class Agreement:
    """How another mode's logits compare with those of the recorded run. Field names are the keys of the JSON report.

    Attributes:
        outputs: tokens compared.
        largest_difference: between two logits of the same token.
        other_choices: outputs at which the likeliest token is another one.
        widest_tie: the largest gap between the two likeliest logits at one of these.
        identical_requests: requests without such an output, which greedy decoding would therefore have repeated.
    """

    outputs: int = 0
    largest_difference: float = 0.0
    other_choices: int = 0
    widest_tie: float = 0.0
    identical_requests: int = 0
    requests: int = 0

    def holds(self, tolerance: float) -> bool:
        """Nothing differs by more than ``tolerance``, and another token is likeliest only where two nearly tie."""
        return self.largest_difference <= tolerance and self.widest_tie <= tolerance


def run_mode(
    model: Path,
    config: VTokenConfig,
    workloads: Sequence[Workload],
    engine_args: dict[str, Any],
    given: dict[str, list[int]] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> ModeRun:
    """Run all requests at once.

    Args:
        given: outputs that each request is forced to; else it chooses its own.
        tick: called for every request that is done.
    """
    from vtoken.vllm_plugin import make_engine
    from vtoken.vllm_plugin.engine import FORCED_TOKENS_PROCESSOR

    engine = make_engine(
        str(model),
        config.model_copy(update={"record_trace": True}),
        **{"logprobs_mode": "raw_logits", "logits_processors": [FORCED_TOKENS_PROCESSOR], **engine_args},
    )
    try:
        for work in workloads:
            forced = None if given is None else given[work.request_id]
            engine.add_request(
                work.request_id, work.prompt_token_ids, work.max_tokens, logprobs=TOP, forced_tokens=forced
            )
        last: dict[str, Any] = {}
        while engine.has_unfinished():
            for entry in engine.step():
                last[entry.request_id] = entry
                if entry.finish_reason is not None:
                    tick()
        traces, totals = engine.take_traces(), engine.snapshot()
    finally:
        engine.shutdown()
    runs = {}
    for req_id, entry in last.items():
        if entry.finish_reason not in ("length", "stop"):
            raise RuntimeError(f"request {req_id} ended with {entry.finish_reason}")
        (life,) = traces[req_id].incarnations
        runs[req_id] = Run(entry.token_ids, entry.logprobs, life)
    return ModeRun(config, runs, totals.tokens_evicted, totals.tokens_moved, totals.blocks_reclaimed)


def replaying(config: VTokenConfig, recorded: ModeRun, workloads: Sequence[Workload], file: Path) -> VTokenConfig:
    """A configuration that takes the victims of a recorded run."""
    write_victims(file, ((work.prompt_token_ids, Trace([recorded.runs[work.request_id].life])) for work in workloads))
    return config.model_copy(update={"policy": POLICY, "policy_options": {"file": str(file)}})


def compare(recorded: ModeRun, other: ModeRun) -> Agreement:
    """Compare two runs of the same requests with the same outputs.

    Raises:
        RuntimeError: victims or outputs are not the same, so there is nothing to compare.
    """
    found = Agreement(requests=len(recorded.runs))
    for req_id, one in recorded.runs.items():
        two = other.runs[req_id]
        if _evictions(one.life) != _evictions(two.life) or one.token_ids != two.token_ids:
            raise RuntimeError(f"request {req_id} has other victims or outputs than were recorded")
        choices = 0
        for a, b in zip(one.logits, two.logits, strict=True):
            found.outputs += 1
            common = a.keys() & b.keys()
            found.largest_difference = max(found.largest_difference, *(abs(a[t] - b[t]) for t in common))
            if max(a, key=a.__getitem__) != max(b, key=b.__getitem__):
                choices += 1
                best, second = sorted(a.values(), reverse=True)[:2]
                found.widest_tie = max(found.widest_tie, best - second)
        found.other_choices += choices
        found.identical_requests += choices == 0
    return found


def _evictions(life: Incarnation) -> list[list[int]]:
    """In order, whatever forwards lie between: a prompt may have been cut into others."""
    return [sorted(tokens) for tokens in life.victims if tokens]


@dataclass(frozen=True)
class TextSimilarity:
    """Two modes' own texts, request by request. Field names are the keys of the JSON report."""

    requests: int
    identical: int
    rouge_l: float
    median_length_ratio: float


def compare_texts(one: Sequence[str], two: Sequence[str], lengths: Sequence[tuple[int, int]]) -> TextSimilarity:
    """Share of identical texts, mean ROUGE-L F1, and the median of length ratios.

    Args:
        one, two: texts, request by request.
        lengths: tokens of each pair.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    scores = [scorer.score(a, b)["rougeL"].fmeasure for a, b in zip(one, two, strict=True)]
    return TextSimilarity(
        len(scores),
        sum(a == b for a, b in zip(one, two, strict=True)),
        statistics.mean(scores),
        statistics.median(b / a for a, b in lengths),
    )

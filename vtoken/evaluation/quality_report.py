"""What eviction cost in needles and in likelihood, as one table and as one JSON file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from vtoken.config import VTokenConfig
from vtoken.evaluation.quality_run import Answer

NATIVE = "none"
RESAMPLES = 10_000
COVERAGE = 0.95


@dataclass(frozen=True)
class QualityRun:
    """One setting's answers; ``config`` is None for native vLLM, ``seconds`` include the engine's start.

    Times are medians over the questions; what is evicted is summed up over them.
    """

    config: VTokenConfig | None
    answers: list[Answer]
    seconds: float

    @property
    def policy(self) -> str:
        return self.config.policy if self.config else NATIVE

    @property
    def needles(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.found is not None]

    @property
    def needles_found(self) -> int:
        return sum(bool(answer.found) for answer in self.needles)

    @property
    def log_likelihoods(self) -> dict[str, float]:
        """Nats per token of each document's reference, by question id."""
        return {a.question_id: a.log_likelihood for a in self.answers if a.log_likelihood is not None}

    @property
    def log_likelihood(self) -> float | None:
        """Mean over documents, of nats per token; None without documents."""
        return float(np.mean(list(self.log_likelihoods.values()))) if self.log_likelihoods else None

    @property
    def tokens_evicted(self) -> int:
        return sum(answer.tokens_evicted for answer in self.answers)

    @property
    def peak_blocks(self) -> int:
        return max(answer.peak_blocks for answer in self.answers)

    @property
    def prefill_s(self) -> float:
        return float(np.median([answer.prefill_s for answer in self.answers]))

    @property
    def decode_step_s(self) -> float:
        return float(np.median([answer.decode_step_s for answer in self.answers]))


@dataclass(frozen=True)
class QualityReport:
    """All that was found out; the first run is native vLLM's. ``note`` says where the questions come from."""

    model: str
    engine_args: dict[str, Any]
    note: str
    runs: list[QualityRun]

    def differences(self, run: QualityRun) -> list[float]:
        """Log-likelihood under ``run`` minus that under native vLLM, document by document, nats per token."""
        native = self.runs[0].log_likelihoods
        return [value - native[name] for name, value in run.log_likelihoods.items()]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "engine_args": self.engine_args,
            "questions": self.note,
            "runs": [self._run_to_json(run) for run in self.runs],
        }

    def _run_to_json(self, run: QualityRun) -> dict[str, Any]:
        differences = [] if run.config is None else self.differences(run)
        return {
            "policy": run.policy,
            "budget": run.config.budget if run.config else None,
            "vtoken_config": run.config.model_dump() if run.config else None,
            "needles": len(run.needles),
            "needles_found": run.needles_found,
            "documents": len(run.log_likelihoods),
            "log_likelihood": run.log_likelihood,
            "difference": float(np.mean(differences)) if differences else None,
            "difference_interval": bootstrap_interval(differences),
            "tokens_evicted": run.tokens_evicted,
            "peak_blocks": run.peak_blocks,
            "prefill_s": run.prefill_s,
            "decode_step_s": run.decode_step_s,
            "seconds": run.seconds,
            "answers": [asdict(answer) for answer in run.answers],
        }


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Bounds of the mean at 95 %: percentiles of the means of resampled values; None for fewer than two values.

    Efron, "Bootstrap methods: another look at the jackknife", 1979.
    """
    if len(values) < 2:
        return None
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


def quality_table(report: QualityReport) -> Table:
    """One row per policy and budget, native vLLM first."""
    grid = Table(title="Quality under eviction", caption="log-likelihood: mean over documents, in nats per token")
    grid.add_column("policy", no_wrap=True)
    for heading in (
        "budget",
        "needles\nfound",
        "log-\nlikelihood",
        "differ-\nence",
        "its 95 %\ninterval",
        "tokens\nevicted",
        "peak\nblocks",
        "prefill",
        "decode\nstep",
    ):
        grid.add_column(heading, justify="right", overflow="fold")
    for run in report.runs:
        grid.add_row(run.policy, *_cells(report, run))
    return grid


def summary(report: QualityReport, run: QualityRun) -> str:
    """One run in one line, for those who wait."""
    budget, needles, likelihood, difference, *_ = _cells(report, run)
    cost = f" ({difference})" if difference else ""
    return (
        f"{run.policy} {budget}: {needles} needles, {likelihood or 'no'} nats/token{cost}, "
        f"{run.tokens_evicted:,} tokens evicted, {run.seconds:.0f} s"
    )


def _cells(report: QualityReport, run: QualityRun) -> list[str]:
    differences = [] if run.config is None else report.differences(run)
    interval = bootstrap_interval(differences)
    return [
        str(run.config.budget) if run.config else "all",
        f"{run.needles_found} of {len(run.needles)}",
        "" if run.log_likelihood is None else f"{run.log_likelihood:.3f}",
        f"{np.mean(differences):+.3f}" if differences else "",
        f"{interval[0]:+.3f} to {interval[1]:+.3f}" if interval else "",
        f"{run.tokens_evicted:,}",
        str(run.peak_blocks),
        f"{run.prefill_s:.1f} s",
        f"{run.decode_step_s * 1000:.0f} ms",
    ]

"""Running experiments one after another: each one's results are on disk before the next one starts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vtoken.evaluation.bench.base import Check, Experiment
from vtoken.evaluation.bench.bench import Bench, bench_dtype
from vtoken.evaluation.bench.engines import EnginePool
from vtoken.evaluation.bench.report import Report, checks_table, read_report, setting
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.plan import load_model_description


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; None leaves the choice to the experiments."""

    model: Path
    out: Path
    quick: bool = False
    repeat: int | None = None
    workload: Path | None = None
    data: Path | None = None
    openvino: Path | None = None


def measure_all(experiments: Sequence[Experiment], wishes: Wishes, console: Console) -> bool:
    """Measure, show and write. Returns whether everything held that must.

    Raises:
        ValueError: one sentence, for what the user has to change.
        RuntimeError: a run broke off; what was measured before it is on disk.
    """
    text_config, tokenizer = load_model_description(wishes.model)
    context = int(text_config.max_position_embeddings)
    requests = BenchRequests(tokenizer, context, wishes.workload, wishes.data)
    held = []
    with EnginePool() as engines:
        bench = Bench(
            wishes.model, text_config, requests, engines, console, wishes.quick, wishes.repeat, wishes.openvino
        )
        for experiment in experiments:
            console.rule(experiment.name)
            start, engines_before = time.monotonic(), engines.started
            runs = experiment.measure(bench)
            if not wishes.quick:
                engines.close()
            seconds = time.monotonic() - start
            about = setting(wishes.model.name, bench_dtype(), wishes.quick, seconds, requests.source)
            report = Report(experiment.name, runs, about)
            report.write(experiment, wishes.out)
            held.append(show(report, experiment, console))
            started = engines.started - engines_before
            console.print(f"{experiment.name}: {seconds:.0f} s, {started} engines started")
            console.print(f"written: {wishes.out / experiment.name}.json, .md, .svg and .png", soft_wrap=True)
    return all(held)


def show_again(experiments: Sequence[Experiment], directory: Path, console: Console) -> bool:
    """Tables, figures and checks of what lies in a directory, without measuring. Returns as ``measure_all``.

    Raises:
        ValueError: one sentence, where a result is missing or damaged.
    """
    held = []
    for experiment in experiments:
        report = read_report(directory / f"{experiment.name}.json")
        report.write(experiment, directory)
        held.append(show(report, experiment, console))
    return all(held)


def show(report: Report, experiment: Experiment, console: Console) -> bool:
    """Print an experiment's question and tables. Returns whether everything held that must."""
    console.print(experiment.question, soft_wrap=True)
    for table in experiment.tables(report.runs):
        console.print(table.to_rich())
    checks: list[Check] = experiment.checks(report.runs)
    console.print(checks_table(checks).to_rich())
    if conclusion := experiment.conclusion(report.runs):
        console.print(conclusion, soft_wrap=True)
    return all(check.held for check in checks if check.kind == "must")

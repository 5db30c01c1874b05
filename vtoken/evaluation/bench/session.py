"""Running experiments one after another: each one's results are on disk before the next one starts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from vtoken.evaluation.bench.base import Check, Experiment
from vtoken.evaluation.bench.bench import Bench, bench_dtype
from vtoken.evaluation.bench.engines import EnginePool
from vtoken.evaluation.bench.html import write_page
from vtoken.evaluation.bench.report import DAMAGE, FAILED, Report, checks_table, read_report, setting
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.plan import load_model_description
from vtoken.evaluation.questions import data_directory


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

    Where there are several experiments, what the user has to change for one of them is told, counts as not held, and
    does not keep the others from running.

    Raises:
        ValueError: one sentence, for what the user has to change: for the only experiment, or for all of them.
        RuntimeError: a run broke off; what was measured before it is on disk.
    """
    text_config, tokenizer = load_model_description(wishes.model)
    context = int(text_config.max_position_embeddings)
    requests = BenchRequests(tokenizer, context, wishes.workload, wishes.data)
    data_directory(wishes.data)  # refuses one that is not there before anything runs
    held = []
    with EnginePool() as engines:
        bench = Bench(
            wishes.model, text_config, requests, engines, console, wishes.quick, wishes.repeat, wishes.openvino
        )
        for experiment in experiments:
            console.rule(experiment.name)
            bench.requests = replace(requests)  # which notes what it handed out, for this experiment alone
            try:
                held.append(_measure(experiment, bench, wishes.out))
            except ValueError as error:
                if len(experiments) == 1:
                    raise
                sentence = str(error).removeprefix("vtoken: ")
                console.print(f"{FAILED} {experiment.name}: {sentence}", markup=False, soft_wrap=True)
                held.append(False)
            finally:
                if not wishes.quick:
                    engines.close()
    console.print(f"written: {write_page(experiments, wishes.out)}", soft_wrap=True)
    return all(held)


def _measure(experiment: Experiment, bench: Bench, out: Path) -> bool:
    """One experiment; the raw runs are on disk before anything is computed from them."""
    engines, console = bench.engines, bench.console
    start, started, compiled = time.monotonic(), engines.started, engines.compiled
    runs = experiment.measure(bench)
    seconds = time.monotonic() - start
    eager = engines.compiled == compiled
    about = setting(bench.model.name, bench_dtype(), bench.quick, seconds, bench.requests.source, eager)
    report = Report(experiment.name, runs, about)
    report.keep(out)
    report.write(experiment, out)
    held = show(report, experiment, console)
    console.print(f"{experiment.name}: {seconds:.0f} s, {engines.started - started} engines started")
    console.print(f"written: {out / experiment.name}.json, .md, .svg and .png", soft_wrap=True)
    return held


def show_again(experiments: Sequence[Experiment], directory: Path, console: Console) -> bool:
    """Tables, figures and checks of what lies in a directory, without measuring. Returns as ``measure_all``.

    Raises:
        ValueError: one sentence, where a result is missing or damaged.
    """
    held = []
    for experiment in experiments:
        path = directory / f"{experiment.name}.json"
        report = read_report(path)
        try:
            report.write(experiment, directory)
        except DAMAGE as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is damaged or of another version ({reason}); measure it again.") from None
        held.append(show(report, experiment, console))
    console.print(f"written: {write_page(experiments, directory)}", soft_wrap=True)
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

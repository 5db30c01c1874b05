"""The same work twice on the same small block budget: native vLLM, then vLLM with vtoken."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vtoken.config import VTokenConfig
from vtoken.core.history import Frame, Recording
from vtoken.evaluation.child import RunSpec, run_child
from vtoken.evaluation.measure import RunResult, median_of
from vtoken.evaluation.plan import Plan
from vtoken.evaluation.recorder import read_frame
from vtoken.evaluation.report import DemoReport

RUNS = ("native", "vtoken")
RUNS_WITH_NAIVE = ("native", "none", "vtoken")
MOST_FRAMES = 600
SECONDS_BETWEEN_LOG_LINES = 15.0


def check_engine(plan: Plan, config: VTokenConfig) -> None:
    """Start an engine with these settings once and end it: what it refuses is better refused before minutes of runs.

    Raises:
        ValueError: one sentence with the reason.
    """
    engine_args = plan.engine_args | {"enforce_eager": True}
    run_child(RunSpec(str(plan.model), engine_args, config), lambda event: None)


def run_demo(plan: Plan, repeat: int, console: Console) -> DemoReport:
    """Run native and vtoken in turn, ``repeat`` times each; with ``plan.naive`` naive eviction, too, and record.

    Raises:
        ValueError: one sentence, for a configuration that is refused at start-up.
        RuntimeError: a run broke off.
    """
    names = RUNS if plan.naive is None else RUNS_WITH_NAIVE
    results: dict[str, list[RunResult]] = {name: [] for name in names}
    recordings: list[Recording] = []
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        for turn in range(repeat):
            for name in names:
                label = name if repeat == 1 else f"{name} {turn + 1}/{repeat}"
                result, frames = _run(plan, name, _Line(plan, label, bar))
                results[name].append(result)
                if frames and turn == 0:
                    recordings.append(_recording(plan, name, frames))
    return DemoReport(
        model=str(plan.model),
        engine_args=plan.engine_args,
        vtoken_config=plan.config.model_dump(),
        block_size=plan.engine_args["block_size"],
        num_blocks=plan.num_blocks,
        needles=len(plan.needles),
        runs={name: median_of(results[name]) for name in names},
        repeats=[{name: results[name][turn] for name in names} for turn in range(repeat)],
        recordings=recordings,
    )


def _config(plan: Plan, name: str) -> VTokenConfig | None:
    return {"native": None, "none": plan.naive, "vtoken": plan.config}[name]


def _recording(plan: Plan, name: str, frames: list[Frame]) -> Recording:
    config = _config(plan, name)
    assert config is not None
    label = "naive eviction" if name == "none" else "vtoken"
    return Recording(label, config.summary(), plan.engine_args["block_size"], plan.num_blocks, frames)


def _run(plan: Plan, name: str, line: "_Line") -> tuple[RunResult, list[Frame]]:
    """One run in a process of its own: its figures, and frames where they are asked for."""
    config = _config(plan, name)
    wanted = MOST_FRAMES if plan.naive is not None and config is not None else 0
    spec = RunSpec(str(plan.model), plan.engine_args, config, plan.workloads, plan.needles, wanted)
    results: list[RunResult] = []
    frames: list[Frame] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "started":
            if event["num_blocks"] != plan.num_blocks:
                raise RuntimeError(f"vLLM has {event['num_blocks']} blocks instead of {plan.num_blocks}")
            line.started()
        elif event["event"] == "progress":
            line.progress(event)
        elif event["event"] == "frames":
            frames.extend(map(read_frame, event["frames"]))
        elif event["event"] == "result":
            results.append(RunResult(**event["result"]))

    try:
        run_child(spec, on_event)
    except RuntimeError as error:
        raise RuntimeError(f"the {name} run broke off: {error}") from None
    if not results:
        raise RuntimeError(f"the {name} run ended without a result")
    line.finished()
    return results[0], frames


class _Line:
    """One run's line of progress; in a log file, which shows no moving bar, a plain line now and then."""

    def __init__(self, plan: Plan, label: str, bar: Progress) -> None:
        self._plan, self._label, self._bar = plan, label, bar
        self._requests = len(plan.workloads)
        self._tokens = sum(work.max_tokens for work in plan.workloads)
        self._task = bar.add_task(label, total=None, state="starting vLLM")
        self._due = time.monotonic() + SECONDS_BETWEEN_LOG_LINES

    def started(self) -> None:
        self._bar.reset(self._task, total=self._tokens, state="warming up")

    def progress(self, event: dict[str, Any]) -> None:
        state = (
            f"{event['requests_done']}/{self._requests} requests  {event['output_tokens']:,} tokens  "
            f"{event['running']} running  {event['held_blocks']}/{self._plan.num_blocks} blocks"
        )
        if event["requests_done"] == self._requests:
            state = f"asking {len(self._plan.needles)} needles"
        self._bar.update(self._task, completed=event["output_tokens"], state=state)
        if not self._bar.console.is_terminal and time.monotonic() >= self._due:
            self._due = time.monotonic() + SECONDS_BETWEEN_LOG_LINES
            self._bar.console.print(f"{self._label}: {state}")

    def finished(self) -> None:
        state = f"{self._requests}/{self._requests} requests  {self._tokens:,} tokens"
        self._bar.update(self._task, completed=self._tokens, state=state)

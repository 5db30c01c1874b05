"""All results of a directory as one page: questions, figures, tables and checks, and the pool where it was recorded."""

from collections.abc import Sequence
from pathlib import Path

from vtoken.core.history import Recording
from vtoken.evaluation.bench.base import Experiment
from vtoken.evaluation.bench.catalogue import MODULES, load_experiment
from vtoken.evaluation.bench.report import DAMAGE, Report, checks_table, read_report, setting_line
from vtoken.evaluation.bench.tables import Table
from vtoken.view import Grid, Section, report_page

NAME = "report.html"
TITLE = "vtoken bench: what was asked, and what was found"


def write_page(experiments: Sequence[Experiment], directory: Path) -> Path:
    """Write a page about these experiments and all others whose results lie there; returns its path.

    Results that cannot be read or shown are left out.
    """
    named = {experiment.name: experiment for experiment in experiments}
    for name in MODULES:
        if name not in named and (directory / f"{name}.json").is_file():
            named[name] = load_experiment(name)
    order = [*(name for name in MODULES if name in named), *(name for name in named if name not in MODULES)]
    sections: list[Section] = []
    recordings: list[Recording] = []
    for experiment in map(named.__getitem__, order):
        try:
            report = read_report(directory / f"{experiment.name}.json")
            section = section_of(report, experiment, (directory / f"{experiment.name}.svg").read_text(encoding="utf-8"))
            recorded = experiment.recordings(report.runs)
        except (OSError, *DAMAGE):
            continue
        sections.append(section)
        recordings += recorded
    page = directory / NAME
    page.write_text(report_page(TITLE, recordings, sections), encoding="utf-8")
    return page


def section_of(report: Report, experiment: Experiment, figure: str) -> Section:
    """One experiment's part of the page; ``figure`` is its SVG."""
    tables = [*experiment.tables(report.runs)]
    if checks := experiment.checks(report.runs):
        tables.append(checks_table(checks))
    conclusion = experiment.conclusion(report.runs)
    return Section(
        report.name,
        [experiment.question],
        [_grid(table) for table in tables],
        figure,
        [*([conclusion] if conclusion else []), setting_line(report.setting)],
    )


def _grid(table: Table) -> Grid:
    numbers = frozenset(n for n in range(len(table.columns)) if not table.is_text(n))
    return Grid(table.title, [column.heading for column in table.columns], table.shown(), numbers, table.note)
